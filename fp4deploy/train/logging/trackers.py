"""Where telemetry goes: a file, TensorBoard, Weights & Biases, MLflow, behind one small Protocol (`tracker`).

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
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4deploy.errors import Fp4DeployError, UnavailableError
from fp4deploy.qat.telemetry.statistics import CODES
from fp4deploy.train.logging.jsonl_tracker import FILE, JsonlTracker
from fp4deploy.train.logging.mlflow_tracker import MlflowTracker
from fp4deploy.train.logging.tracker import PACKAGES, Entry, Tracker, required


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

    def __init__(self, folder: Path, name: str, project: str, mode: str, config: dict[str, object]) -> None:
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
    names: Iterable[str], folder: Path, project: str, wandb_mode: str, config: dict[str, object]
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
