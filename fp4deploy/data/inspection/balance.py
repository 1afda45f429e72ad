"""How often the classes occur, and weights against their imbalance.

| method | weight of class c | |
|---|---|---|
| median_frequency | median(f) / f_c | f_c: pixels of c over all labelled pixels of the images that hold c |
| effective_number | (1 - b) / (1 - b^n_c), mean 1 | n_c: images that hold c; b = 1 - 1 / (number of images) |

raised to `power` (1: in full; 0.5: its square root, often the better compromise, since full weights buy the recall of
rare classes with false positives of theirs) and clipped to 1/10 to 10. A class that no training image holds weighs
1.

Sources: Eigen, Fergus, "Predicting Depth, Surface Normals and Semantic Labels with a Common Multi-Scale Convolutional
Architecture", 2015; Cui et al., "Class-Balanced Loss Based on Effective Number of Samples", 2019.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fp4deploy.data.sample import IGNORE, SegmentationDataset
from fp4deploy.errors import InputError
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import Count, read_json, validated

METHODS = ("median_frequency", "effective_number")
MAX_IMAGES = 4000  # evenly spaced over a larger set: frequencies to a few percent, minutes instead of an hour
BOUNDS = (0.1, 10.0)


@dataclass(frozen=True)
class ClassCounts:
    """Of each class: its pixels, the images that hold it, and all labelled pixels of those images."""

    class_names: tuple[str, ...]
    images: Count
    pixels: tuple[Count, ...]
    images_with: tuple[Count, ...]
    pixels_beside: tuple[Count, ...]

    @property
    def agree(self) -> bool:
        """Whether the numbers are possible: of every class, none without an image, none beyond what is labelled."""
        columns = (self.pixels, self.images_with, self.pixels_beside)
        return all(len(column) == len(self.class_names) for column in columns) and all(
            pixels <= beside and (pixels > 0) == (images > 0) and images <= self.images
            for pixels, images, beside in zip(*columns, strict=True)
        )


def count_classes(dataset: SegmentationDataset, most: int = MAX_IMAGES) -> ClassCounts:
    """Count over the masks of a dataset, or over `most` evenly spaced ones.

    Raises:
        InputError: a mask cannot be read.
    """
    classes, total = len(dataset.class_names), len(dataset)
    chosen = np.unique(np.linspace(0, total - 1, min(total, most)).round().astype(int)) if total else np.zeros(0, int)
    pixels, images, labelled = (np.zeros(classes, dtype=np.int64) for _ in range(3))
    for index in chosen:
        found = np.bincount(dataset.load(int(index)).mask.ravel(), minlength=IGNORE + 1)[:classes].astype(np.int64)
        pixels += found
        images += found > 0
        labelled += np.where(found > 0, found.sum(), 0)
    return ClassCounts(
        tuple(dataset.class_names), len(chosen), *(tuple(x.tolist()) for x in (pixels, images, labelled))
    )


def class_balance(counts: ClassCounts, method: str, power: float = 1.0) -> dict[str, float]:
    """Weight of every class by name, as the module's table says."""
    pixels, images, labelled = (
        np.array(x, dtype=float) for x in (counts.pixels, counts.images_with, counts.pixels_beside)
    )
    seen = pixels > 0
    weights = np.ones(len(pixels))
    if seen.any() and method == "median_frequency":
        frequency = pixels[seen] / labelled[seen]
        weights[seen] = np.median(frequency) / frequency
    elif seen.any() and method == "effective_number":
        base = 1 - 1 / max(2, counts.images)
        weights[seen] = (1 - base) / (1 - base ** images[seen])
        weights[seen] /= weights[seen].mean()
    weights = np.clip(weights**power, *BOUNDS)
    return dict(zip(counts.class_names, weights.tolist(), strict=True))


def cached_counts(dataset: SegmentationDataset, path: Path, identity: str) -> ClassCounts:
    """`count_classes`, kept as JSON at `path` for the dataset `identity`; counted again where that differs."""
    key = {"identity": identity, "classes": list(dataset.class_names), "length": len(dataset)}
    try:
        kept = read_json(path)
        if kept["of"] == key:
            counts = validated(ClassCounts, kept["counts"], path)
            if counts.agree and counts.images <= min(len(dataset), MAX_IMAGES):
                return counts
    except (InputError, KeyError, TypeError):
        pass
    counts = count_classes(dataset)
    write_whole(path, json.dumps({"of": key, "counts": asdict(counts)}) + "\n")
    return counts
