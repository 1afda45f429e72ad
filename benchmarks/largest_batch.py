"""The largest batch that a training step of the UNet fits into the memory of one GPU, and its images a second.

    python benchmarks/largest_batch.py --json benchmarks/results/largest_batch_h200.json

The step of `training_step.py`, launched, of the rows of --cases: batches of 8, 16, 24, ... images of 352 x 480. The
size doubles until the step runs out of memory, then the largest one that does not is found by bisection. A size fits if
three steps run. Images a second are those of the largest batch.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import command, machine
from training_step import Case, cases, make_step, median_ms

STEP = 8  # images
CASES = ("fp16 unfused, NCHW", "fp16 fused", "fp16 fused, recomputed", "nvfp4 fused", "nvfp4 fused, recomputed")


def largest(fits: Callable[[int], bool], first: int = 2) -> int:
    """The largest number for which `fits` is true; it is true up to there. 0 if it is false for 1."""
    low, high = 0, first
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def run(case: Case, batch: int) -> float | None:
    """Milliseconds of a step; None if it does not fit."""
    _, make, _, layout, kernels = case
    os.environ["FP4DEPLOY_KERNELS"] = kernels
    try:
        return median_ms(make_step(make().train().to(memory_format=layout), layout, batch), 3, 3)
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def measure(case: Case, scale: float) -> dict[str, Any]:
    """One row: the largest batch that fits, and its speed."""
    batch = STEP * largest(lambda count: run(case, STEP * count) is not None)
    row: dict[str, Any] = {"scale": scale, "case": case[0], "batch": batch}
    ms = run(case, batch) if batch else None
    return row | ({"ms": ms, "images_per_s": 1000 * batch / ms} if ms else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="names of rows of training_step.py")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in cases(arguments.scale):
        if case[0] not in arguments.cases:
            continue
        rows.append(measure(case, arguments.scale))
        print(json.dumps(rows[-1]), flush=True)
        if arguments.json:
            report = {"command": command(), "machine": machine(), "rows": rows}
            report["memory_gb"] = torch.cuda.get_device_properties(0).total_memory / 1e9
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
