"""SIGKILL in the middle of a training, then --resume: are the losses that follow the same bits?

    python benchmarks/kill_resume.py --steps 50 [--model nvfp4] [--recipe nvfp4_train] [--seed 0] [--device cuda]

Trains a small UNet on generated shapes three times, each time in a process of its own: once without
interruption; once until a random step, at which the process is killed (kill -9: no handler, nothing flushed); and once
more on from what the killed one left on the disk. Every loss is written down as its exact bits. The `--steps` losses
after the resume must be those of the uninterrupted training, bit for bit; exit code 1 if one is not.

States are saved every few steps, inside epochs; averaged weights, accumulated gradients and, with nvfp4_train,
stochastic rounding are part of it. On a GPU what is compared is a checksum over the bits of all weights after every
batch: the value of the cross-entropy is a sum by atomics there, which the weights do not depend on. Off the fused path,
as with nvfp4_train, convolutions have no fixed order either, and two uninterrupted trainings differ already.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

SIZES = {
    "cpu": ("model.scale=0.125", "data.height=32", "data.width=32"),
    "cuda": ("model.scale=0.25", "data.height=64", "data.width=64"),
}
SETTINGS = (
    "data.workers=0",
    "train.batch_size=2",
    "train.accumulate=2",
    "train.ema=0.99",
    "train.from_scratch=true",
    "train.save_minutes=0.003",
    "augment.rotate=10",
)


def child(data: Path, run: Path, losses: Path, settings: list[str], model: str, device: str, images: int) -> None:
    """Train, writing down the bits of every batch; continue the run where it has a state."""
    import torch

    from fp4deploy.runs import Run
    from fp4deploy.train import load_config, train_models

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    write_down(losses, device)
    torch.set_num_threads(1)
    config = load_config(None, [f"data.root={data}", *SIZES[device], *SETTINGS, *settings])
    folder = Run(run)
    resume = (folder.model_dir(model) / "state" / "last.safetensors").is_file()
    if resume:
        from fp4deploy.train.state import read_progress

        progress = read_progress(folder.model_dir(model) / "state" / "last.safetensors")
        batches = progress.epoch * (images // 2) + progress.batch
        losses.write_text(f"after {batches}\n")
    train_models(config, folder, (model,), resume=resume)


def write_down(file: Path, device: str) -> None:
    """Append a line after every batch: the loss on a CPU, a checksum of the weights on a GPU."""
    import torch

    from fp4deploy.train.logging.running_statistics import RunningStatistics
    from fp4deploy.train.loop import Trainer

    def append(text: str) -> None:
        with file.open("a") as lines:
            lines.write(text + "\n")

    add_loss, step = RunningStatistics.add_loss, Trainer.step

    def noted_loss(self: RunningStatistics, loss: torch.Tensor) -> None:
        add_loss(self, loss)
        append(float(loss).hex())

    def noted_weights(self: Trainer, *batch: torch.Tensor) -> None:
        step(self, *batch)
        words = [value.detach().view(torch.int32).long() for value in self.bare.parameters()]
        odd = [torch.arange(1, 2 * value.numel(), 2, device=value.device).view(value.shape) for value in words]
        append(str(sum(int((value * factor).sum()) for value, factor in zip(words, odd, strict=True))))

    if device == "cuda":
        Trainer.step = noted_weights  # type: ignore[method-assign]
    else:
        RunningStatistics.add_loss = noted_loss  # type: ignore[method-assign]


def start(device: str, *arguments: object) -> BaseProcess:
    """A process of its own that trains; forked where no GPU is used, which saves importing torch again."""
    process = multiprocessing.get_context("fork" if device == "cpu" else "spawn").Process(target=child, args=arguments)
    process.start()
    return process


def exit_code(process: BaseProcess) -> int | None:
    process.join()
    return process.exitcode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50, help="optimiser steps to compare after the resume")
    parser.add_argument("--model", default="nvfp4", choices=("fp16", "nvfp4"))
    parser.add_argument("--recipe", default="nvfp4_qat")
    parser.add_argument("--seed", type=int, default=None, help="of the random step; by default another each time")
    parser.add_argument("--images", type=int, default=60, help="training images, two a batch, four a step")
    parser.add_argument("--within", type=int, default=60, help="the kill comes in the first so many batches")
    parser.add_argument("--device", default="cpu", choices=tuple(SIZES))
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    if arguments.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch._dynamo  # noqa: F401, what the first step of an optimiser imports, before the processes are forked

    import fp4deploy.train  # noqa: F401
    from fp4deploy.data import generate_shapes

    batches = 2 * arguments.steps
    kill_at = random.Random(arguments.seed).randint(4, max(5, arguments.within))
    epochs = -(-(kill_at + batches + 2) // (arguments.images // 2))
    settings = [f"train.epochs={epochs}", f"recipe={arguments.recipe}"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        generate_shapes(
            folder / "data", train=arguments.images, val=4, size=32 if arguments.device == "cpu" else 64, seed=0
        )
        straight, killed, resumed = (folder / f"{part}.txt" for part in ("straight", "killed", "resumed"))
        data, device = folder / "data", arguments.device
        common = (settings, arguments.model, device, arguments.images)
        if exit_code(start(device, data, folder / "a", straight, *common)) != 0:
            sys.exit("the uninterrupted training failed")
        process = start(device, data, folder / "b", killed, *common)
        while process.is_alive() and (not killed.exists() or len(killed.read_text().splitlines()) < kill_at):
            time.sleep(0.002)
        process.kill()
        if exit_code(process) != -9:
            sys.exit("the training ended before it could be killed")
        if exit_code(start(device, data, folder / "b", resumed, *common)) != 0:
            sys.exit("the resumed training failed")
        expected, lines = straight.read_text().splitlines(), resumed.read_text().splitlines()
        died = len(killed.read_text().splitlines())
    if not lines[0].startswith("after "):
        sys.exit("nothing had been saved before the kill: run again with another --seed")
    begin = int(lines[0].split()[1])
    found, reference = lines[1 : 1 + batches], expected[begin : begin + batches]
    different = sum(a != b for a, b in zip(found, reference, strict=True))
    report = {
        "model": arguments.model,
        "recipe": arguments.recipe,
        "device": arguments.device,
        "killed_after_batches": died,
        "resumed_after_batches": begin,
        "steps_an_epoch": arguments.images // 4,
        "batches_compared": len(found),
        "different": different,
    }
    print(json.dumps(report))
    sys.exit(1 if different or len(found) < batches else 0)


if __name__ == "__main__":
    main()
