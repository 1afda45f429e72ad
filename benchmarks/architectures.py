"""What becomes of many architectures: from `prepare` to an engine, one row each.

    python -m benchmarks.architectures --json benchmarks/results/architectures_cpu.json
    python -m benchmarks.architectures --only unet:0.25 --only monai:BasicUNet --no-engine

A row says how many layers are planned in FP4, whether one QAT step gives finite gradients, whether the canonical ONNX
computes what torch computes (argmax against the model as deployed, end to end and by the gate of `verify`), and what
TensorRT-RTX builds of it for SM120: the share of multiply-accumulates in FP4 GEMMs and the layers that fell back. A
refusal is a row with its message. Weights are random, so nothing here is an accuracy; nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import Fp4DeployError
from fp4deploy.models import build_model, parse_spec

CLASSES = 5
SIZE = (64, 96)
ARCHITECTURES: dict[str, dict[str, Any]] = {  # spec -> arguments
    "unet:0.25": {},
    "smp:Unet/resnet18": {},
    "smp:UnetPlusPlus/resnet18": {},
    "smp:FPN/resnet18": {},
    "smp:PSPNet/resnet18": {},
    "smp:DeepLabV3Plus/resnet18": {},
    "smp:Segformer/mit_b0": {},
    "torchvision:deeplabv3_mobilenet_v3_large": {},
    "torchvision:lraspp_mobilenet_v3_large": {},
    "torchvision:fcn_resnet50": {},
    "monai:BasicUNet": {},
    "monai:SegResNet": {},
    "monai:AttentionUnet": {"channels": [16, 32, 64], "strides": [2, 2]},
    "timm:resnet18": {},
    "timm:convnext_atto": {},
    "timm:mobilenetv3_small_100": {},
}


def measure(text: str, arguments: dict[str, Any], engine: bool = True, size: tuple[int, int] = SIZE) -> dict[str, Any]:
    """The row of one architecture; "error" holds the message of the step that refused it."""
    row: dict[str, Any] = {"model": text, "arguments": arguments}
    torch.manual_seed(0)
    images = torch.randn(2, 3, *size).half().float()
    try:
        row["step"] = "build"
        model = build_model(parse_spec(text, arguments), CLASSES)
        row["step"] = "prepare"
        plans = fd.layer_plan(model)
        row |= {"layers": len(plans), "fp4_layers": sum(plan.precision == "FP4" for plan in plans)}
        fd.prepare(model)
        fd.calibrate(model, images)
        row["step"] = "train"
        row["finite_step"] = _train_once(model, images)
        row["step"] = "export"
        canonical = fd.export_graph(model.eval(), (3, *size))
        row["onnx_bytes"] = canonical.ByteSize()
        row["step"] = "verify"
        agreement = fd.verify(model, canonical, images)
        row |= {"argmax": agreement.share, "verified": agreement.passed}
        if engine:
            row["step"] = "engine"
            row |= _build(canonical)
        del row["step"]
    except Fp4DeployError as error:
        row["error"] = str(error)
    except Exception as error:  # a row, not the end of the table
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["traceback"] = True
    return row


def _train_once(model: nn.Module, images: torch.Tensor) -> bool:
    model.train()
    loss = model(images).logsumexp(1).mean()
    loss.backward()
    return all(bool(each.grad.isfinite().all()) for each in model.parameters() if each.grad is not None)


def _build(canonical: onnx.ModelProto) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(canonical, path)
        built = fd.build_engine(path, path.with_suffix(".plan"), arch="sm120", conv="auto")
        totals = built.ledger.totals()
        return {
            "plan_bytes": built.size_bytes,
            "fp4_gemms": totals.fp4_gemms,
            "fp4_mac_share": totals.fp4_mac_share,
            "fallbacks": totals.fell_back,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="a model spec; repeatable")
    parser.add_argument("--json", type=Path, help="write the table here, row by row")
    parser.add_argument("--no-engine", action="store_true", help="build no engine")
    options = parser.parse_args()
    engine = not options.no_engine and find_spec("tensorrt_rtx") is not None
    table: dict[str, Any] = {
        "command": " ".join(["python -m benchmarks.architectures", *sys.argv[1:]]),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "size": list(SIZE),
        "rows": [],
    }
    for text in options.only or ARCHITECTURES:
        table["rows"].append(measure(text, ARCHITECTURES.get(text, {}), engine))
        print(json.dumps(table["rows"][-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
