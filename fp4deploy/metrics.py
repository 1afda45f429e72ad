"""Accuracy: mean intersection over union, from the confusion matrix of all pixels; Dice and distances of volumes.

IoU of a class = true positives / (true positives + false positives + false negatives), over the whole split rather
than averaged over images. A class that occurs neither in the truth nor in the prediction has no IoU and is left out of
the mean; pixels labelled 255 (crowd, void) count nowhere.

Of volumes there are two more, as is usual for them: by class and volume, then the mean over the volumes that have one.

    Dice                      2 true positives / (voxels of the class in the truth + in the prediction)
    95 % Hausdorff distance   the larger of the 95th percentiles of the distances, in mm, from the voxels of one surface
                              to the nearest of the other; a surface is what erosion by the 6 neighbours removes

The matrix is one `torch.bincount` of truth * classes + prediction. torchmetrics counts in the same way, but its import
brings scipy.signal and matplotlib: as many seconds as torch, in every training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy.data.sample import IGNORE
from fp4deploy.system.schema import finite_or_none


@dataclass(frozen=True)
class Scores:
    """mIoU and pixel accuracy in [0, 1]; `per_class` holds None for a class that never occurred.

    auprc: mean `average_precision` of the classes but the background, where it was asked for.
    """

    miou: float
    per_class: dict[str, float | None]
    pixel_accuracy: float
    auprc: float | None = field(default=None, kw_only=True)

    @property
    def score(self) -> float:
        """The number that selects the best checkpoint: the larger, the better."""
        return self.miou

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        measured = {} if self.auprc is None else {"auprc": self.auprc}
        return {"miou": self.miou, "per_class": self.per_class, **measured}

    def text(self) -> str:
        """For a person."""
        return f"mIoU {100 * self.miou:.2f} %" + ("" if self.auprc is None else f", AUPRC {100 * self.auprc:.2f} %")

    def to_json(self) -> dict[str, object]:
        """For a JSON file; NaN becomes None."""
        values = {"miou": self.miou, "pixel_accuracy": self.pixel_accuracy}
        return {name: finite_or_none(value) for name, value in values.items()}


@dataclass(frozen=True)
class VolumeScores(Scores):
    """Scores of volumes: also Dice in [0, 1] and 95 % Hausdorff distance in mm, of each class but the background.

    None: of a class that no volume has, in the truth or (Dice) the prediction; of distances also where none was
    measured.
    """

    dice: dict[str, float | None]
    hd95: dict[str, float | None]

    @property
    def mean_dice(self) -> float | None:
        """Mean over the classes that have one."""
        return _mean_of(self.dice)

    @property
    def mean_hd95(self) -> float | None:
        """Mean over the classes that have one, millimetres."""
        return _mean_of(self.hd95)

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {**super().line(), "dice": self.mean_dice, "dice_per_class": self.dice}

    def text(self) -> str:
        """For a person."""
        dice = self.mean_dice
        return super().text() if dice is None else f"{super().text()}, Dice {100 * dice:.2f} %"

    def to_json(self) -> dict[str, object]:
        """For a JSON file."""
        return {**super().to_json(), "dice": self.mean_dice, "hd95_mm": self.mean_hd95}


@dataclass(frozen=True)
class LabelScores:
    """Of images with one class each: the share whose most likely class is right, and of each class; None: no image."""

    top1: float
    per_class: dict[str, float | None]

    @property
    def score(self) -> float:
        """The number that selects the best checkpoint: the larger, the better."""
        return self.top1

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {"top1": self.top1, "per_class": self.per_class}

    def text(self) -> str:
        """For a person."""
        return f"top-1 {100 * self.top1:.2f} %"

    def to_json(self) -> dict[str, object]:
        """For a JSON file; NaN becomes None."""
        return {"top1": finite_or_none(self.top1)}


def average_precision(scores: torch.Tensor, truth: torch.Tensor) -> float | None:
    """Area under the precision-recall curve: the precision at each distinct score, weighted by the step of the recall.

    As scikit-learn's `average_precision_score`, on the device of the scores.

    Args:
        scores: [N], any float dtype; the larger, the more likely.
        truth: bool [N].

    Returns:
        In [0, 1]; None where nothing is true.

    >>> average_precision(torch.tensor([0.9, 0.6, 0.6, 0.1]), torch.tensor([True, False, True, False]))
    0.8333333333333333
    """
    scores, order = scores.sort(descending=True)
    hits = truth[order].cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], scores.new_ones(1, dtype=torch.bool)[: len(scores)]])
    hits, seen = hits[last], last.nonzero().flatten() + 1
    if not len(hits) or not hits[-1]:
        return None
    steps = hits.diff(prepend=hits.new_zeros(1)).double() / hits[-1]
    return float((hits.double() / seen * steps).sum())


def _mean_of(values: Mapping[str, float | None]) -> float | None:
    known = [value for value in values.values() if value is not None]
    return sum(known) / len(known) if known else None


def hausdorff95(prediction: NDArray[np.bool_], truth: NDArray[np.bool_], spacing: Sequence[float]) -> float | None:
    """95 % Hausdorff distance between two masks of one size, in the unit of `spacing`; None where one is empty.

    >>> left, right = np.zeros((2, 8, 8, 8), bool)
    >>> left[2:4, 2:4, 2:4] = right[2:4, 2:4, 4:6] = True
    >>> hausdorff95(left, right, (1.0, 1.0, 3.0))
    6.0
    """
    from scipy import ndimage

    if not prediction.any() or not truth.any():
        return None
    (box,) = ndimage.find_objects((prediction | truth).astype(np.uint8))  # distances outside are not asked for
    surfaces = [np.pad(each[box], 1) & ~ndimage.binary_erosion(np.pad(each[box], 1)) for each in (prediction, truth)]
    away = [ndimage.distance_transform_edt(~each, sampling=spacing) for each in surfaces]
    return float(max(np.percentile(away[1][surfaces[0]], 95), np.percentile(away[0][surfaces[1]], 95)))


class SegmentationScore:
    """Accumulates predictions [N, H, W] (or logits [N, C, H, W]) against targets [N, H, W]; or with D before H."""

    def __init__(self, num_classes: int, class_names: Sequence[str], ignore_index: int = IGNORE) -> None:
        self.num_classes, self.ignore_index = num_classes, ignore_index
        self.class_names = tuple(class_names)
        self._counts = torch.zeros(num_classes, num_classes, dtype=torch.int64)

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch."""
        if prediction.ndim > target.ndim:
            prediction = prediction.argmax(dim=1)
        labelled = target != self.ignore_index
        pairs = target[labelled].long() * self.num_classes + prediction.to(target.device)[labelled]
        counts = torch.bincount(pairs, minlength=self._counts.numel())
        self._counts = self._counts.to(target.device) + counts.view_as(self._counts)

    def add(self, matrix: torch.Tensor) -> None:
        """Add confusion counts [truth, prediction]."""
        self._counts = self._counts + matrix.to(self._counts)

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


class LabelScore:
    """Accumulates classes [N] against classes [N]."""

    def __init__(self, class_names: Sequence[str]) -> None:
        self.class_names = tuple(class_names)
        self._right = torch.zeros(len(class_names), 2, dtype=torch.int64)  # of each class: images that are right, all

    def update(self, prediction: torch.Tensor, target: torch.Tensor) -> None:
        """Add a batch."""
        prediction, target = prediction.cpu(), target.cpu()
        counts = torch.bincount(target, minlength=len(self.class_names))
        right = torch.bincount(target[prediction == target], minlength=len(self.class_names))
        self._right += torch.stack([right, counts], 1)

    def compute(self) -> LabelScores:
        """Scores of everything seen so far; NaN where no image was."""
        right, counts = self._right.sum(0).tolist()
        each = {
            name: hit / seen if seen else None
            for name, (hit, seen) in zip(self.class_names, self._right.tolist(), strict=True)
        }
        return LabelScores(right / counts if counts else float("nan"), each)
