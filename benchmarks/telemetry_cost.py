"""What telemetry costs a training step, at the default N and at others, in one process.

    python benchmarks/telemetry_cost.py --json benchmarks/results/telemetry_cost_h200.json
    python benchmarks/telemetry_cost.py --device cpu --json benchmarks/results/telemetry_cost_cpu.json

Whole steps as `fp4deploy train` makes them: forward, loss, backward, clipping, AdamW. On a GPU batch 16, 352 x 480,
FP16 autocast, fused where the recipe has kernels; on a CPU the demo's batch 8, 96 x 96, FP32. Sampled and
plain steps alternate (one sample, then `--between` plain steps), so that clock drift affects both. A step is timed to
its end on the device, including the transfer of the sample; the training itself transfers later, when it waits for the
device anyway. The share at N is (sampled - plain) / (N * plain), of medians. On a CPU a second model is trained
without telemetry and the weights of both are compared bit for bit.

    python benchmarks/telemetry_cost.py --bits --json benchmarks/results/telemetry_bits_h200.json

compares weights instead of timing: three trainings from one seed, each step sampled, none sampled, and none sampled
again. cuDNN is asked for deterministic algorithms; the last two say whether a training repeats itself at all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp4deploy.models import build_unet
from fp4deploy.qat import prepare
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.train.config import TelemetrySection
from fp4deploy.train.logging.telemetry import Telemetry
from fp4deploy.train.losses.segmentation import SegmentationLoss

CLASSES = 12
SHAPES = {"cuda": (16, 352, 480), "cpu": (8, 96, 96)}
LIMIT = 0.03


class Training:
    """One model and its steps on one random batch; telemetry samples the steps it is asked to."""

    def __init__(self, recipe: str | None, scale: float, device: str, folder: Path) -> None:
        torch.manual_seed(0)
        model: nn.Module = build_unet(CLASSES, scale)
        if recipe:
            prepare(model, recipe)
        layout = torch.channels_last if device == "cuda" else torch.contiguous_format
        self.model = model.to(device, memory_format=layout).train()  # type: ignore[call-overload]
        if device == "cuda":
            fuse_unet(self.model)
        batch, height, width = SHAPES[device]
        generator = torch.Generator(device).manual_seed(0)
        images = torch.randn(batch, 3, height, width, device=device, generator=generator)
        self.images = images.to(memory_format=layout)
        self.masks = torch.randint(0, CLASSES, (batch, height, width), device=device, generator=generator)
        self.loss = SegmentationLoss()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4, fused=device == "cuda" or None)
        self.scaler = torch.amp.GradScaler(device) if device == "cuda" else None
        self.telemetry = Telemetry(TelemetrySection(every=1), folder, self.model, 1 << 30)
        self.device, self.steps = device, 0

    def step(self, sample: bool) -> None:
        """Forward, backward and update, sampled or not."""
        self.steps += 1
        telemetry = self.telemetry
        telemetry.every = int(sample)
        cuda = self.device == "cuda"
        with torch.autocast(self.device, torch.float16, enabled=cuda), telemetry.watching(self.images, 0):
            logits = self.model(self.images)
        loss = self.loss(logits, self.masks)
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        telemetry.sample(0, 0, norm, self.scaler)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        telemetry.flush()

    def timed(self, sample: bool) -> float:
        """Milliseconds of one step, from an idle device to an idle device."""
        synchronize = torch.cuda.synchronize if self.device == "cuda" else (lambda: None)
        torch.manual_seed(self.steps)  # of stochastic rounding
        synchronize()
        start = time.perf_counter()
        self.step(sample)
        synchronize()
        return 1e3 * (time.perf_counter() - start)


def measure(recipe: str | None, scale: float, device: str, looks: int, between: int) -> dict[str, Any]:
    """One row: times of plain and of sampled steps, the shares at several N, and whether the weights agree."""
    with tempfile.TemporaryDirectory() as folder:
        watched = Training(recipe, scale, device, Path(folder) / "watched")
        for sample in (False, True, True):
            watched.timed(sample)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        sampled: list[float] = []
        without: list[float] = []
        for _ in range(looks):
            sampled.append(watched.timed(True))
            without += [watched.timed(False) for _ in range(between)]
        same: bool | None = None
        if device == "cpu":
            plain = Training(recipe, scale, device, Path(folder) / "plain")
            for _ in range(watched.steps):
                plain.timed(False)
            pairs = zip(watched.model.parameters(), plain.model.parameters(), strict=True)
            same = all(torch.equal(a, b) for a, b in pairs)
    sample, step = statistics.median(sampled), statistics.median(without)
    every = TelemetrySection().every
    cost = {n: (sample - step) / (n * step) for n in (1, 10, every, 1000)}
    row: dict[str, Any] = {
        "model": recipe or "fp16",
        "scale": scale,
        "fused": device == "cuda" and isinstance(watched.model, FusedUNet),
        "step_ms": step,
        "looked_at_ms": sample,
        "default_every": every,
        "share": {str(n): share for n, share in cost.items()},
        "smallest_every_within_limit": max(1, -int(-(sample - step) // (LIMIT * step))),
        "looks": looks,
        "weights_equal": same,
    }
    if device == "cuda":
        row["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    print(
        f"scale {scale:<5g} {row['model']:20s} step {step:8.2f} ms   sampled {sample:8.2f} ms   "
        f"at N = {every}: {100 * cost[every]:.2f} %"
        + ("" if same is None else f"   weights {'equal' if same else 'DIFFER'}"),
        flush=True,
    )
    return row


def compare_bits(recipe: str | None, scale: float, device: str, steps: int) -> dict[str, Any]:
    """Whether weights after some steps have the same bits with telemetry and without, and without it twice."""
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    weights: list[list[torch.Tensor]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, sample in (("sampled", True), ("plain", False), ("again", False)):
            training = Training(recipe, scale, device, Path(folder) / name)
            for _ in range(steps):
                training.timed(sample)
            weights.append([parameter.detach().clone() for parameter in training.model.parameters()])
    sampled, plain, again = weights
    row = {"model": recipe or "fp16", "scale": scale, "steps": steps, "fused": isinstance(training.model, FusedUNet)}
    row["telemetry_equal"] = all(torch.equal(a, b) for a, b in zip(sampled, plain, strict=True))
    row["repeated_equal"] = all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    print(row, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--looks", type=int, default=9, help="sampled steps a row")
    parser.add_argument("--between", type=int, default=3, help="plain steps after each")
    parser.add_argument("--scales", default=None, help="of the UNet, such as 1.0,0.25; on a CPU 0.25,0.125")
    parser.add_argument("--recipes", default="fp16,nvfp4_qat,nvfp4_qat_2d,nvfp4_train,mx_baseline")
    parser.add_argument("--bits", action="store_true", help="compare weights instead of timing")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = arguments.device
    scales = [float(text) for text in (arguments.scales or ("1.0,0.25" if device == "cuda" else "0.25")).split(",")]
    chosen: list[str | None] = [None if name == "fp16" else name for name in arguments.recipes.split(",")]
    if arguments.bits:
        bits = [compare_bits(recipe, scale, device, 8) for scale in scales for recipe in chosen]
        write(
            arguments.json, {"command": f"python benchmarks/telemetry_cost.py --bits --device {device}"}, device, bits
        )
        return
    make: Callable[..., dict[str, Any]] = measure
    rows = [make(recipe, scale, device, arguments.looks, arguments.between) for scale in scales for recipe in chosen]
    worst = max(row["share"][str(row["default_every"])] for row in rows)
    verdict = "within" if worst <= LIMIT else "ABOVE"
    print(f"largest share at the default N: {100 * worst:.2f} %, {verdict} {100 * LIMIT:g} %")
    command = f"python benchmarks/telemetry_cost.py --device {device}"
    write(arguments.json, {"command": command, "limit": LIMIT, "largest_share": worst}, device, rows)


def write(path: Path | None, head: dict[str, Any], device: str, rows: list[dict[str, Any]]) -> None:
    """The JSON file, if one was asked for."""
    if path is None:
        return
    machine = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    machine |= (
        {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
        if device == "cuda"
        else {"processor": platform.machine(), "cores": os.cpu_count() or 0}
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
