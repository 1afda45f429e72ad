"""Engines of INT8 files that other tools wrote, before and after `fp4deploy audit --fix`.

    python -m benchmarks.qdq_placement [--json benchmarks/results/qdq_placement_sm120.json]

One small network with residuals, BatchNorm, a skip connection, pooling and upsampling, quantised by ONNX Runtime's
tool, by torchao's export quantisation (torch.ao's successor, as for QAT) and by ModelOpt, each with its defaults and as
a user may have set it. Every file is built for SM120 without a GPU; the ledger counts kernels and what multiplies in
INT8. Decibels: the fixed file against the original one in ONNX Runtime. Nothing was timed. The tools that are not
installed are left out: pip install onnxruntime torchao nvidia-modelopt.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

from benchmarks.peers import origin
from fp4deploy.errors import InputError
from fp4deploy.export.engine.build import build_engine
from fp4deploy.interop.placement import with_placed_quantizers
from fp4deploy.system.onnx_runtime import ort

SHAPE = (2, 3, 64, 64)


class Block(nn.Module):
    """Two convolutions with BatchNorm, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one, self.norm_one = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.two, self.norm_two = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        """x + f(x), then ReLU."""
        return torch.relu(x + self.norm_two(self.two(torch.relu(self.norm_one(self.one(x))))))


class Network(nn.Module):
    """Two levels and a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, padding=1)
        self.first, self.second = Block(32), Block(64)
        self.fuse, self.head = nn.Conv2d(96, 32, 3, padding=1), nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [N, 4, H, W]."""
        skip = self.first(torch.relu(self.stem(x)))
        y = self.second(torch.relu(self.down(nn.functional.max_pool2d(skip, 2))))
        y = nn.functional.interpolate(y, scale_factor=2.0, mode="nearest")
        return self.head(nn.functional.silu(self.fuse(torch.cat([skip, y], 1))))


def network() -> Network:
    """With random weights and statistics, evaluated."""
    torch.manual_seed(0)
    made = Network()
    for module in made.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return made.eval()


def _export(model: Any, path: Path, **options: Any) -> None:
    names = {"input_names": ["image"], "output_names": ["logits"]}
    torch.onnx.export(model, (_image(),), str(path), **names, **options)


def _image() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def onnx_runtime(path: Path, **options: Any) -> None:
    """By `onnxruntime.quantization`."""
    tool = importlib.import_module("onnxruntime.quantization")  # ONNX Runtime itself has been imported by now

    class Images(tool.CalibrationDataReader):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            self.left = [{"image": _image().numpy()}]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    plain = path.with_suffix(".plain.onnx")
    _export(network(), plain, opset_version=17, dynamo=False)
    tool.quantize_static(plain, path, Images(), per_channel=True, extra_options=options)


def torchao(path: Path) -> None:
    """By torchao's quantisation of an exported graph, prepared for QAT."""
    from torchao.quantization.pt2e import move_exported_model_to_eval
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    config = get_symmetric_quantization_config(is_per_channel=True, is_qat=True)
    graph = torch.export.export(network().train(), (_image(),)).module()
    model = prepare_qat_pt2e(graph, XNNPACKQuantizer().set_global(config))
    for _ in range(3):
        model(_image())
    converted = convert_pt2e(model)
    move_exported_model_to_eval(converted)
    _export(converted, path, opset_version=21, dynamo=True)


def modelopt(path: Path, outputs: bool = False) -> None:
    """By ModelOpt; outputs: with the quantisers of convolutions' outputs switched on as well."""
    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.INT8_DEFAULT_CFG)
    if outputs:
        entry = {"quantizer_name": "*output_quantizer", "cfg": {"num_bits": 8, "axis": None}}
        config["quant_cfg"].append({"parent_class": "nn.Conv2d", **entry})
    model = mtq.quantize(network(), config, lambda each: each(_image()))
    _export(model, path, opset_version=17, dynamo=False)


SYMMETRIC = {"ActivationSymmetric": True, "WeightSymmetric": True, "QuantizeBias": False}
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "ONNX Runtime, defaults": ("onnxruntime", onnx_runtime),
    "ONNX Runtime, symmetric, float biases": ("onnxruntime", lambda path: onnx_runtime(path, **SYMMETRIC)),
    "torchao, QAT of an exported graph": ("torchao", torchao),
    "ModelOpt, INT8_DEFAULT_CFG": ("modelopt", modelopt),
    "ModelOpt, with output quantisers": ("modelopt", lambda path: modelopt(path, outputs=True)),
}


def engine(path: Path) -> dict[str, Any]:
    """What the ledger says of a file's engine, or why there is none."""
    try:
        ledger = build_engine(path, path.with_suffix(".plan"), arch="sm120").ledger
    except InputError as error:
        return {"refused": str(error)[:300]}
    elementwise = sum(not kernel.multiplies for kernel in ledger.engine)
    counts = {"kernels": len(ledger.engine), "elementwise": elementwise, "bytes": ledger.plan_bytes}
    return {**counts, "shares": ledger.shares(), "version": ledger.backend_version}


def decibels(one: Path, other: Path) -> float:
    """Signal to difference of two files on one image."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [ort.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in (one, other)]
    first, second = (session.run(None, {"image": _image().numpy()})[0] for session in sessions)
    return float(10 * np.log10(np.square(first).sum() / max(np.square(first - second).sum(), 1e-30)))


def measured(name: str, folder: Path) -> dict[str, Any]:
    """One file, before and after."""
    before, after = folder / "before.onnx", folder / "after.onnx"
    FILES[name][1](before)
    fixed, edits = with_placed_quantizers(onnx.load(before))
    onnx.save(fixed, after)
    row = {"file": name, "edits": len(edits), "exact": sum(edit.exact for edit in edits)}
    row |= {"before": engine(before), "after": engine(after), "decibels": round(decibels(before, after), 1)}
    print(row, flush=True)
    return row


def main() -> None:
    """Every file whose tool is installed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name, (package, _) in FILES.items():
        if importlib.util.find_spec(package) is not None:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measured(name, Path(folder)))
    from fp4deploy.bench.environment import environment

    found = {**origin(), "command": "python -m benchmarks.qdq_placement", "machine": environment(), "rows": rows}
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
