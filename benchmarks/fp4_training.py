"""Recipes that quantise gradients beside FP16: losses of 50 steps, time of a step, peak memory.

    python benchmarks/fp4_training.py --json benchmarks/results/fp4_training_h200.json
    python benchmarks/fp4_training.py --device cpu --scales 0.125 --recipes nvfp4_train --size 32 --batch 2

The UNet on random images and masks that follow from them, FP16 autocast over FP32 weights (float32 on a CPU), the fused
forward, the loss and the optimiser of `fp4deploy train`. All rows of a scale start from the same weights and see the
same batches. A step is launched from Python, `ms`, and replayed as one CUDA graph, `graph_ms`.

| row | forward, dgrad, wgrad of the quantised layers |
|---|---|
| `fp16` | nothing is quantised |
| RECIPE `emulated` | quantised, dequantised, multiplied in FP16 |
| RECIPE `fp4` | packed FP4 operands: on SM90 decoded in registers, from SM100 block-scaled instructions |

Times are medians of steps by CUDA events after a warm-up. `peak_gb` is the most that the allocator held in a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peers import captured, command, machine
from torch import nn
from training_step import median_ms

from fp4deploy.models import build_unet
from fp4deploy.qat import RECIPES, prepare, set_products
from fp4deploy.qat.fused_unet import fuse_unet
from fp4deploy.train.losses.segmentation import SegmentationLoss

CLASSES, HEIGHT, WIDTH = 4, 352, 480


def batches(device: str, batch: int, size: tuple[int, int], count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Smooth random images, and masks of their first channel's quartiles: something that a network can learn."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        coarse = torch.randn(batch, 3, size[0] // 16, size[1] // 16, generator=generator)
        images = nn.functional.interpolate(coarse, size=size, mode="bilinear")
        masks = torch.bucketize(images[:, 0].contiguous(), torch.tensor([-0.4, 0.0, 0.4]))
        found.append((images.to(device), masks.to(device)))
    return found


def trainer(model: nn.Module, device: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """One training step of `model`; returns the loss."""
    loss_of = SegmentationLoss()
    on_gpu = device == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=on_gpu, capturable=on_gpu)
    scaler = torch.amp.GradScaler(device, enabled=on_gpu)

    def step(images: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=torch.float16, enabled=on_gpu):
            logits = model(images)
        loss = loss_of(logits, masks)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


Batch = tuple[torch.Tensor, torch.Tensor]


def started(scale: float, recipe: str | None, products: str, device: str) -> Callable[[Batch], torch.Tensor]:
    """A step of a new model."""
    torch.manual_seed(0)
    model: nn.Module = build_unet(CLASSES, scale)
    if recipe:
        set_products(prepare(model, recipe), products)
    model = fuse_unet(model.to(device, memory_format=torch.channels_last).train())  # type: ignore[call-overload]
    run = trainer(model, device)
    torch.manual_seed(2)  # of stochastic rounding
    return lambda batch: run(*batch)


def measure(scale: float, recipe: str | None, products: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One row."""
    device, size = arguments.device, (arguments.size or HEIGHT, arguments.size or WIDTH)
    data = [
        (images.contiguous(memory_format=torch.channels_last), masks)
        for images, masks in batches(device, arguments.batch, size, 8)
    ]
    step = started(scale, recipe, products, device)
    losses = torch.stack([step(data[at % len(data)]) for at in range(arguments.steps)]).tolist()
    row: dict[str, Any] = {"scale": scale, "recipe": recipe, "products": products if recipe else "fp16"}
    row["losses"] = [round(value, 5) for value in losses]
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(data[0])
        torch.cuda.synchronize()
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        row["ms"] = median_ms(lambda: step(data[0]), arguments.repeats, 2)
        row |= graphed(lambda: step(data[0]), arguments.repeats)
    return row


def graphed(step: Callable[[], torch.Tensor], repeats: int) -> dict[str, Any]:
    """The step as a CUDA graph, or why there is none."""
    try:
        return {"graph_ms": median_ms(captured(step), repeats, 2)}
    except Exception as error:
        torch.cuda.synchronize()
        return {"graph_error": f"{type(error).__name__}: {error}"[:200]}


def compare(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each recipe how far the losses of fp4 lie from those of the emulation."""
    found = []
    for row in rows:
        if row.get("products") != "fp4" or "losses" not in row:
            continue
        beside = [
            other["losses"]
            for other in rows
            if (other["scale"], other["recipe"], other["products"]) == (row["scale"], row["recipe"], "emulated")
            and "losses" in other
        ]
        if beside:
            apart = [abs(a - b) for a, b in zip(row["losses"], beside[0], strict=True)]
            found.append(
                {
                    "scale": row["scale"],
                    "recipe": row["recipe"],
                    "first_step_apart": apart[0],
                    "largest_apart": max(apart),
                    "mean_of_last_ten": [sum(row["losses"][-10:]) / 10, sum(beside[0][-10:]) / 10],
                }
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.25, 1.0])
    both_ways = [name for name, recipe in RECIPES.items() if not recipe.straight_through]
    parser.add_argument("--recipes", nargs="+", default=both_ways)
    parser.add_argument("--fp4", nargs="*", default=["nvfp4_train"], help="recipes with packed FP4 operands as well")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, help=f"square images of this size; default {HEIGHT} x {WIDTH}")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    cases: list[tuple[str | None, str]] = [(None, "fp16")]
    cases += [(recipe, "emulated") for recipe in arguments.recipes]
    cases += [(recipe, "fp4") for recipe in arguments.fp4 if recipe in arguments.recipes]
    rows: list[dict[str, Any]] = []
    for scale in arguments.scales:
        for recipe, products in cases:
            try:
                row = measure(scale, recipe, products, arguments)
            except Exception as error:  # the other rows are worth having
                row = {"scale": scale, "recipe": recipe, "products": products}
                row["error"] = f"{type(error).__name__}: {error}"[:300]
            if arguments.device == "cuda":
                torch.cuda.empty_cache()
            rows.append(row)
            told = row.get("error") or (
                f"loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}  "
                + ", ".join(f"{key} {row[key]:.2f}" for key in ("ms", "graph_ms", "peak_gb") if key in row)
            )
            print(f"scale {scale:5} {recipe or '-':16s} {row['products']:9s} {told}", flush=True)
            if arguments.json:
                write(arguments.json, rows)
    for line in compare(rows):
        print(line)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """After every row: a run that is stopped keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    where = machine() if torch.cuda.is_available() else {"gpu": None, "torch": torch.__version__}
    report = {"command": command(), "machine": where, "rows": rows}
    path.write_text(json.dumps(report | {"fp4_beside_emulated": compare(rows)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
