"""What 4/6 costs a training step of the UNet, in 1-D and in 2-D blocks, measured as pairs.

    python benchmarks/four_over_six_cost.py --json benchmarks/results/four_over_six_cost_h200.json

Both steps of a pair are in memory, each as one CUDA graph, and run in turn: plain, 4/6, plain, 4/6, ... A ratio is the
median over the pairs, with the quartiles, so that a change of the GPU's clock meets both. Batch 16, 352 x 480, 12
classes, our fused kernels, activations with a static scale; the pairs differ in the quantisers alone:

| pair | plain | 4/6 |
|---|---|---|
| 1-D, weights | nvfp4_qat | nvfp4_4o6_weight_qat |
| 1-D, weights and activations | nvfp4_qat | nvfp4_4o6_qat |
| 2-D, weights | nvfp4_qat_2d | the same with 4/6 of the weights |
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peers import captured, machine
from training_step import CLASSES, make_step

from fp4deploy.formats import FourOverSix
from fp4deploy.models import build_unet
from fp4deploy.qat import RECIPES, Recipe, prepare
from fp4deploy.qat.fused_unet import fuse_unet

TWO_D = RECIPES["nvfp4_qat_2d"]
PAIRS: dict[str, tuple[Recipe, Recipe]] = {
    "1-D, weights": (RECIPES["nvfp4_qat"], RECIPES["nvfp4_4o6_weight_qat"]),
    "1-D, weights and activations": (RECIPES["nvfp4_qat"], RECIPES["nvfp4_4o6_qat"]),
    "2-D, weights": (
        TWO_D,
        replace(TWO_D, name="nvfp4_4o6_qat_2d", weight=replace(TWO_D.weight, four_over_six=FourOverSix())),  # type: ignore[type-var]
    ),
}


def step_of(recipe: Recipe, scale: float) -> Callable[[], Any]:
    """A training step as a CUDA graph; as it is where it cannot be captured."""
    torch.manual_seed(0)
    model = prepare(build_unet(CLASSES, scale), recipe).cuda().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    step = make_step(fuse_unet(model).train(), torch.channels_last)
    try:
        return captured(step)
    except Exception as error:
        torch.cuda.synchronize()
        print(f"{recipe.name}: no graph ({type(error).__name__}: {str(error)[:100]})", flush=True)
        return step


def milliseconds(step: Callable[[], Any]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def measure(name: str, scale: float, pairs: int) -> dict[str, Any]:
    """Times of one pair of recipes."""
    plain, other = (step_of(recipe, scale) for recipe in PAIRS[name])
    for _ in range(5):
        plain()
        other()
    times = [(milliseconds(plain), milliseconds(other)) for _ in range(pairs)]
    ratios = torch.tensor([b / a for a, b in times])
    low, middle, high = ratios.quantile(torch.tensor([0.25, 0.5, 0.75])).tolist()
    medians = torch.tensor(times).median(0).values.tolist()
    row = {"pair": name, "scale": scale, "plain_ms": medians[0], "four_over_six_ms": medians[1], "pairs": pairs}
    row |= {"ratio": middle, "ratio_quartiles": [low, high]}
    print(
        f"scale {scale}  {name:30s} {medians[0]:8.2f} {medians[1]:8.2f} ms  x{middle:.3f} [{low:.3f}, {high:.3f}]",
        flush=True,
    )
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--scale", type=float, nargs="*", default=[1.0, 0.25])
    parser.add_argument("--pairs", type=int, default=40)
    arguments = parser.parse_args()
    rows = []
    for scale in arguments.scale:
        for name in PAIRS:
            try:
                rows.append(measure(name, scale, arguments.pairs))
            except Exception as error:
                rows.append({"pair": name, "scale": scale, "error": f"{type(error).__name__}: {error}"[:300]})
                print(rows[-1], flush=True)
            torch.cuda.empty_cache()
            if arguments.json:
                command = "python benchmarks/four_over_six_cost.py"
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(
                    json.dumps({"command": command, "machine": machine(), "rows": rows}, indent=1) + "\n"
                )


if __name__ == "__main__":
    main()
