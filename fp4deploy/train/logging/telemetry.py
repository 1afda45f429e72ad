"""Telemetry: which steps of a training are sampled, and how a sample reaches the trackers.

A sample has statistics of every layer's weights, activations and gradients. Every N-th optimiser step is sampled, and
the first and the last of the training too. With t the time of a step and T the additional time of a sample, telemetry
costs T / (N t) of the training's time; N = 200 keeps that below 3 % (`benchmarks/telemetry_cost.py` measures both in
one run). A sample stays on the device until the loop reads its loss and waits for the device anyway.

Telemetry does not change the training: the same seed gives the same weights, bit for bit, with and without it.

A resumed training tracks what an uninterrupted one would have, code flips included: the codes of the last sample are
saved with the state. Where the two do not belong together (a crash between the two files, another N) the next sample
has no flips.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from fp4deploy.models.checkpoint import write_tensors
from fp4deploy.qat.telemetry.collect import Table, Watcher
from fp4deploy.train.logging.tracker import EPOCH, SAMPLE, Entry, Layers, Tracker, rounded
from fp4deploy.train.logging.trackers import make_trackers, stated
from fp4deploy.train.sections import TelemetrySection

STATE = "telemetry.safetensors"
STEP_KEY = "fp4deploy.step"
CODES, GRADIENTS = "codes.", "gradients."
METRICS = ("loss", "lr", "miou", "ap", "top1", "skipped_steps")


@dataclass(frozen=True)
class PendingSample:
    """A sample that is still on the device."""

    step: int
    epoch: int
    table: Table


class Telemetry:
    """Samples the steps of one model's training; does nothing where it is switched off."""

    def __init__(
        self,
        settings: TelemetrySection,
        folder: Path,
        model: nn.Module,
        steps: int,
        *,
        active: bool = True,
        compiled: bool = False,
        config: dict[str, object] | None = None,
    ) -> None:
        """Watch `model`, not compiled nor wrapped, over `steps` steps; `active`: in one process of several."""
        self.every, self.steps, self.compiled = settings.every if active else 0, steps, compiled
        self._every = settings.every
        names = [name for name in settings.trackers if self.every or name != "jsonl"] if active else []
        self.trackers: list[Tracker] = make_trackers(names, folder, settings.project, settings.wandb_mode, config or {})
        self.watcher = Watcher(model)
        self.state_path = folder / "state" / STATE
        self.pending: PendingSample | None = None
        self.sampled_step: int | None = None

    def due(self, step: int) -> bool:
        """Whether step number `step`, from 0, is sampled here."""
        return bool(self.every) and self.sampled(step)

    def sampled(self, step: int) -> bool:
        """Whether it is sampled in one of the processes."""
        return bool(self._every) and (step % self._every == 0 or step == self.steps - 1)

    def resume(self, step: int, epoch: int) -> None:
        """Continue after `step` steps and `epoch` whole epochs; 0, 0 begins."""
        with stated():
            for tracker in self.trackers:
                tracker.resume(step, epoch)
        before = (step - 1) // self.every * self.every if self.every and step else None
        self.watcher.previous = _read_codes(self.state_path, before, self.watcher) if before is not None else {}

    @contextmanager
    def watching(self, images: torch.Tensor, step: int, last: bool = True) -> Iterator[None]:
        """Around the forward of step `step`; `last`: its gradients complete the step."""
        if not (last and self.due(step)):
            yield
        elif self.compiled:
            yield
            self.watcher.probe(images, seed=step)
        else:
            with self.watcher.watching(images, seed=step):
                yield

    def sample(self, step: int, epoch: int, norm: torch.Tensor, scaler: object | None = None) -> None:
        """Between the backward and the optimiser, gradients unscaled and clipped; `norm` is theirs before clipping."""
        if not self.due(step):
            return
        self.flush()
        extras = {"gradient_norm": norm}
        scale = getattr(scaler, "_scale", None)  # get_scale would wait for the device
        if scale is not None:
            extras["loss_scale"] = scale.clone()
        self.pending = PendingSample(step, epoch, self.watcher.snapshot(**extras))
        self.sampled_step = step

    def flush(self) -> None:
        """Read the pending sample and pass it to the trackers; waits for the device if there is one."""
        if self.pending is None:
            return
        sample, self.pending = self.pending, None
        seen = sample.table.read()
        layers: Layers = {}
        for (layer, tensor), statistics in seen.values.items():
            layers.setdefault(layer, {})[tensor] = {name: rounded(value) for name, value in statistics.items()}
        codes: dict[str, dict[str, list[int]]] = {}
        for (layer, tensor), counts in seen.codes.items():
            codes.setdefault(layer, {})[tensor] = counts
        extras = {name: rounded(value) for name, value in seen.extras.items()}
        self._log(Entry(SAMPLE, sample.step + 1, sample.epoch + 1, extras, layers, codes))

    def epoch(self, line: dict[str, Any]) -> None:
        """Track the metrics of an epoch, a line of metrics.jsonl."""
        self.flush()
        values = {name: rounded(line[name]) for name in METRICS if line.get(name) is not None}
        dice = mean_dice(line)
        if dice is not None:
            values["dice"] = rounded(dice)
        self._log(Entry(EPOCH, line["step"], line["epoch"], values))

    def save(self) -> None:
        """Save what the next sample is compared with, next to a state that was just saved.

        Raises:
            InputError: the disk is full; the older file survives.
        """
        self.flush()
        if self.sampled_step is None or not self.every:
            return
        tensors = {CODES + name: codes for name, codes in self.watcher.previous.items()}
        tensors |= {GRADIENTS + name: part for name, part in self.watcher.windows.items()}
        write_tensors(self.state_path, tensors, {STEP_KEY: str(self.sampled_step)})

    def close(self) -> None:
        """Close the trackers."""
        with stated():
            for tracker in self.trackers:
                tracker.close()

    def _log(self, entry: Entry) -> None:
        with stated():
            for tracker in self.trackers:
                tracker.log(entry)


def mean_dice(line: dict[str, Any]) -> float | None:
    """Dice, the mean over the classes of 2 IoU / (1 + IoU), of a line of metrics.jsonl; None where it has no IoU."""
    scores = (line.get("per_class") or {}).values() if line.get("miou") is not None else ()
    known = [score for score in scores if score is not None]
    return sum(2 * score / (1 + score) for score in known) / len(known) if known else None


def read_gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The windows of the weight gradients that the last sample of the model in `folder` left; {} without any."""
    return _read(folder / "state" / STATE, GRADIENTS)[1]


def _read_codes(path: Path, step: int, watcher: Watcher) -> dict[str, torch.Tensor]:
    found, tensors = _read(path, CODES)
    if found != step:
        return {}
    device = next((layer.weight.device for layer in watcher.layers.values()), torch.device("cpu"))
    return {name: codes.to(device) for name, codes in tensors.items()}


def _read(path: Path, prefix: str) -> tuple[int | None, dict[str, torch.Tensor]]:
    """(step of the sample, its tensors); nothing where the file is missing or damaged: it is not part of the state."""
    try:
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            step = int((file.metadata() or {})[STEP_KEY])
            return step, {name.removeprefix(prefix): file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, KeyError, ValueError):
        return None, {}
