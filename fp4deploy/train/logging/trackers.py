"""Where telemetry goes: a file, TensorBoard, Weights & Biases, behind one small Protocol.

    jsonl         <model>/telemetry.jsonl, one line a look or an epoch; what plots and reports are made of
    tensorboard   <model>/tensorboard/
    wandb         <model>/wandb/; offline unless telemetry.wandb_mode (or WANDB_MODE) says otherwise, so that nothing
                  leaves the machine unasked: `wandb sync` uploads it later

A resumed training repeats the steps after its last state. `resume` makes every tracker forget them: the file drops the
lines, TensorBoard hides what lies after the step, W&B continues the run of the same id (online it keeps the values that
it has, offline it writes a second part).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fp4deploy.errors import UnavailableError
from fp4deploy.qat.telemetry.statistics import CODES
from fp4deploy.runs import atomic_write
from fp4deploy.train.logging.metrics_log import append_line

LOOK, EPOCH = "look", "epoch"
FILE = "telemetry.jsonl"
DIGITS = 9

Layers = dict[str, dict[str, dict[str, float | None]]]
LayerCodes = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Entry:
    """What is tracked at once.

    kind: "look" (statistics of a step) or "epoch" (its metrics).
    step: optimiser steps done, the one that was looked at included; epoch: the running one, from 1.
    values: scalars by name.
    layers: layer -> tensor -> statistic -> value, None where it is undefined.
    codes: layer -> tensor -> elements of each of the 16 codes.
    """

    kind: str
    step: int
    epoch: int
    values: dict[str, float | None] = field(default_factory=dict)
    layers: Layers = field(default_factory=dict)
    codes: LayerCodes = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """All that is defined under flat names: "loss", "encoder.0.conv2/weight/kurtosis"."""
        flat = {name: value for name, value in self.values.items() if value is not None}
        for layer, tensors in self.layers.items():
            for tensor, statistics in tensors.items():
                flat |= {f"{layer}/{tensor}/{name}": v for name, v in statistics.items() if v is not None}
        return flat

    def histograms(self) -> dict[str, list[int]]:
        """Counts of the 16 codes under flat names: "encoder.0.conv2/weight/codes"."""
        return {
            f"{layer}/{tensor}/codes": counts
            for layer, tensors in self.codes.items()
            for tensor, counts in tensors.items()
        }


class Tracker(Protocol):
    """Takes entries in the order of their steps."""

    def resume(self, step: int, epoch: int) -> None:
        """Forget what was tracked after `step` steps and `epoch` whole epochs; called once, before anything else."""

    def log(self, entry: Entry) -> None:
        """Keep an entry."""

    def close(self) -> None:
        """Nothing more comes."""


def rounded(value: float) -> float | None:
    """`value` to nine digits, what float32 data can tell; None where it is not finite."""
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


class JsonlTracker:
    """One JSON line an entry, flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, epoch: int) -> None:
        """Drop later lines, and one that a crash cut short."""
        if not self.path.is_file():
            return
        lines = self.path.read_text().splitlines()
        kept = [line for line in lines if _belongs(_parsed(line), step, epoch)]
        if kept != lines or not _ends_with_newline(self.path):
            with atomic_write(self.path) as temporary:
                temporary.write_text("".join(line + "\n" for line in kept))

    def log(self, entry: Entry) -> None:
        """Append a line.

        Raises:
            InputError: the disk is full or the folder cannot be written.
        """
        parts = {"values": entry.values, "layers": entry.layers, "codes": entry.codes}
        head = {"kind": entry.kind, "step": entry.step, "epoch": entry.epoch}
        append_line(self.path, {**head, **{name: part for name, part in parts.items() if part}})

    def close(self) -> None:
        """Nothing is open."""


def read_entries(path: Path) -> list[Entry]:
    """The entries of a telemetry.jsonl in order; lines that are none are left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        parsed = _parsed(line)
        if parsed is not None:
            parts = {name: parsed.get(name, {}) for name in ("values", "layers", "codes")}
            found.append(Entry(parsed["kind"], parsed["step"], parsed["epoch"], **parts))
    return found


class TensorBoardTracker:
    """Scalars and code histograms as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.writer = folder, None
        self.make = _tensorboard()

    def resume(self, step: int, epoch: int) -> None:
        """Open the folder; events of later steps are hidden."""
        self.writer = self.make(str(self.folder), purge_step=step + 1 if step else None)

    def log(self, entry: Entry) -> None:
        """Write events."""
        if self.writer is None:
            self.resume(0, 0)
        writer: Any = self.writer
        for name, value in entry.scalars().items():
            writer.add_scalar(name, value, entry.step)
        for name, counts in entry.histograms().items():
            values = [float(code) for code in range(CODES)]
            total = sum(count * value for count, value in zip(counts, values, strict=True))
            squares = sum(count * value**2 for count, value in zip(counts, values, strict=True))
            limits = [value + 0.5 for value in values]
            writer.add_histogram_raw(name, 0.0, 15.0, sum(counts), total, squares, limits, counts, entry.step)
        writer.flush()

    def close(self) -> None:
        """Close the event file."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None


class WandbTracker:
    """One W&B run a model."""

    def __init__(self, folder: Path, name: str, project: str, mode: str, config: dict[str, Any]) -> None:
        self.wandb, self.run = _wandb(), None
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]  # the same run after a resume
        self.options = {"dir": str(folder), "name": name, "project": project, "id": digest, "config": config}
        self.mode = os.environ.get("WANDB_MODE", mode)

    def resume(self, step: int, epoch: int) -> None:
        """Open the run, or go on with it."""
        Path(str(self.options["dir"])).mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {**self.options, "mode": self.mode, "resume": "allow" if step else None}
        self.run = self.wandb.init(**options, settings=self.wandb.Settings(silent=True, console="off"))

    def log(self, entry: Entry) -> None:
        """Log scalars and histograms of a step."""
        if self.run is None:
            self.resume(0, 0)
        run: Any = self.run
        edges = [code - 0.5 for code in range(CODES + 1)]
        histograms = {
            name: self.wandb.Histogram(np_histogram=(counts, edges)) for name, counts in entry.histograms().items()
        }
        run.log({**entry.scalars(), **histograms, "epoch": entry.epoch}, step=entry.step)

    def close(self) -> None:
        """Finish the run."""
        if self.run is not None:
            self.run.finish()
            self.run = None


def make_trackers(
    names: Iterable[str], folder: Path, project: str, wandb_mode: str, config: dict[str, Any]
) -> list[Tracker]:
    """The trackers of one model, whose files lie in `folder`; nothing is opened yet.

    Raises:
        UnavailableError: a package is missing.
    """
    made: list[Tracker] = []
    for name in dict.fromkeys(names):
        if name == "jsonl":
            made.append(JsonlTracker(folder / FILE))
        elif name == "tensorboard":
            made.append(TensorBoardTracker(folder / "tensorboard"))
        else:
            title = f"{folder.parent.name}/{folder.name}"
            made.append(WandbTracker(folder, title, project, wandb_mode, config))
    return made


def check_trackers(names: Iterable[str]) -> None:
    """Before hours of training: every tracker's package is there.

    Raises:
        UnavailableError: one is missing; the message has the command that adds it.
    """
    for name in names:
        if name == "tensorboard":
            _tensorboard()
        elif name == "wandb":
            _wandb()


def _tensorboard() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise _missing("tensorboard", error) from error
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise _missing("wandb", error) from error
    if not hasattr(wandb, "init"):  # a folder of that name without the package in it
        raise _missing("wandb", ImportError("it has no init"))
    return wandb


def _missing(name: str, error: Exception) -> UnavailableError:
    return UnavailableError(
        f"The tracker '{name}' needs the package {name}, which cannot be imported ({' '.join(str(error).split())}). "
        f"Install it with: pip install 'fp4deploy[{name}]', or leave it out: telemetry.jsonl holds the same numbers."
    )


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
        whole = isinstance(found["step"], int) and isinstance(found["epoch"], int) and found["kind"] in (LOOK, EPOCH)
    except (ValueError, KeyError, TypeError):
        return None
    return found if whole else None


def _belongs(line: dict[str, Any] | None, step: int, epoch: int) -> bool:
    if line is None:
        return False
    return bool(line["epoch"] <= epoch if line["kind"] == EPOCH else line["step"] <= step)


def _ends_with_newline(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(0, os.SEEK_END)
        if not file.tell():
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
