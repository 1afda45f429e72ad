"""What becomes of networks of transformers and diffusers: from `prepare` to a packed network, one row each.

    python -m benchmarks.transformers_table --json benchmarks/results/transformers_cpu.json
    python -m benchmarks.transformers_table --only gpt2 --only vit

| stage | what it shows |
|---|---|
| prepare | `fp4deploy.prepare` and `calibrate`: layers in FP4, and the share of the parameters that they hold |
| train | one step of AdamW through fake quantisation: loss and gradients finite, share of parameters with a gradient |
| export | `fp4deploy.export_onnx`: outputs compared with torch in what they mean, before the file is written |
| runtime | `open_runtime` of that file in ONNX Runtime: largest distance to torch, relative to the output's norm |
| packed | `fp4deploy.pack`: its own comparison, then `open_runtime` of the file, the same distance |
| engine | TensorRT-RTX for SM120, built without a GPU: GEMMs in FP4, and layers that fell back (`--engine`) |

Networks are of the libraries' own classes in tiny configurations with random weights, and inputs are random: nothing is
downloaded, and nothing here is an accuracy. Stages are independent: what one refuses is recorded with its message, and
the next is tried. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import fp4deploy as fd
from benchmarks.transformers_networks import NETWORKS, Inputs
from fp4deploy.errors import Fp4DeployError
from fp4deploy.qat import deployed, quantized_layers
from fp4deploy.qat.experts import experts_of


def build(name: str) -> tuple[nn.Module, Inputs]:
    """A network with random weights, and inputs for it; both are the same each time."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    kind = _found(network.library, network.kind)
    if not network.config:
        model = kind(**network.settings)
    else:
        model = kind(_found(network.library, network.config)(**network.settings))
    return model.eval(), network.inputs()


def _found(library: str, path: str) -> Any:
    """A class of a library, which both import lazily."""
    module, _, name = f"{library}.{path}".rpartition(".")
    return getattr(importlib.import_module(module), name)


def measure(name: str, engine: bool = False) -> dict[str, Any]:
    """The row of one network: a dict a stage, with "error" where the stage was refused."""
    row: dict[str, Any] = {"model": name, "class": NETWORKS[name].kind.rpartition(".")[2]}
    built = _stage(row, "build", lambda: build(name))
    if built is None:
        return row
    model, inputs = built
    if _stage(row, "prepare", lambda: _prepare(model, inputs)) is None:
        return row
    _stage(row, "train", lambda: _train(model, inputs))
    model.eval()
    with tempfile.TemporaryDirectory() as folder:
        onnx, packed = Path(folder) / "model.onnx", Path(folder) / "model.fp4"
        if _stage(row, "export", lambda: _export(model, inputs, onnx)) is not None:
            _stage(row, "runtime", lambda: _opened(model, inputs, onnx))
            if engine:
                _stage(row, "engine", lambda: _engine(onnx))
        _stage(row, "packed", lambda: _packed(model, inputs, packed))
    return row


def _stage(row: dict[str, Any], name: str, run: Callable[[], Any]) -> Any:
    """Run a stage and record what it gives, its seconds or its error; None where it was refused."""
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = run()
    except Fp4DeployError as error:
        row[name] = {"error": str(error)}
        return None
    except Exception as error:  # a row, not the end of the table
        row[name] = {"error": f"{type(error).__name__}: {str(error)[:300]}", "traceback": True}
        return None
    own = [
        str(each.message) for each in warned if "fp4deploy" in each.filename or "With free sizes" in str(each.message)
    ]
    numbers = found if isinstance(found, dict) else {}
    row[name] = {**numbers, **({"warnings": own} if own else {}), "seconds": round(time.perf_counter() - start, 2)}
    return found


def _prepare(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    plans = fd.layer_plan(model, example_inputs=inputs)
    fd.prepare(model, example_inputs=inputs)
    fd.calibrate(model, inputs)
    total = sum(each.numel() for each in model.parameters())
    quantised = sum(each.weight.numel() for each in quantized_layers(model).values())
    for experts in experts_of(model).values():
        quantised += sum(experts._parameters[each].numel() for each in experts.names)  # type: ignore[union-attr]
    return {
        "layers": len(plans),
        "fp4_layers": sum(plan.precision != "FP16" for plan in plans),
        "parameters": total,
        "fp4_share": round(quantised / total, 4),
    }


def _train(model: nn.Module, inputs: Inputs) -> dict[str, Any]:
    """One step towards outputs of zeros."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    loss = torch.stack([each.float().square().mean() for each in _outputs(model(**inputs))]).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [each.grad for each in model.parameters() if each.grad is not None]
    optimizer.step()
    reached = sum(each.numel() for each in gradients) / sum(each.numel() for each in model.parameters())
    finite = bool(loss.isfinite()) and all(bool(each.isfinite().all()) for each in gradients)
    return {"loss": round(loss.item(), 4), "finite": finite, "with_gradient": round(reached, 4)}


def _export(model: nn.Module, inputs: Inputs, path: Path) -> dict[str, Any]:
    agreement = fd.export_onnx(model, inputs, path).verification
    return {"bytes": path.stat().st_size, "compared": agreement.sentence(), "passed": agreement.passed}


def _packed(model: nn.Module, inputs: Inputs, path: Path) -> dict[str, Any]:
    agreement = fd.pack(model, path, example_inputs=inputs).verification
    found = {"bytes": path.stat().st_size, "compared": agreement.sentence(), "passed": agreement.passed}
    return found | _opened(model, inputs, path)


@torch.inference_mode()
def _opened(model: nn.Module, inputs: Inputs, path: Path) -> dict[str, Any]:
    """A file in the runtime that its suffix asks for, beside torch."""
    given = fd.open_runtime(path)(inputs)
    arrays = list(given.values()) if isinstance(given, dict) else [given]
    expected = _outputs(deployed(model)(**inputs))
    if len(arrays) != len(expected):
        raise ValueError(f"{len(arrays)} outputs instead of {len(expected)}")
    pairs = zip(map(torch.from_numpy, arrays), expected, strict=True)
    return {"distance": max(float((a.float() - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs)}


def _outputs(result: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]


def _engine(canonical: Path) -> dict[str, Any]:
    built = fd.build_engine(canonical, canonical.with_suffix(".plan"), arch="sm120")
    totals = built.ledger.totals()
    return {"bytes": built.size_bytes, "fp4_gemms": totals.fp4_gemms, "fallbacks": totals.fell_back}


def cells(row: Mapping[str, Any]) -> list[str]:
    """A row as text."""

    def text(stage: str, form: Callable[[Mapping[str, Any]], str]) -> str:
        found = row.get(stage)
        return "" if found is None else "refused" if "error" in found else form(found)

    return [
        row["model"],
        text("prepare", lambda found: f"{found['fp4_layers']} of {found['layers']}, {found['fp4_share']:.0%}"),
        text("train", lambda found: f"{found['loss']:.3g}" if found["finite"] else "not finite"),
        text("export", lambda found: "agrees" if found["passed"] else "differs"),
        text("runtime", lambda found: f"{found['distance']:.1e}"),
        text("packed", lambda found: f"{found['distance']:.1e}"),
        text("engine", lambda found: f"{found['fp4_gemms']}, {found['fallbacks']}") or "not measured",
    ]


HEADINGS = ("model", "layers in FP4, share", "loss", "export", "ONNX Runtime", "packed", "engine")


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for name in ("transformers", "diffusers", "onnx", "onnxruntime", "tensorrt-rtx"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _commit() -> str:
    command = ["git", "rev-parse", "--short=8", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent).stdout.strip()


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(NETWORKS), help="a network; repeatable")
    parser.add_argument("--engine", action="store_true", help="build engines, where TensorRT-RTX is installed")
    parser.add_argument("--json", type=Path, help="write the rows here")
    options = parser.parse_args()
    given = [each for each in sys.argv[1:] if each not in ("--json", str(options.json))]
    table: dict[str, Any] = {
        "benchmark": "transformers_table",
        "command": " ".join(["python -m benchmarks.transformers_table", *given]),
        "commit": _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, no GPU used",
        "versions": _versions(),
        "rows": [],
    }
    print(" | ".join(HEADINGS))
    for name in options.only or NETWORKS:
        row = measure(name, options.engine)
        table["rows"].append(row)
        print(" | ".join(cells(row)), flush=True)
        for stage, found in row.items():
            if isinstance(found, dict) and "error" in found:
                print(f"    {stage}: {found['error']}", flush=True)
            for warned in found.get("warnings", ()) if isinstance(found, dict) else ():
                print(f"    {stage}: warned: {warned}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
