"""Accuracy: mean intersection over union, from the confusion matrix of all pixels.

IoU of a class = true positives / (true positives + false positives + false negatives), over the whole split rather
than averaged over images. A class that occurs neither in the truth nor in the prediction has no IoU and is left out of
the mean; pixels labelled 255 (crowd, void) count nowhere.

The matrix is one `torch.bincount` of truth * classes + prediction. torchmetrics counts in the same way, but its import
brings scipy.signal and matplotlib: as many seconds as torch, in every training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4deploy.data.sample import IGNORE


@dataclass(frozen=True)
class Scores:
    """mIoU and pixel accuracy in [0, 1]; `per_class` holds None for a class that never occurred."""

    miou: float
    per_class: dict[str, float | None]
    pixel_accuracy: float

    @property
    def score(self) -> float:
        """The number that selects the best checkpoint: the larger, the better."""
        return self.miou

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {"miou": self.miou, "per_class": self.per_class}

    def text(self) -> str:
        """For a person."""
        return f"mIoU {100 * self.miou:.2f} %"

    def to_json(self) -> dict[str, Any]:
        """For a JSON file; NaN becomes None."""
        values = {"miou": self.miou, "pixel_accuracy": self.pixel_accuracy}
        return {name: value if math.isfinite(value) else None for name, value in values.items()}


class SegmentationScore:
    """Accumulates predictions [N, H, W] (or logits [N, C, H, W]) against targets [N, H, W]."""

    def __init__(self, num_classes: int, class_names: Sequence[str], ignore_index: int = IGNORE) -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.class_names = tuple(class_names)
        self._counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch."""
        if prediction.ndim == 4:
            prediction = prediction.argmax(dim=1)
        labelled = target != self.ignore_index
        pairs = target[labelled].long() * self.num_classes + prediction.to(target.device)[labelled]
        counts = torch.bincount(pairs, minlength=self._counts.numel())
        self._counts = self._counts.to(target.device) + counts.view_as(self._counts)

    def matrix(self) -> torch.Tensor:
        """Confusion counts [truth, prediction]."""
        return self._counts.double().cpu()

    def compute(self) -> Scores:
        """Scores of everything seen so far; NaN mIoU when no labelled pixel was seen."""
        counts = self.matrix()
        hit = counts.diag()
        union = counts.sum(0) + counts.sum(1) - hit
        seen = union > 0
        iou = hit / union.clamp(min=1)
        total = counts.sum()
        return Scores(
            miou=float(iou[seen].mean()) if seen.any() else float("nan"),
            per_class={
                name: float(value) if occurs else None
                for name, value, occurs in zip(self.class_names, iou, seen, strict=True)
            },
            pixel_accuracy=float(hit.sum() / total) if total else float("nan"),
        )
