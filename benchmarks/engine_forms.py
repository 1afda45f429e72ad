"""What each `--conv` form of an engine multiplies in FP4, FP8 and FP16, and how large its plan is.

    python benchmarks/engine_forms.py --json benchmarks/results/engine_forms_sm120.json

Networks of random weights, calibrated on random images: neither shares nor bytes depend on the values. Engines are
built by TensorRT-RTX for SM120, which needs no GPU; shares are the ledger's, read from the compiler's log, beside the
FP16 plan of the same network. The plugins of `--conv plugin` need the full TensorRT: their shares are those of the plan
that `fp4deploy check` prints, without a size. Nothing is run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from peers import command, origin
from torch import nn

import fp4deploy as fd
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.ledger.shares import in_words, shares_of
from fp4deploy.export.lowering.lower import lower, read_buildable
from fp4deploy.models import build_model, parse_spec

NETWORKS = ("unet:0.25", "unet:1.0", "smp:Unet/resnet34", "smp:Segformer/mit_b0")
BUILT, PLANNED = ("auto", "gemm", "fp8", "qdq"), ("plugin",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), metavar="MODEL")
    parser.add_argument("--size", type=int, nargs=2, default=[352, 480], metavar=("H", "W"))
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    versions = {name: version(name) for name in ("fp4deploy", "torch", "tensorrt-rtx")}
    found: dict[str, Any] = {"command": command(), **origin(), "versions": versions, "size": arguments.size, "rows": []}
    for name in arguments.networks:
        for row in forms(name, tuple(arguments.size)):
            found["rows"].append(row)
            print(f"{name:24s} {row['form']:8s} {in_words(row['shares']):44s} {row.get('plan_bytes')}", flush=True)
            arguments.json.write_text(json.dumps(found, indent=1) + "\n")


def forms(name: str, size: tuple[int, int]) -> list[dict[str, Any]]:
    """A row for the FP16 engine, and for each form of the quantised one."""
    with tempfile.TemporaryDirectory() as folder:
        half, four = Path(folder, "half.onnx"), Path(folder, "four.onnx")
        exported(name, size, half, quantised=False)
        exported(name, size, four, quantised=True)
        rows = [built(name, half, "fp16", "auto"), *(built(name, four, form, form) for form in BUILT)]
        for form in PLANNED:
            plan = lower(read_buildable(four), form, "tensorrt").layers
            shares = shares_of((layer.compute, layer.macs) for layer in plan)
            rows.append({"network": name, "form": form, "shares": shares, "planned": True})
        return rows


def exported(name: str, size: tuple[int, int], path: Path, quantised: bool) -> None:
    """The canonical ONNX file of a network of random weights."""
    torch.manual_seed(0)
    model: nn.Module = build_model(parse_spec(name, {}, None), 12).eval()
    image = torch.rand(1, 3, *size)
    if quantised:
        fd.prepare(model, "nvfp4_qat")
        fd.calibrate(model, [image])
    fd.export_onnx(model, image, path, verify=False)


def built(name: str, path: Path, form: str, conv: str) -> dict[str, Any]:
    """What the engine of a form is."""
    ledger = build_engine(path, path.with_suffix(".plan"), arch="sm120", conv=conv).ledger
    totals = ledger.totals()
    return {
        "network": name,
        "form": form,
        "requested": totals.requested,
        "shares": totals.actual,
        "not_as_requested": totals.not_as_requested,
        "fallbacks": totals.fell_back,
        "plan_bytes": ledger.plan_bytes,
        "constant_bytes": totals.constant_bytes,
        "kernels": totals.engine_layers,
    }


if __name__ == "__main__":
    main()
