"""How far a drop in accuracy is known: a paired bootstrap over images.

mIoU and AP are not means over images: IoU is a ratio of pooled pixels, and precision runs over the detections of all
images. So images are resampled, and the metric is computed of each sample as a whole: a replicate draws N of the N
images with replacement, both artefacts are scored on the same draw, and the drop of the replicate is the difference.
The interval lies between the quantiles (1 - level) / 2 and (1 + level) / 2 of the drops of all replicates.

Pairing removes what is common to both, which images were drawn, and leaves where the two differ: two artefacts that
predict the same have an interval of width 0, whatever the size of the split. The draws come from a fixed seed, so that
a gate decides the same way each time.

Source: Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapters 13 (percentile interval) and 8 (units
that are independent are what is resampled).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4deploy.bench.evidence import LabelCounts, PixelCounts, VoxelCounts
from fp4deploy.instances.matches import Matches

LEVEL = 0.95
REPLICATES = 2000
FEW_IMAGES = 30  # below this an interval is itself uncertain
_AT_A_TIME = 100

Floats = NDArray[np.float64]
Counts = PixelCounts | Matches


@dataclass(frozen=True)
class Interval:
    """A drop in accuracy, 0 to 1 (negative for a gain), and the bounds of its interval."""

    drop: float
    low: float
    high: float


@dataclass(frozen=True)
class PairedDrop:
    """The drop of the metric and of every class that occurs; `images`: drop that each image's change causes [N]."""

    metric: Interval
    classes: dict[str, Interval]
    images: Floats


def paired_drop(
    baseline: Counts, other: Counts, level: float = LEVEL, replicates: int = REPLICATES, seed: int = 0
) -> PairedDrop:
    """Interval of the drop from `baseline` to `other`, counts of the same images and classes in the same order."""
    first, second = per_class(baseline), per_class(other)
    everything = np.ones((1, len(baseline.images)))
    whole = (first(everything) - second(everything))[0]
    drops = np.concatenate(
        [first(weights) - second(weights) for weights in _draws(len(baseline.images), replicates, seed)]
    )
    metric = _interval(_mean(whole[None])[0], _mean(drops), level)
    occurring = [place for place in range(len(whole)) if not np.isnan(whole[place])]
    classes = {baseline.classes[place]: _interval(whole[place], drops[:, place], level) for place in occurring}
    return PairedDrop(metric, classes, _by_image(baseline, other))


def mean_drop(pairs: Sequence[tuple[Counts, Counts]]) -> Interval:
    """Interval of the mean of the drops of several pairs, as of trainings by several seeds, on the same images.

    A replicate draws images once for all pairs: the interval is of these models on other images, and says nothing of
    other seeds.
    """
    functions = [(per_class(baseline), per_class(other)) for baseline, other in pairs]
    count = len(pairs[0][0].images)

    def drop(weights: Floats) -> Floats:
        return np.mean([_mean(first(weights) - second(weights)) for first, second in functions], axis=0)

    drops = np.concatenate([drop(weights) for weights in _draws(count, REPLICATES, 0)])
    return _interval(float(drop(np.ones((1, count)))[0]), drops, LEVEL)


def per_class(counts: Counts) -> Callable[[Floats], Floats]:
    """The function from weights of the images [R, N] to the metric of every class [R, C]."""
    if isinstance(counts, PixelCounts):
        return counts.per_class
    return lambda weights: np.stack([counts.per_class(row) for row in weights])


def value(counts: Counts) -> float:
    """mIoU, Dice or AP of all images; NaN where nothing can be scored."""
    return float(_mean(per_class(counts)(np.ones((1, len(counts.images)))))[0])


def _draws(images: int, replicates: int, seed: int) -> Iterator[Floats]:
    """Weights [R, N], a part of the replicates at a time."""
    random = np.random.default_rng(seed)
    for start in range(0, replicates, _AT_A_TIME):
        count = min(_AT_A_TIME, replicates - start)
        yield random.multinomial(images, np.full(images, 1 / images), count).astype(np.float64)


def _mean(values: Floats) -> Floats:
    """Mean over the classes that occur, [R, C] -> [R]."""
    known = ~np.isnan(values)
    count = known.sum(1)
    return np.where(count > 0, np.where(known, values, 0.0).sum(1) / np.maximum(count, 1), np.nan)


def _interval(drop: float, replicates: Floats, level: float) -> Interval:
    known = replicates[~np.isnan(replicates)]
    if not known.size:
        return Interval(float(drop), float("nan"), float("nan"))
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(drop), float(low), float(high))


def _by_image(baseline: Counts, other: Counts) -> Floats:
    """What each image costs [N].

    Voxels: the drop of Dice. Labels: whether it is right. Pixels: the drop of mIoU where this image alone is predicted
    by `other`. Matches: objects found less.
    """
    if isinstance(baseline, Matches) and isinstance(other, Matches):
        return baseline.found() - other.found()
    assert isinstance(baseline, PixelCounts)
    assert isinstance(other, PixelCounts)
    if isinstance(baseline, VoxelCounts | LabelCounts):  # a mean over volumes or images: each costs its share
        before, after = (each.per_class(np.eye(len(each.images))) for each in (baseline, other))
        return (_mean(before) - _mean(after)) / len(baseline.images)
    hit = baseline.hit.sum(0) + other.hit - baseline.hit
    union = (baseline.truth + baseline.predicted).sum(0) + other.predicted - baseline.predicted - hit
    iou = np.divide(hit, union, out=np.full(hit.shape, np.nan), where=union > 0)
    return value(baseline) - _mean(iou)
