"""A lower bound of a training step through FP4 products: a PROJECTION from published peaks, not a measurement.

    python -m benchmarks.roofline_training --json benchmarks/results/roofline_training_projected.json

**Nothing here was measured on a Blackwell GPU.** Each pass takes max(operations / peak, bytes / bandwidth), the
roofline of the peaks in `fp4deploy.peaks`, and every real kernel is slower. The passes of a convolution that FP4 takes:

| pass | FP16 reads and writes | FP4 reads and writes |
|---|---|---|
| pack input | | x in FP16; its codes along channels (fprop) and along pixels (wgrad) |
| fprop | x, w; y | x, w in FP4; y in FP16 |
| pack gradient | | dy in FP16; its codes along outputs (dgrad) and along pixels (wgrad) |
| dgrad | dy, w; dx | dy, w in FP4; dx in FP16 |
| wgrad | dy, x; dw in FP32 | dy, x in FP4; dw in FP32 |

The first convolution needs no dgrad. GroupNorm + ReLU reads its input twice in the forward, and input and gradient
twice in the backward; it is the same on both sides, as are the layers that stay in FP16. Concatenation, pooling, loss,
optimiser and the packing of weights (once a step, small beside activations) are left out on both sides. `H200` packs
its operands too and multiplies them at the FP16 peak.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.roofline import FP4, FP16, LABEL, Work, layers
from fp4deploy.peaks import GPUS, Gpu

FP32 = 4.0
STATEMENT = "Projected from published peaks. Nothing was measured on a Blackwell GPU."


def passes(work: Work, first: bool) -> list[Work]:
    """What a training step does for one layer of the forward pass; first: no gradient of its input is needed."""
    if work.kind == "norm":
        y = work.elements[-1]
        return [
            _norm(f"{work.name}, forward", FP16 * 3 * y),
            _norm(f"{work.name}, backward", FP16 * 5 * y),
        ]
    x, w, y = work.elements
    products = [("fprop", x, w, FP16 * y), ("dgrad", y, w, FP16 * x), ("wgrad", y, x, FP32 * w)]
    found = []
    for name, a, b, written in products:
        if name == "dgrad" and first:
            continue
        wide, narrow = FP16 * (a + b) + written, FP4 * (a + b) + written
        packed = narrow if work.fp4_operands else wide
        found.append(Work(f"{work.name}, {name}", name, work.operations, wide, packed, work.fp4_operands, ()))
    if work.fp4_operands:
        for name, size in (("pack input", x), ("pack gradient", y)):
            found.append(Work(f"{work.name}, {name}", "pack", 0.0, 0.0, (FP16 + 2 * FP4) * size, False, ()))
    return found


def seconds(work: Work, gpu: Gpu, nvfp4: bool) -> float:
    """The roofline: H200 multiplies FP4 operands at its FP16 peak."""
    peak = gpu.fp4 if nvfp4 and work.fp4_operands and gpu.fp4 is not None else gpu.fp16
    moved = work.bytes_nvfp4 if nvfp4 else work.bytes_fp16
    return max(work.operations / (peak * 1e12), moved / (gpu.bandwidth * 1e12))


def _norm(name: str, moved: float) -> Work:
    return Work(name, "norm", 0.0, moved, moved, False, ())


def main() -> None:
    """Print the sums by pass, and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 1.0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, nargs=2, default=(352, 480), metavar=("HEIGHT", "WIDTH"))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    print(f"{LABEL}: {STATEMENT}")
    rows: list[dict[str, Any]] = []
    for scale in options.scales:
        forward = layers(scale, 12, options.batch, *options.size)
        works = [each for number, work in enumerate(forward) for each in passes(work, number == 0)]
        for gpu in GPUS:
            by_pass: dict[str, list[float]] = {}
            for work in works:
                sums = by_pass.setdefault(work.kind, [0.0, 0.0])
                for side, nvfp4 in enumerate((False, True)):
                    sums[side] += 1e3 * seconds(work, gpu, nvfp4)
            fp16, fp4 = (sum(sums[side] for sums in by_pass.values()) for side in (0, 1))
            parts = {kind: {"fp16_ms": sums[0], "fp4_ms": sums[1]} for kind, sums in by_pass.items()}
            row = {"label": LABEL, "gpu": gpu.name, "scale": scale, "fp16_ms": fp16, "fp4_ms": fp4}
            rows.append({**row, "ratio": fp16 / fp4, "passes": parts})
            print(f"{LABEL}  {gpu.name:9s} scale {scale:g}: FP16 {fp16:.2f} ms, FP4 {fp4:.2f} ms, {fp16 / fp4:.2f}")
    if options.json:
        shape = {"batch": options.batch, "height": options.size[0], "width": options.size[1]}
        command = "python -m benchmarks.roofline_training"
        document = {"statement": STATEMENT, "command": command, **shape, "rows": rows}
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
