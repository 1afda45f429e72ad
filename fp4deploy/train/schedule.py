"""The models of a run: where each starts, how long it trains, at which learning rate, and which files it writes.

| model | starts from | epochs | learning rate |
|---|---|---|---|
| fp16 | random weights | epochs | lr |
| nvfp4 | the fp16 checkpoint, activation scales calibrated on training batches | finetune_epochs | finetune_lr |
| nvfp4 with train.from_scratch | random weights | epochs | lr |
| fp16_control | the fp16 checkpoint | finetune_epochs | finetune_lr |
| nvfp4_ptq | the fp16 checkpoint, calibrated as nvfp4 | 0: quantised and measured | |

Fine-tuning alone improves a model, so that comparing NVFP4 with the checkpoint it started from flatters it:
`fp16_control` is trained as long, from the same weights, on the same batches, with the same auxiliary losses.
`epochs_of` is the one place that knows these lengths; training, estimates and sweeps ask it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from fp4deploy.runs import Run
from fp4deploy.train.config import Config

QUANTIZED_MODELS = ("nvfp4", "nvfp4_ptq")
STATE_FILE = "state/last.safetensors"
METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True)
class TrainingJob:
    """One model's training: its name, its length in epochs, its peak learning rate, the folder of its files."""

    model: str
    epochs: int
    lr: float
    folder: Path

    @property
    def state_path(self) -> Path:
        """The resume state, one file."""
        return self.folder / STATE_FILE

    @property
    def metrics_path(self) -> Path:
        """One JSON line an epoch."""
        return self.folder / METRICS_FILE

    @property
    def checkpoint(self) -> Path:
        """The weights with the best validation score."""
        return self.folder / "best.safetensors"


def is_fine_tuned(config: Config, model: str) -> bool:
    """Whether `model` starts from an FP16 checkpoint instead of random weights."""
    return model in ("fp16_control", "nvfp4_ptq") or (model == "nvfp4" and not config.train.from_scratch)


def epochs_of(config: Config, model: str) -> int:
    """How many epochs `model` trains for."""
    if model == "nvfp4_ptq":
        return 0
    return config.train.finetune_epochs if is_fine_tuned(config, model) else config.train.epochs


def training_job(config: Config, run: Run, model: str) -> TrainingJob:
    """The training of `model` in `run`."""
    lr = config.train.finetune_lr if is_fine_tuned(config, model) else config.train.lr
    return TrainingJob(model, epochs_of(config, model), lr, run.model_dir(model))


def learning_rate(step: int, steps: int, peak: float, warmup: float) -> float:
    """Linear warm-up over the first `warmup` share of `steps`, then half a cosine down to 0.

    A pure function of the step, so that a resumed training needs no scheduler state.
    """
    rising = max(1, round(steps * warmup)) if warmup else 0
    if step < rising:
        return peak * (step + 1) / rising
    return peak * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
