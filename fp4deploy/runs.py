"""Run folders: where training, export, build and bench find each other's files.

    runs/NAME/
      config.yaml                     resolved configuration
      models.json                     the models it was asked to train, which --resume continues
      commands.jsonl                  what was called, when, on what machine
      <model>/best.safetensors        checkpoint with the best validation mIoU
      <model>/metrics.jsonl           one line an epoch
      <model>/telemetry.jsonl         statistics of every layer, one line a snapshot
      <model>/state/                  everything an exact resume needs
      plots/heatmaps/<model>/         of the telemetry; plots/kurtosis/<model>/ of the study
      export/unet.onnx                the NVFP4 model; the FP16 baseline is unet-fp16.onnx
      export/unet.fp4                 the same, packed; and unet-fp16.fp4
      engines/unet.plan               and its ledger, unet.ledger.json
      report.{json,md,html}

A run never overwrites another, and every file is written under a temporary name and renamed, so that a full disk or
Ctrl-C leaves the previous version whole.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from pathlib import Path

from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write

MODELS = ("fp16", "nvfp4", "fp16_control", "nvfp4_ptq")
DEFAULT_MODELS = ("fp16", "nvfp4")  # trained by default
RUNS = Path("runs")


class Run:
    """The folder of one run; only names paths, creates nothing by itself."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.config_path = self.path / "config.yaml"
        self.models_path = self.path / "models.json"
        self.export_dir = self.path / "export"
        self.engine_dir = self.path / "engines"

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def model_dir(self, model: str) -> Path:
        """Folder of one trained model."""
        return self.path / model

    def checkpoint(self, model: str) -> Path:
        """Best checkpoint of one trained model (it may not exist yet)."""
        return self.model_dir(model) / "best.safetensors"

    def models(self) -> list[str]:
        """Names of the models that have a checkpoint, FP16 first."""
        return [model for model in MODELS if self.checkpoint(model).is_file()]

    def asked_models(self) -> tuple[str, ...]:
        """The models that trainings into this run were asked for, in their order; () where none has been noted.

        Raises:
            InputError: what was noted cannot be read.
        """
        if not self.models_path.is_file():
            return ()
        try:
            names = json.loads(self.models_path.read_text(encoding="utf-8"))
            return tuple(name for name in names if name in MODELS)
        except (ValueError, TypeError) as error:
            raise InputError(
                f"{self.models_path} is no list of models: {error}. Remove it, and name --models."
            ) from None

    def ask_models(self, models: Iterable[str]) -> None:
        """Note that `models` are to be trained, after those requested before.

        Raises:
            InputError: the disk is full or the folder cannot be written.
        """
        with atomic_write(self.models_path) as path:
            path.write_text(json.dumps(list(dict.fromkeys((*self.asked_models(), *models)))) + "\n", encoding="utf-8")


def processes() -> int:
    """How many processes a launcher such as torchrun started together."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first_process() -> bool:
    """Whether this process is alone, or the one of several that writes files and speaks."""
    return int(os.environ.get("RANK", "0")) == 0


def artifact_stem(model: str) -> str:
    """File stem of a model's exported artefacts: the NVFP4 model is the product, plain "unet"."""
    return "unet" if model == "nvfp4" else f"unet-{model}"


def create_run(out: Path | None = None, *, root: Path = RUNS) -> Run:
    """Create the folder of a new run: `out`, or `root`/<time>.

    Raises:
        InputError: `out` exists and is not an empty folder.
    """
    if out is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        names = [stamp, *(f"{stamp}-{number}" for number in range(2, 100))]
        out = next(root / name for name in names if not (root / name).exists())
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out} exists already, and a run never overwrites another. "
            "Give another --out, or continue that run with --resume."
        )
    out.mkdir(parents=True, exist_ok=True)
    return Run(out)


def open_run(path: Path) -> Run:
    """Open an existing run.

    Raises:
        InputError: `path` is not the folder of a run.
    """
    run = Run(Path(path))
    if not run.config_path.is_file():
        raise InputError(f"{path} is not a run: it holds no config.yaml. Train one with: fp4deploy train")
    return run


def latest_run(root: Path = RUNS) -> Run:
    """Open the run whose configuration was written last.

    Raises:
        InputError: there is no run under `root`.
    """
    configs = sorted(root.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime_ns)
    if not configs:
        raise InputError(f"There is no run under {root}/ yet. Train one with: fp4deploy train")
    return Run(configs[-1].parent)
