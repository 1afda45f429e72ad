"""Train one small network on scikit-learn's digits in FP32 and by every recipe, and print one table.

What `vit_digits.py` and `conv_digits.py` share. The data are 1,797 images of 8 x 8 pixels in 10 classes; a quarter,
stratified and the same in every run, is the test set. All recipes of a seed start from the same weights and see the
same batches; only the products differ. AdamW, one-cycle learning rate; the accuracy is that of the last epoch, never
of the best one. Quantisation is emulated, so that times say nothing about FP4 hardware.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import date
from functools import cache, partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.bench.environment import environment
from fp4deploy.qat import RECIPES, prepare, quantized_layers

FP32 = "fp32"
Split = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Settings:
    """Chosen on FP32 alone, validated on a fifth of the training images; no recipe has settings of its own."""

    epochs: int
    lr: float = 8e-3
    batch: int = 64
    weight_decay: float = 0.05
    warmup: float = 0.1
    label_smoothing: float = 0.1


@dataclass(frozen=True)
class Result:
    """One run: test accuracy in percent, mean loss of the last epoch, seconds; the mean loss of every epoch."""

    accuracy: float
    loss: float
    seconds: float
    losses: list[float] = field(default_factory=list)


@cache
def split() -> Split:
    """Training images [1347, 1, 8, 8] and labels, test images [450, 1, 8, 8] and labels; normalised by training."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError:
        raise SystemExit("The digits come with scikit-learn. Install it with: pip install -e '.[examples]'") from None
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1)
    labels = torch.tensor(digits.target)
    train, test = train_test_split(range(len(labels)), test_size=0.25, stratify=digits.target, random_state=0)
    images = (images - images[train].mean()) / images[train].std()
    return images[train], labels[train], images[test], labels[test]


def train(model: nn.Module, settings: Settings, seed: int, steps: int | None = None) -> list[float]:
    """Train in place on whole batches, in an order that depends on the seed alone; the mean loss of every epoch."""
    images, labels, _, _ = split()
    order = torch.Generator().manual_seed(seed)
    per_epoch = len(labels) // settings.batch
    total = steps or settings.epochs * per_epoch
    optimizer = torch.optim.AdamW(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
    warmup = min(0.9, max(settings.warmup, 2.5 / total))  # torch's schedule divides by zero where a phase has no step
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.lr, total, pct_start=warmup)
    losses: list[float] = []
    model.train()
    while len(losses) < total:
        for batch in torch.randperm(len(labels), generator=order).split(settings.batch)[:per_epoch]:
            loss = F.cross_entropy(model(images[batch]), labels[batch], label_smoothing=settings.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) == total:
                break
    return [statistics.fmean(losses[at : at + per_epoch]) for at in range(0, total, per_epoch)]


@torch.no_grad()
def accuracy(model: nn.Module) -> float:
    """Percent of the test images."""
    _, _, images, labels = split()
    return 100 * (model.eval()(images).argmax(1) == labels).float().mean().item()


def run(build: Callable[[], nn.Module], recipe: str, settings: Settings, seed: int, all_layers: bool) -> Result:
    """Build, quantise by `recipe` ("fp32": not at all), train and test one network."""
    torch.manual_seed(seed)
    model = build()
    if recipe != FP32:
        prepare(model, recipe, include=["*"] if all_layers else None)
    torch.manual_seed(seed)  # stochastic rounding draws from here; the order of the data does not
    start = time.perf_counter()
    losses = train(model, settings, seed)
    return Result(accuracy(model), losses[-1], time.perf_counter() - start, losses)


def table(results: dict[str, list[Result]]) -> str:
    """Markdown: mean and standard deviation over seeds, and the paired difference to FP32."""
    lines = [
        "| recipe | accuracy | sd | minus FP32 | sd | loss |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    reference = [result.accuracy for result in results.get(FP32, [])]
    for recipe, rows in results.items():
        scores = [row.accuracy for row in rows]
        gaps = [a - b for a, b in zip(scores, reference, strict=True)] if reference and recipe != FP32 else []
        mean_gap = f"{statistics.fmean(gaps):+.2f}" if gaps else ""
        loss = f"{statistics.fmean(row.loss for row in rows):.4f}"
        cells = [recipe, f"{statistics.fmean(scores):.2f}", _sd(scores), mean_gap, _sd(gaps), loss]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _sd(values: list[float]) -> str:
    return f"{statistics.stdev(values):.2f}" if len(values) > 1 else ""


def main(name: str, build: Callable[[], nn.Module], defaults: Settings, argv: list[str] | None = None) -> None:
    """The command line of an example: every recipe, every seed, the table, and with --json the file."""
    arguments = _parse(name, defaults, argv)
    torch.set_num_threads(1)  # tensors this small lose more to handing work over than they gain
    settings = Settings(**asdict(defaults) | {"epochs": arguments.epochs})
    results: dict[str, list[Result]] = {recipe: [] for recipe in [FP32, *arguments.recipes]}
    order = [(recipe, seed) for seed in range(arguments.seeds) for recipe in results]
    job = partial(_job, build, settings, arguments.all_layers)
    with ExitStack() as stack:
        spawned = {"mp_context": get_context("spawn"), "initializer": torch.set_num_threads, "initargs": (1,)}
        pool = arguments.jobs > 1 and stack.enter_context(ProcessPoolExecutor(arguments.jobs, **spawned))
        for (recipe, seed), found in zip(order, pool.map(job, order) if pool else map(job, order), strict=True):
            results[recipe].append(found)
            print(f"seed {seed}  {recipe:26s} {found.accuracy:6.2f}  {found.seconds:5.1f} s", flush=True)
    layers = quantized_names(build, arguments.all_layers)
    images = split()
    print(f"\nQuantised: {', '.join(layers)}. {len(images[1])} training and {len(images[3])} test images, ", end="")
    print(f"{settings.epochs} epochs, seeds 0 to {arguments.seeds - 1}.\n\n{table(results)}")
    if arguments.json:
        given = [each for each in argv or sys.argv[1:] if each not in ("--json", str(arguments.json))]
        _write(arguments.json, shlex.join(["python", f"examples/{name}_digits.py", *given]), settings, layers, results)


def _job(build: Callable[[], nn.Module], settings: Settings, all_layers: bool, which: tuple[str, int]) -> Result:
    """One run, of a recipe and a seed; the same in any process, since it draws from its seed alone."""
    recipe, seed = which
    return run(build, recipe, settings, seed, all_layers)


def quantized_names(build: Callable[[], nn.Module], all_layers: bool) -> list[str]:
    """The layers that a recipe quantises."""
    return list(quantized_layers(prepare(build(), "nvfp4_qat", include=["*"] if all_layers else None)))


def _parse(name: str, defaults: Settings, argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"{name} on scikit-learn's digits: FP32 and every recipe, one table.")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (default 5)")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES), metavar="RECIPE")
    parser.add_argument("--epochs", type=int, default=defaults.epochs, help=f"default {defaults.epochs}")
    parser.add_argument("--all-layers", action="store_true", help="quantise the first and the last layer as well")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each a process of one thread (default 1)")
    parser.add_argument("--json", type=Path, help="write every run to this file")
    arguments = parser.parse_args(argv)
    if min(arguments.seeds, arguments.epochs, arguments.jobs) < 1:
        parser.error("--seeds, --epochs and --jobs start at 1")
    return arguments


def _write(path: Path, command: str, settings: Settings, layers: list[str], results: dict[str, list[Result]]) -> None:
    machine = environment() | {"packages": {"torch": torch.__version__, "scikit-learn": version("scikit-learn")}}
    del machine["platform"]
    content: dict[str, Any] = {
        "command": command,
        "date": date.today().isoformat(),
        "machine": machine,
        "settings": asdict(settings),
        "quantized_layers": layers,
        "runs": {recipe: [asdict(row) for row in rows] for recipe, rows in results.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
