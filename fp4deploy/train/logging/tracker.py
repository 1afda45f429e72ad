"""What a tracker is, and the entries that it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fp4deploy.requirements import MLFLOW, TENSORBOARD, WANDB

SAMPLE, EPOCH = "look", "epoch"  # kinds of lines; "look" is what files call a sample
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


def required(name: str) -> Any:
    """The package of a tracker.

    Raises:
        UnavailableError: it is missing.
    """
    otherwise = "leave it out: telemetry.jsonl holds the same numbers"
    return PACKAGES[name].require(f"The tracker '{name}'", otherwise)
