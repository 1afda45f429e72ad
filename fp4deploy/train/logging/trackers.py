"""Where telemetry goes: a file, TensorBoard, Weights & Biases, MLflow, behind one small Protocol.

    jsonl         <model>/telemetry.jsonl, one line a sample or an epoch; plots and reports are made of it
    tensorboard   <model>/tensorboard/
    wandb         <model>/wandb/; offline unless telemetry.wandb_mode (or WANDB_MODE) says otherwise, so that nothing
                  leaves the machine without being asked for: `wandb sync` uploads it later
    mlflow        <model>/mlflow/, a store of files unless MLFLOW_TRACKING_URI names another (`mlflow_tracker`)

Events are written by accelerate's trackers. Ours add what those do not know: histograms of FP4 codes, and a resume. A
resumed training repeats the steps after its last state, and `resume` makes every tracker forget them: the file drops
the lines, TensorBoard hides what lies after the step, W&B continues the run of the same id (online it keeps the values
that it has, offline it writes a second part).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fp4deploy.errors import Fp4DeployError, UnavailableError
from fp4deploy.files import append_line
from fp4deploy.qat.telemetry.statistics import CODES
from fp4deploy.requirements import MLFLOW, TENSORBOARD, WANDB
from fp4deploy.schema import whole_lines
from fp4deploy.train.logging.metrics_log import keep_lines

SAMPLE, EPOCH = "look", "epoch"  # kinds of lines; "look" is what files call a sample
FILE = "telemetry.jsonl"
PARTS = ("values", "layers", "codes")
DIGITS = 9
PACKAGES = {library.name: library for library in (TENSORBOARD, WANDB, MLFLOW)}

Layers = dict[str, dict[str, dict[str, float | None]]]
LayerCodes = dict[str, dict[str, list[int]]]


@dataclass(frozen=True)
class Entry:
    """A sample, or the metrics of an epoch.

    kind: `SAMPLE` (statistics of a step) or `EPOCH`.
    step: optimiser steps done, the sampled one included; epoch: the running one, from 1.
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
        """Write an entry."""

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Show PNG files by name, as of a step; after a training, on a tracker that is opened again."""

    def close(self) -> None:
        """Release files and connections."""


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
        keep_lines(self.path, lambda line: _belongs(_parsed(line), step, epoch))

    def log(self, entry: Entry) -> None:
        """Append a line.

        Raises:
            InputError: the disk is full or the folder cannot be written.
        """
        parts = {"values": entry.values, "layers": entry.layers, "codes": entry.codes}
        head = {"kind": entry.kind, "step": entry.step, "epoch": entry.epoch}
        append_line(self.path, {**head, **{name: part for name, part in parts.items() if part}})

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """They are files of the run already."""

    def close(self) -> None:
        """Nothing is open."""


def read_entries(path: Path) -> list[Entry]:
    """The entries of a telemetry.jsonl in order; damaged lines are skipped."""
    found = []
    for line in whole_lines(path):
        parsed = _parsed(line)
        if parsed is not None:
            parts = {name: parsed.get(name, {}) for name in PARTS}
            found.append(Entry(parsed["kind"], parsed["step"], parsed["epoch"], **parts))
    return found


class TensorBoardTracker:
    """Scalars and code histograms as TensorBoard events, written by accelerate's tracker."""

    def __init__(self, folder: Path) -> None:
        required("tensorboard")
        self.folder = folder
        self.tracker: Any = None

    def resume(self, step: int, epoch: int) -> None:
        """Open the folder; events of later steps are hidden."""
        from accelerate.tracking import TensorBoardTracker

        _join()
        purge = {"purge_step": step + 1} if step else {}
        self.tracker = TensorBoardTracker(self.folder.name, str(self.folder.parent), **purge)
        self.tracker.start()

    def log(self, entry: Entry) -> None:
        """Write events."""
        if self.tracker is None:
            self.resume(0, 0)
        for name, counts in entry.histograms().items():
            values = [float(code) for code in range(CODES)]
            total = sum(count * value for count, value in zip(counts, values, strict=True))
            squares = sum(count * value**2 for count, value in zip(counts, values, strict=True))
            limits = [value + 0.5 for value in values]
            self.tracker.writer.add_histogram_raw(
                name, 0.0, 15.0, sum(counts), total, squares, limits, counts, entry.step
            )
        self.tracker.log(entry.scalars(), entry.step)  # flushes both

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Write them as images of the step."""
        import numpy as np

        from fp4deploy.data.images import open_image

        if self.tracker is None:
            self.resume(step, 0)
        for name, path in files.items():
            with open_image(path) as image:
                self.tracker.writer.add_image(name, np.asarray(image.convert("RGB")), step, dataformats="HWC")

    def close(self) -> None:
        """Close the event file."""
        if self.tracker is not None:
            self.tracker.finish()
            self.tracker = None


class WandbTracker:
    """One W&B run a model, by accelerate's tracker; `name` and a fixed id make a resumed training the same run."""

    def __init__(self, folder: Path, name: str, project: str, mode: str, config: dict[str, Any]) -> None:
        self.wandb, self.project = required("wandb"), project
        self.tracker: Any = None
        digest = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]  # the same run after a resume
        self.options: dict[str, Any] = {
            "dir": str(folder),
            "name": name,
            "id": digest,
            "config": config,
            "mode": os.environ.get("WANDB_MODE", mode),
        }

    def resume(self, step: int, epoch: int) -> None:
        """Open the run, or continue it."""
        from accelerate.tracking import WandBTracker

        _join()
        Path(self.options["dir"]).mkdir(parents=True, exist_ok=True)
        quiet = self.wandb.Settings(silent=True, console="off")
        resume = "allow" if step else None
        self.tracker = WandBTracker(self.project, **self.options, resume=resume, settings=quiet)
        self.tracker.start()

    def log(self, entry: Entry) -> None:
        """Log scalars and histograms of a step."""
        if self.tracker is None:
            self.resume(0, 0)
        edges = [code - 0.5 for code in range(CODES + 1)]
        histograms = {
            name: self.wandb.Histogram(np_histogram=(counts, edges)) for name, counts in entry.histograms().items()
        }
        self.tracker.log({**entry.scalars(), **histograms, "epoch": entry.epoch}, entry.step)

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """Log them as images of the step."""
        if self.tracker is None:
            self.resume(step, 0)
        self.tracker.log({name: self.wandb.Image(str(path)) for name, path in files.items()}, step)

    def close(self) -> None:
        """Finish the run."""
        if self.tracker is not None:
            self.tracker.finish()
            self.tracker = None


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
        elif name == "wandb":
            made.append(WandbTracker(folder, _title(folder), project, wandb_mode, config))
        else:
            from fp4deploy.train.logging.mlflow_tracker import MlflowTracker

            made.append(MlflowTracker(folder / "mlflow", _title(folder), project, config))
    return made


@contextmanager
def stated() -> Iterator[None]:
    """What a tracker's library raises (no connection, a run that was deleted) as an error of one paragraph.

    Raises:
        UnavailableError: the library failed.
    """
    try:
        yield
    except Fp4DeployError:
        raise
    except Exception as error:
        raise UnavailableError(
            f"A tracker failed: {type(error).__name__}: {error}. Mend its settings, or leave it out of "
            "telemetry.trackers: telemetry.jsonl holds the same numbers."
        ) from error


def _title(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def log_pictures(
    names: Iterable[str], folder: Path, project: str, wandb_mode: str, files: Mapping[str, Path], step: int
) -> None:
    """Add pictures to what the trackers of a finished training have; the arguments are those of `make_trackers`.

    Raises:
        UnavailableError: a package is missing, or its library failed.
    """
    for tracker in make_trackers((name for name in names if name != "jsonl"), folder, project, wandb_mode, {}):
        with stated():
            tracker.pictures(files, step)
            tracker.close()


def check_trackers(names: Iterable[str]) -> None:
    """Before hours of training: every tracker's package is there.

    Raises:
        UnavailableError: one is missing; the message has the command that adds it.
    """
    for name in names:
        if name in PACKAGES:
            required(name)


def _join() -> None:
    """Accelerate's trackers and their logger ask which process of a training this is."""
    import torch
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())


def required(name: str) -> Any:
    """The package of a tracker.

    Raises:
        UnavailableError: it is missing.
    """
    otherwise = "leave it out: telemetry.jsonl holds the same numbers"
    return PACKAGES[name].require(f"The tracker '{name}'", otherwise)


def _parsed(line: Any) -> dict[str, Any] | None:
    """The line if it is an entry, its numbers whole and its parts objects."""
    if not isinstance(line, dict) or line.get("kind") not in (SAMPLE, EPOCH):
        return None
    whole = all(type(line.get(name)) is int for name in ("step", "epoch"))
    return line if whole and all(isinstance(line.get(name, {}), dict) for name in PARTS) else None


def _belongs(line: dict[str, Any] | None, step: int, epoch: int) -> bool:
    if line is None:
        return False
    return bool(line["epoch"] <= epoch if line["kind"] == EPOCH else line["step"] <= step)
