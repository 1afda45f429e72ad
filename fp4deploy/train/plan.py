"""What one training of the loop is given besides its settings: where it writes, how long it is, what is added to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp4deploy.train.losses.auxiliary import Additions


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
        """The weights with the best validation score."""
        return self.folder / "best.safetensors"


@dataclass(frozen=True)
class Extras:
    """What a training has besides its settings: additions to the loss, rates of learned amaxes, weights of classes.

    clip_rates: (learning rate over that of the weights, weight decay); balance: class name -> weight in the
    cross-entropy.
    """

    additions: Additions | None = None
    clip_rates: tuple[float, float] = (1.0, 0.0)
    balance: dict[str, float] | None = None
