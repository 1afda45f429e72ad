"""Counts of single images: what the gate resamples, and what `bench --json` keeps so that a baseline can be compared.

A semantic model's are pixels: of every image and class how many are in the truth, in the prediction and in both. IoU
of a class over any set of images is their sum: hit / (truth + predicted - hit). An instance model's are matches
(`instances.matches`). In JSON an image is one line of text:

    pixels    a word a class, hit/truth/predicted, "-" for three zeros           "12/400/410 - 3/5/6"
    voxels    the same, of volumes
    labels    the same, of classifiers, an image as one pixel
    matches   "objects of each class | class:score:matched:ignored ...", bits of the ten overlaps in hexadecimal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fp4deploy.bench.records import Evidence
from fp4deploy.errors import InputError
from fp4deploy.instances import InstanceScores
from fp4deploy.instances.matches import OVERLAPS, ClassMatches, Matches
from fp4deploy.metrics import LabelScores, Scores


@dataclass(frozen=True)
class Accuracy:
    """What one evaluation gives: the scores, counts of its images, and the digest of the images and labels.

    boundary_f1, recall_by_size, never_predicted: of semantic models, see `detail`. errors, confusion: of detectors, see
    `detection.errors`.
    """

    scores: Scores | InstanceScores | LabelScores
    evidence: Evidence
    data_sha256: str
    boundary_f1: float | None = None
    recall_by_size: dict[str, float | None] = field(default_factory=dict)
    never_predicted: list[str] = field(default_factory=list)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    confusion: dict[str, dict[str, int]] = field(default_factory=dict)


class PixelCounts:
    """hit, truth and predicted pixels, int64 [N, C] each."""

    def __init__(self, images: Sequence[str], classes: Sequence[str], counts: NDArray[np.int64]) -> None:
        """counts: int64 [N, C, 3]."""
        self.images, self.classes = tuple(images), tuple(classes)
        self.hit, self.truth, self.predicted = counts[..., 0], counts[..., 1], counts[..., 2]

    def never_predicted(self) -> list[str]:
        """Classes that occur in the truth and in no prediction."""
        absent = (self.truth.sum(0) > 0) & (self.predicted.sum(0) == 0)
        return [name for name, each in zip(self.classes, absent, strict=True) if each]

    def constant(self) -> tuple[str, float]:
        """The class that scores best when every pixel is called it, and the mIoU of that in [0, 1]."""
        truth = self.truth.sum(0)
        best = int(truth.argmax())
        return self.classes[best], float(truth[best] / max(1, truth.sum()) / max(1, np.count_nonzero(truth)))

    def per_class(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """The metric [..., C] of the images weighted by [..., N]; NaN for a class that occurs in none of them."""
        return self.iou(weights)

    def iou(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """IoU [..., C] of the images weighted by [..., N]; NaN for a class that occurs in none of them."""
        hit = weights @ self.hit
        union = weights @ (self.truth + self.predicted) - hit
        return np.divide(hit, union, out=np.full_like(hit, np.nan), where=union > 0)


class VoxelCounts(PixelCounts):
    """The same of volumes, whose metric is Dice: by volume, then the mean over the volumes; none of the background."""

    def constant(self) -> tuple[str, float]:
        """The class that scores best when every voxel is called it, and the mean Dice of that in [0, 1]."""
        voxels = self.truth.sum(1, keepdims=True)
        alone = np.divide(2 * self.truth, self.truth + voxels, out=np.zeros(self.truth.shape), where=voxels > 0)
        scores = alone[:, 1:].mean(0)
        best = int(scores.argmax())
        return self.classes[1 + best], float(scores[best] / max(1, np.count_nonzero(self.truth[:, 1:].sum(0))))

    def per_class(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Dice [..., C] of the volumes weighted by [..., N]."""
        total = self.truth + self.predicted
        known = (total > 0).astype(np.float64)
        known[:, 0] = 0
        dice = np.divide(2 * self.hit, total, out=np.zeros(total.shape), where=total > 0)
        sums, count = weights @ (dice * known), weights @ known
        return np.divide(sums, count, out=np.full_like(sums, np.nan), where=count > 0)


class LabelCounts(PixelCounts):
    """The same of images that have one class each, counted as one pixel; the metric is the share that is right."""

    def constant(self) -> tuple[str, float]:
        """The most frequent class, and the share of the images that have it."""
        truth = self.truth.sum(0)
        return self.classes[int(truth.argmax())], float(truth.max() / max(1, truth.sum()))

    def per_class(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Top-1 [..., 1] of the images weighted by [..., N]: it is one number, and no mean over classes."""
        right, all_images = (weights @ counts.sum(1, keepdims=True) for counts in (self.hit, self.truth))
        return np.divide(right, all_images, out=np.full_like(right, np.nan), where=all_images > 0)


KINDS = {"voxels": VoxelCounts, "labels": LabelCounts, "pixels": PixelCounts}


def write_pixels(counts: PixelCounts) -> Evidence:
    """Counts as text."""
    stacked = np.stack([counts.hit, counts.truth, counts.predicted], -1)
    lines = [" ".join("/".join(map(str, cell)) if any(cell) else "-" for cell in image) for image in stacked.tolist()]
    kind: object = next(name for name, kind in KINDS.items() if isinstance(counts, kind))
    return Evidence(kind=kind, classes=list(counts.classes), images=list(counts.images), lines=lines)


def write_matches(matches: Matches) -> Evidence:
    """Matches as text."""
    found: list[list[str]] = [[] for _ in matches.images]
    powers = 1 << np.arange(OVERLAPS)
    for number, each in enumerate(matches.detections):
        matched, ignored = powers @ each.matched, powers @ each.ignored
        for image, score, match, ignore in zip(each.image, each.score, matched, ignored, strict=True):
            found[int(image)].append(f"{number}:{float(score)!r}:{int(match):x}:{int(ignore):x}")
    objects = matches.objects.tolist()
    lines = [" ".join([*map(str, row), "|", *words]) for row, words in zip(objects, found, strict=True)]
    return Evidence(kind="matches", classes=list(matches.classes), images=list(matches.images), lines=lines)


def read_evidence(evidence: Evidence, source: object) -> PixelCounts | Matches:
    """Parse what `write_pixels` or `write_matches` wrote; `source` begins the message of an error.

    Raises:
        InputError: a line does not have that form, or lines, images and classes do not go together.
    """
    if len(evidence.lines) != len(evidence.images):
        raise InputError(f"{source}: {len(evidence.lines)} lines of counts for {len(evidence.images)} images.")
    try:
        return _matches(evidence) if evidence.kind == "matches" else _pixels(evidence)
    except (ValueError, IndexError, OverflowError) as error:
        raise InputError(f"{source}: the counts of its images cannot be read: {error}.") from None


def _pixels(evidence: Evidence) -> PixelCounts:
    count = len(evidence.classes)
    counts = np.zeros((len(evidence.images), count, 3), np.int64)
    for image, line in enumerate(evidence.lines):
        words = line.split()
        if len(words) != count:
            raise ValueError(f"{len(words)} words for {count} classes")
        for place, word in enumerate(words):
            if word != "-":
                hit, truth, predicted = (int(part) for part in word.split("/"))
                if not 0 <= hit <= min(truth, predicted) or max(truth, predicted) > 1 << 40:
                    raise ValueError(f"'{word[:40]}' are no counts of pixels")
                counts[image, place] = hit, truth, predicted
    return KINDS[evidence.kind](evidence.images, evidence.classes, counts)


def _matches(evidence: Evidence) -> Matches:
    count = len(evidence.classes)
    objects = np.zeros((len(evidence.images), count), np.int64)
    rows: list[list[tuple[int, float, int, int]]] = [[] for _ in range(count)]
    for image, line in enumerate(evidence.lines):
        first, bar, rest = line.partition("|")
        numbers = [int(word) for word in first.split()]
        if not bar or len(numbers) != count or min(numbers, default=0) < 0 or max(numbers, default=0) > 1 << 30:
            raise ValueError(f"'{line[:40]}' does not count the objects of {count} classes")
        objects[image] = numbers
        for word in rest.split():
            number, score, matched, ignored = word.split(":")
            bits = int(matched, 16), int(ignored, 16)
            if not (0 <= int(number) < count and max(bits) < 1 << OVERLAPS and min(bits) >= 0 <= float(score) <= 1):
                raise ValueError(f"'{word[:40]}' is no detection")
            rows[int(number)].append((image, float(score), *bits))
    return Matches(tuple(evidence.images), tuple(evidence.classes), objects, tuple(map(_class_matches, rows)))


def _class_matches(rows: list[tuple[int, float, int, int]]) -> ClassMatches:
    table = np.array(rows, np.float64).reshape(-1, 4)
    order = np.argsort(-table[:, 1], kind="mergesort")
    image, matched, ignored = (table[order, column].astype(np.int64) for column in (0, 2, 3))
    bits = np.arange(OVERLAPS)[:, None]
    return ClassMatches(image, table[order, 1], (matched >> bits & 1).astype(bool), (ignored >> bits & 1).astype(bool))
