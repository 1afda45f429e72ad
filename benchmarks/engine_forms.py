"""What each form of FP4 convolutions becomes in a TensorRT-RTX engine: built and inspected, not run.

    python benchmarks/engine_forms.py --scale 0.25 --json benchmarks/results/engine_forms_cpu.json

Builds the NVFP4 UNet (weights as initialised, calibrated on noise: precision and size do not depend on them) for SM120
with `--conv auto`, `qdq` and `gemm`. Of each plan: its bytes, the share of the multiply-accumulates in FP4, FP8 and
FP16 products, and the seconds of the compiler. No GPU is needed, and nothing here is a time of inference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from pathlib import Path

import onnx
import torch

from fp4deploy.bench.environment import environment
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.models import build_unet
from fp4deploy.qat import calibrate, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=0.25)
    parser.add_argument("--size", type=int, nargs=2, default=(352, 480), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--forms", nargs="+", default=["auto", "qdq", "gemm"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = prepare(build_unet(12, options.scale).eval())
    calibrate(model, torch.randn(1, 3, 64, 64))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "unet.onnx"
        onnx.save(export_graph(model, (3, *options.size)), path)
        for form in options.forms:
            built = build_engine(path, Path(folder) / f"{form}.plan", conv=form)
            macs: Counter[str] = Counter()
            for row in built.ledger.layers:
                macs[row.actual] += row.macs
            total = sum(macs.values())
            rows.append(
                {
                    "conv": form,
                    "plan_bytes": built.size_bytes,
                    "constant_bytes": built.ledger.totals().constant_bytes,
                    "kernels": len(built.ledger.engine),
                    "fallbacks": len(built.ledger.fallbacks()),
                    "mac_share": {name: round(count / total, 5) for name, count in macs.items() if count},
                    "build_seconds": round(built.seconds, 1),
                }
            )
            print(rows[-1], flush=True)
    if options.json:
        document = {
            "statement": "Built and inspected, not run.",
            "command": f"python benchmarks/engine_forms.py --scale {options.scale:g}",
            "arch": "sm120",
            "scale": options.scale,
            "size": list(options.size),
            "environment": environment(),
            "rows": rows,
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
