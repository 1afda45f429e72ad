"""What mIoU hides: counts of single images, boundaries, and small objects.

Boundary F1: a pixel is on the boundary of its class where a neighbour (of 4) has another label. Boundary pixels of the
prediction within a tolerance of a boundary pixel of the truth of the same class are correct (precision), and the other
way round (recall); F1 of a class is their harmonic mean over the pooled pixels of all images, and the score is the mean
over the classes that occur. The tolerance is 0.75 % of the image's diagonal, in the Chebyshev distance. Source: Csurka
et al., "What is a good evaluation measure for semantic segmentation?", 2013; pooling and distance are this project's.

Recall by object size: an object is a connected component (4 neighbours) of a class in the truth; small objects have
fewer than 32 x 32 pixels, medium ones fewer than 96 x 96, as in COCO. The recall of a class and size is the share of
those objects' pixels that are predicted as the class; the score is the mean over the classes. It has no counterpart
of IoU, because a wrong pixel belongs to no object of the truth. Background is no object, nor is a class of that name.

Pixels labelled `IGNORE` count nowhere and have no boundary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.bench.evidence import PixelCounts
from fp4deploy.data.sample import IGNORE, background_class

TOLERANCE = 0.0075  # of the image's diagonal
SIZES = {"small": 32 * 32, "medium": 96 * 96, "large": 1 << 62}  # pixels below which an object has this size


class SegmentationDetail:
    """Counts pixels, boundaries and objects of predictions, image by image."""

    def __init__(self, classes: Sequence[str], background: bool = False) -> None:
        """background: the first class is everything unlabelled."""
        self.classes, self.background = tuple(classes), background_class(classes, background)
        self._counts: list[NDArray[np.int64]] = []
        self._boundary = np.zeros((len(self.classes), 4))  # correct and all, of the prediction and of the truth
        self._objects = np.zeros((len(self.classes), len(SIZES), 2))  # hit and all pixels

    def update(self, prediction: Tensor, truth: Tensor) -> None:
        """Add images: class ids int64 [N, H, W] each."""
        for predicted, labels in zip(prediction.cpu(), truth.cpu(), strict=True):
            self._add(predicted, labels)

    def counts(self, images: Sequence[str]) -> PixelCounts:
        """Counts of the images in the order of `update`, under these names."""
        stacked = np.stack(self._counts) if self._counts else np.zeros((0, len(self.classes), 3), np.int64)
        return PixelCounts(images, self.classes, stacked)

    def boundary_f1(self) -> float | None:
        """Mean over the classes that have a boundary in the truth; None where none has."""
        right, predicted, found, truth = self._boundary.T
        known = truth > 0
        if not known.any():
            return None
        total = np.maximum(right / np.maximum(predicted, 1) + found / np.maximum(truth, 1), 1e-12)
        f1 = 2 * (right / np.maximum(predicted, 1)) * (found / np.maximum(truth, 1)) / total
        return float(f1[known].mean())

    def recall_by_size(self) -> dict[str, float | None]:
        """Size -> mean recall over the classes that have objects of that size."""
        result: dict[str, float | None] = {}
        for place, name in enumerate(SIZES):
            hit, total = self._objects[:, place].T
            known = total > 0
            result[name] = float((hit[known] / total[known]).mean()) if known.any() else None
        return result

    def _add(self, predicted: Tensor, truth: Tensor) -> None:
        count = len(self.classes)
        known = truth != IGNORE
        pairs = torch.bincount(truth[known] * count + predicted[known], minlength=count * count).view(count, count)
        self._counts.append(torch.stack([pairs.diag(), pairs.sum(1), pairs.sum(0)], -1).numpy())
        self._add_boundaries(predicted.masked_fill(~known, IGNORE), truth)
        self._add_objects(predicted, truth)

    def _add_boundaries(self, predicted: Tensor, truth: Tensor) -> None:
        labels = predicted.numpy(), truth.numpy()
        present = np.union1d(*labels)
        present = present[present != IGNORE]
        reach = max(1, round(TOLERANCE * math.hypot(*truth.shape)))
        ids = present.reshape(-1, 1, 1)
        first, second = ((each == ids) & _edges(each) for each in labels)
        near_first, near_second = (_grown(each, reach) for each in (first, second))
        for column, counted in enumerate((first & near_second, first, second & near_first, second)):
            self._boundary[present, column] += np.count_nonzero(counted, axis=(1, 2))

    def _add_objects(self, predicted: Tensor, truth: Tensor) -> None:
        from scipy import ndimage

        labels, right = truth.numpy(), (predicted == truth).numpy()
        for number in np.unique(labels):
            if number in (IGNORE, self.background):
                continue
            components, count = ndimage.label(labels == number)
            areas = np.bincount(components.ravel(), minlength=count + 1)[1:]
            hits = np.bincount(components.ravel(), weights=right.ravel(), minlength=count + 1)[1:]
            sizes = np.searchsorted(list(SIZES.values()), areas, side="right")
            np.add.at(self._objects[number, :, 0], sizes, hits)
            np.add.at(self._objects[number, :, 1], sizes, areas)


def _edges(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """bool [H, W]: a neighbour has another label, and neither is IGNORE."""
    edge = np.zeros(labels.shape, np.bool_)
    known = labels != IGNORE
    for ahead, behind in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differs = (labels[ahead] != labels[behind]) & known[ahead] & known[behind]
        edge[ahead] |= differs
        edge[behind] |= differs
    return edge


def _grown(mask: NDArray[np.bool_], reach: int) -> NDArray[np.bool_]:
    """bool [C, H, W] grown by `reach` pixels in every direction; what is grown by k is grown by 2k + 1 a step later."""
    for axis in (1, 2):
        done = 0
        while done < reach:
            step = min(done + 1, reach - done)
            grown = mask.copy()
            ahead, behind = ((slice(None),) * axis + (each,) for each in (slice(step, None), slice(None, -step)))
            grown[ahead] |= mask[behind]
            grown[behind] |= mask[ahead]
            mask, done = grown, done + step
    return mask
