"""Which detection found which object, image by image: all that average precision needs, so that images can be weighted.

pycocotools matches the detections of one image and class with its objects; after that, average precision only counts.
With a weight w of each image (how often a bootstrap replicate drew it), over the detections in the order of their score

    tp = cumsum(w * matched)    fp = cumsum(w * not matched)    recall = tp / sum(w * objects)

and precision tp / (tp + fp), made monotone from the right, is read at 101 recalls. With all weights 1 this is the AP
of pycocotools. Detections that lie in a crowd count neither way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

RECALLS = np.linspace(0.0, 1.0, 101)
OVERLAPS = 10  # IoU 0.50, 0.55, ..., 0.95

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ClassMatches:
    """Detections of one class: `image` int64 [D], `score` [D], `matched` and `ignored` bool [10, D]."""

    image: Integers
    score: Floats
    matched: NDArray[np.bool_]
    ignored: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Matches:
    """All detections of a split; `objects` int64 [N, K] counts the objects of each image and class."""

    images: tuple[str, ...]
    classes: tuple[str, ...]
    objects: Integers
    detections: tuple[ClassMatches, ...]

    def per_class(self, weights: Floats) -> Floats:
        """AP of every class [K] with a weight of each image [N]; NaN where the weighted images have no object."""
        totals = weights @ self.objects
        return np.array(
            [
                _weighted_ap(found, weights, total) if total > 0 else np.nan
                for found, total in zip(self.detections, totals, strict=True)
            ]
        )

    def ap(self, weights: Floats) -> float:
        """Mean over the classes that have objects; NaN where none has."""
        values = self.per_class(weights)
        known = values[~np.isnan(values)]
        return float(known.mean()) if known.size else float("nan")

    def found(self) -> Floats:
        """Objects found in each image [N], mean over the ten overlaps."""
        counts = np.zeros(len(self.images))
        for each in self.detections:
            np.add.at(counts, each.image, (each.matched & ~each.ignored).mean(axis=0))
        return counts


def matches_of(evaluation: Any, ground_truth: dict[str, Any]) -> Matches:
    """Take the matches out of a `COCOeval` after `evaluate()`, objects of all sizes."""
    parameters = evaluation.params
    names = {image["id"]: str(image.get("file_name", image["id"])) for image in ground_truth["images"]}
    classes = {category["id"]: category["name"] for category in ground_truth["categories"]}
    count = len(parameters.imgIds)
    objects = np.zeros((count, len(parameters.catIds)), np.int64)
    detections = []
    for place in range(len(parameters.catIds)):
        start = place * len(parameters.areaRng) * count
        rows: list[tuple[Integers, Floats, NDArray[np.bool_], NDArray[np.bool_]]] = []
        for image, found in enumerate(evaluation.evalImgs[start : start + count]):
            if found is None:
                continue
            objects[image, place] = int((np.asarray(found["gtIgnore"]) == 0).sum())
            scores = np.asarray(found["dtScores"], np.float64)
            matched, ignored = (np.asarray(found[key]).reshape(OVERLAPS, -1) != 0 for key in ("dtMatches", "dtIgnore"))
            rows.append((np.full(len(scores), image), scores, matched, ignored))
        detections.append(_joined(rows))
    return Matches(
        tuple(names[image] for image in parameters.imgIds),
        tuple(classes[category] for category in parameters.catIds),
        objects,
        tuple(detections),
    )


def _joined(rows: list[tuple[Integers, Floats, NDArray[np.bool_], NDArray[np.bool_]]]) -> ClassMatches:
    if not rows:
        none = np.zeros((OVERLAPS, 0), bool)
        return ClassMatches(np.zeros(0, np.int64), np.zeros(0), none, none)
    image, score, matched, ignored = zip(*rows, strict=True)
    scores = np.concatenate(score)
    order = np.argsort(-scores, kind="mergesort")  # as pycocotools breaks ties
    return ClassMatches(
        np.concatenate(image)[order],
        scores[order],
        np.concatenate(matched, axis=1)[:, order],
        np.concatenate(ignored, axis=1)[:, order],
    )


def _weighted_ap(found: ClassMatches, weights: Floats, total: float) -> float:
    counted = weights[found.image] * ~found.ignored  # [10, D]
    true = np.cumsum(counted * found.matched, axis=1)
    false = np.cumsum(counted * ~found.matched, axis=1)
    precision = true / np.maximum(true + false, np.spacing(1))
    precision = np.maximum.accumulate(precision[:, ::-1], axis=1)[:, ::-1]
    read = np.zeros((len(true), len(RECALLS)))
    for overlap, recall in enumerate(true / total):
        at = np.searchsorted(recall, RECALLS, side="left")
        inside = at < len(recall)
        read[overlap, inside] = precision[overlap, at[inside]]
    return float(read.mean())
