"""One training loop for every precision, on accelerate.

On a GPU: FP16 autocast with a loss scaler over FP32 master weights. On a CPU: FP32 arithmetic, since FP16 autocast is
slow there; the weights that ship are rounded to FP16 in either case. A step whose gradients are not finite is skipped
and counted; a long row of them ends the training with an error instead of a ruined checkpoint.

After every epoch, in this order: the best checkpoint, one line of metrics, the state. An interruption anywhere repeats
at most the running epoch, and the repetition computes the same numbers.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from fp4deploy.data import EpochLoader
from fp4deploy.errors import GateError, InputError
from fp4deploy.metrics import Scores, SegmentationScore
from fp4deploy.models import ModelCard, save_checkpoint
from fp4deploy.train.config import TrainSection
from fp4deploy.train.losses import SegmentationLoss
from fp4deploy.train.progress import Display
from fp4deploy.train.schedule import learning_rate, make_optimizer, set_learning_rate
from fp4deploy.train.state import Progress, load_state, save_state

MAX_SKIPPED_IN_A_ROW = 30


@dataclass(frozen=True)
class Plan:
    """What distinguishes one model's training: its name, length, peak learning rate and target folder."""

    model: str
    epochs: int
    lr: float
    folder: Path

    @property
    def state_path(self) -> Path:
        """The resume state, one file."""
        return self.folder / "state" / "last.safetensors"

    @property
    def metrics_path(self) -> Path:
        """One JSON line an epoch."""
        return self.folder / "metrics.jsonl"

    @property
    def checkpoint(self) -> Path:
        """The weights with the best validation mIoU."""
        return self.folder / "best.safetensors"


class Trainer:
    """Trains one model; `run` starts or resumes."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        card: ModelCard,
        settings: TrainSection,
        loaders: tuple[EpochLoader, EpochLoader],
    ) -> None:
        self.plan, self.card, self.settings = plan, card, settings
        on_gpu = torch.cuda.is_available()
        self.accelerator = Accelerator(mixed_precision="fp16" if on_gpu else "no", cpu=not on_gpu)
        self.device = self.accelerator.device
        self.layout = torch.channels_last if settings.channels_last else torch.contiguous_format
        self.bare = model.to(self.device, memory_format=self.layout)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(model, plan.lr, settings.weight_decay)
        self.sampler = loaders[0].sampler
        self.train_batches: Any = loaders[0]
        self.val_batches: Any = loaders[1]
        if self.accelerator.num_processes > 1:
            self.train_batches, self.val_batches = self.accelerator.prepare(*loaders)
        self.model, self.stepper = self.accelerator.prepare(self.bare, self.optimizer)
        if settings.compile:
            self.model = torch.compile(self.model)
        self.loss = SegmentationLoss(settings.cross_entropy, settings.dice)
        self.progress = Progress()
        self.skipped_in_a_row = 0

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole training."""
        return self.plan.epochs * len(self.train_batches)

    def run(self, resume: bool) -> Progress:
        """Train to the last epoch; with `resume`, on from the saved state where there is one.

        Raises:
            InputError: the state cannot be read, or a file cannot be written.
            GateError: the loss stayed non-finite.
        """
        if resume and self.plan.state_path.is_file():
            self.progress = load_state(self.plan.state_path, self.bare, self.optimizer, self.accelerator.scaler)
        _keep_epochs(self.plan.metrics_path, self.progress.epoch)
        with Display(self.plan.model, self.plan.epochs, self.steps, self.progress.step) as display:
            while self.progress.epoch < self.plan.epochs:
                self._epoch(display)
        self.accelerator.free_memory()
        return self.progress

    def evaluate(self) -> Scores:
        """Score on the validation split."""
        names = self.card.class_names
        score = SegmentationScore(len(names), names)
        self.model.eval()
        with torch.inference_mode(), self.accelerator.autocast():
            for images, masks in self._on_device(self.val_batches):
                prediction = self.model(images).argmax(dim=1)
                prediction, masks = self.accelerator.gather_for_metrics((prediction, masks))
                score.update(prediction, masks)
        self.model.train()
        return score.compute()

    def _epoch(self, display: Display) -> None:
        start = time.perf_counter()
        epoch, skipped = self.progress.epoch, self.progress.skipped
        self.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        self.model.train()
        total, images_seen = 0.0, 0
        for images, masks in self._on_device(self.train_batches):
            loss = self._step(images, masks)
            total += loss
            images_seen += len(images) * self.accelerator.num_processes
            display.step(loss)
        trained = time.perf_counter() - start
        last = epoch + 1 == self.plan.epochs
        scores = self.evaluate() if last or (epoch + 1) % self.settings.evaluate_every == 0 else None
        self.progress.epoch += 1
        self.progress.seconds += time.perf_counter() - start
        line = {
            "epoch": self.progress.epoch,
            "step": self.progress.step,
            "loss": total / len(self.train_batches),
            "lr": self.optimizer.param_groups[0]["lr"],
            "miou": scores.miou if scores else None,
            "per_class": scores.per_class if scores else None,
            "seconds": round(time.perf_counter() - start, 3),
            "images_per_s": round(images_seen / trained, 1),
            "arithmetic": "fp16 autocast" if self.accelerator.mixed_precision == "fp16" else "fp32",
            "skipped_steps": self.progress.skipped - skipped,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if self.device.type == "cuda" else None,
        }
        if self.accelerator.is_main_process:
            self._save(scores, line)
        display.epoch(self.progress.epoch, line["loss"], line["miou"], line["seconds"])

    def _step(self, images: torch.Tensor, masks: torch.Tensor) -> float:
        lr = learning_rate(self.progress.step, self.steps, self.plan.lr, self.settings.warmup)
        set_learning_rate(self.optimizer, lr)
        with self.accelerator.autocast():
            logits = self.model(images)
        loss = self.loss(logits, masks)
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.bare.parameters(), self.settings.clip)
        if self.accelerator.scaler is not None or torch.isfinite(norm):
            self.stepper.step()
        self.stepper.zero_grad(set_to_none=True)
        self.progress.step += 1
        return self._counted(loss.item())

    def _counted(self, loss: float) -> float:
        """Count a non-finite loss; it adds nothing to the epoch's mean."""
        if loss == loss and abs(loss) != float("inf"):
            self.skipped_in_a_row = 0
            return loss
        self.progress.skipped += 1
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise GateError(
                f"{self.plan.model}: the loss was NaN or Inf in {self.skipped_in_a_row} steps in a row in epoch "
                f"{self.progress.epoch + 1}. The best checkpoint so far is kept; "
                "start again with a lower --set train.lr=..."
            )
        return 0.0

    def _on_device(self, batches: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, masks in batches:
            yield (
                images.to(self.device, memory_format=self.layout, non_blocking=True),
                masks.to(self.device, non_blocking=True),
            )

    def _save(self, scores: Scores | None, line: dict[str, Any]) -> None:
        if scores is not None and (scores.miou > self.progress.best_miou or not self.plan.checkpoint.is_file()):
            self.progress.best_miou, self.progress.per_class = scores.miou, scores.per_class
            extra = {"fp4deploy.epoch": str(self.progress.epoch), "fp4deploy.miou": repr(scores.miou)}
            save_checkpoint(self.plan.checkpoint, self.bare, self.card, extra)
        _append(self.plan.metrics_path, line)
        save_state(
            self.plan.state_path, self.bare, self.optimizer, self.accelerator.scaler, Progress(**asdict(self.progress))
        )


def _append(path: Path, line: dict[str, Any]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror}. Free some space and use --resume.") from error


def _keep_epochs(path: Path, last: int) -> None:
    """Drop the lines of epochs that will be trained again, and a line that an interruption cut short."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line).get("epoch", 0) <= last:
                kept.append(line)
        except ValueError:
            continue
    path.write_text("".join(line + "\n" for line in kept))
