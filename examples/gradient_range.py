"""What becomes of the gradients when NVFP4's block scales have no global scale.

    python examples/gradient_range.py

E4M3's smallest value is 2^-9. Without a global scale a block's scale is E4M3(amax / 6): it has the full precision only
for amax >= 6 * 2^-6, and a block with amax <= 6 * 2^-10 rounds to zero altogether. The gradients of a mean over
a batch lie below that. The first table takes the output gradients of the quantised layers of `vit_digits.py`, trained
in FP32, at four moments and counts; blocks run along the output features, as in the dgrad GEMM. The
second trains `fp4_all_the_way` with and without a global scale, everything else equal.

A static global amax of 6 * 448 makes S = 1: that is NVFP4 with no global scale, by the same code.
"""

from __future__ import annotations

import argparse
import json
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from digits import FP32, Result, Settings, run, split, table, train
from torch import nn
from vit_digits import SETTINGS, VisionTransformer

from fp4deploy.bench.environment import environment
from fp4deploy.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, fake_quantize_nvfp4
from fp4deploy.qat import prepare, quantized_layers, restore
from fp4deploy.qat.operators import quantizers

NO_GLOBAL_SCALE = torch.tensor(E2M1_MAX * E4M3_MAX)
SMALLEST_SCALE = 2.0**-9
RECIPE = "fp4_all_the_way"
KINDS = ("zero_blocks", "relative_error")


def output_gradients(model: nn.Module, batch: int) -> dict[str, torch.Tensor]:
    """G [tokens, features] of each layer that a recipe would quantise, for the first `batch` training images."""
    names = list(quantized_layers(prepare(model, RECIPE)))
    restore(model)
    gradients: dict[str, torch.Tensor] = {}
    handles = [
        model.get_submodule(name).register_full_backward_hook(
            lambda layer, inputs, outputs, name=name: gradients.update({name: outputs[0].flatten(0, -2)})
        )
        for name in names
    ]
    images, labels, _, _ = split()
    F.cross_entropy(model(images[:batch]), labels[:batch], label_smoothing=SETTINGS.label_smoothing).backward()
    for handle in handles:
        handle.remove()
    return {name: gradients[name] for name in names}


def count(gradient: torch.Tensor) -> dict[str, float]:
    """Median block amax, and the percent of what is lost, of the blocks and elements that are not zero."""
    amax = gradient.unflatten(-1, (-1, NVFP4_BLOCK)).abs().amax(-1)
    alive, nonzero = amax > 0, gradient != 0
    row = {
        "median_block_amax": amax[alive].median().item(),
        "blocks_below_smallest_scale": _percent(amax[alive] < E2M1_MAX * SMALLEST_SCALE),
    }
    for name, static in (("without", NO_GLOBAL_SCALE), ("with", None)):
        quantized, _ = fake_quantize_nvfp4(gradient, amax=static)
        kept = quantized.unflatten(-1, (-1, NVFP4_BLOCK)).abs().amax(-1) > 0
        row |= {
            f"zero_blocks_{name}": _percent(~kept[alive]),
            f"relative_error_{name}": ((quantized - gradient).norm() / gradient.norm()).item(),
            f"zero_elements_{name}": _percent(quantized[nonzero] == 0),
        }
    return row


def _percent(mask: torch.Tensor) -> float:
    return 100 * mask.float().mean().item()


def counted(settings: Settings, steps: list[int]) -> list[dict[str, Any]]:
    """A row for each length of FP32 training (seed 0) and each layer."""
    rows: list[dict[str, Any]] = []
    for step in steps:
        torch.manual_seed(0)
        model = VisionTransformer()
        if step:
            train(model, settings, 0, step)
        for name, gradient in output_gradients(model, settings.batch).items():
            rows.append({"step": step, "layer": name.removeprefix("block."), **count(gradient)})
    return rows


def trained(settings: Settings, seeds: int) -> dict[str, list[Result]]:
    """FP32, the recipe, and the recipe without global scales."""
    original = quantizers.fake_quantize_nvfp4

    def without(x: torch.Tensor, axes: tuple[int, ...], amax: Any, *options: Any, **more: Any) -> Any:
        return original(x, axes, NO_GLOBAL_SCALE, *options, **more)

    results: dict[str, list[Result]] = {FP32: [], RECIPE: [], f"{RECIPE}, no global scale": []}
    for seed in range(seeds):
        for (name, rows), recipe in zip(results.items(), (FP32, RECIPE, RECIPE), strict=True):
            function = without if "no global" in name else original
            with patch.object(quantizers, "fake_quantize_nvfp4", function):
                rows.append(run(VisionTransformer, recipe, settings, seed, all_layers=False))
            print(f"seed {seed}  {name:34s} {rows[-1].accuracy:6.2f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description="What becomes of gradients without NVFP4's global scale.")
    parser.add_argument("--seeds", type=int, default=5, help="of the trained comparison; 0 leaves it out (default 5)")
    parser.add_argument("--epochs", type=int, default=SETTINGS.epochs)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(arguments.epochs)
    last = settings.epochs * (len(split()[1]) // settings.batch)
    rows = counted(settings, [0, last // 10, last // 2, last])
    print("| steps | layer | median block amax | zero blocks without | with | error without | with |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for row in rows:
        blocks, errors = ([row[f"{kind}_{end}"] for end in ("without", "with")] for kind in KINDS)
        cells = [str(row["step"]), row["layer"], f"{row['median_block_amax']:.1e}"]
        cells += [*(f"{share:.1f} %" for share in blocks), *(f"{error:.3f}" for error in errors)]
        print(f"| {' | '.join(cells)} |")
    results = trained(settings, arguments.seeds) if arguments.seeds else {}
    if results:
        print("\n" + table(results))
    if arguments.json:
        machine = environment() | {"packages": {"torch": torch.__version__}}
        del machine["platform"]
        content = {
            "command": "python examples/gradient_range.py",
            "date": date.today().isoformat(),
            "machine": machine,
            "gradients": rows,
            "runs": {name: [vars(result) for result in found] for name, found in results.items()},
        }
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
