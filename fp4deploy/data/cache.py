"""Keeping a small dataset decoded in memory.

Decoding a JPEG and drawing its polygons costs more than training a small model on it, and every epoch pays it again.
A set that fits the budget is decoded once before training: 4 bytes a pixel (RGB and class; 8 with instances), original
size, so that cached samples are exactly the samples read from disk. Worker processes share the memory of the process
that forked them. A set that does not fit is not cached at all: a part of it would save only that part of the time.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

from fp4deploy.data.sample import Sample, SegmentationDataset

DEFAULT_BUDGET = 2**30  # bytes
_PROBE = 16  # samples that are read at a time, and after which the size of the whole set is estimated
MAX_THREADS = 16


class CachedDataset:
    """A dataset whose samples are already in memory; implements `SegmentationDataset`."""

    def __init__(self, dataset: SegmentationDataset, samples: list[Sample]) -> None:
        self.class_names = dataset.class_names
        self.background = dataset.background
        self.layout = dataset.layout
        self._samples = samples

    def __len__(self) -> int:
        return len(self._samples)

    def load(self, index: int) -> Sample:
        """Return the sample; its arrays are shared and read-only."""
        return self._samples[index]


def cache_dataset(dataset: SegmentationDataset, budget: int = DEFAULT_BUDGET) -> SegmentationDataset:
    """Decode a whole dataset into memory, or return it as it is where it needs more than `budget` bytes.

    Raises:
        InputError: a file cannot be read; all are read here, so this is found before training starts.
    """
    samples: list[Sample] = []
    size = 0
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:  # decoding releases the GIL
        for start in range(0, len(dataset), _PROBE):
            chunk = list(pool.map(dataset.load, range(start, min(start + _PROBE, len(dataset)))))
            size += sum(map(_frozen_bytes, chunk))
            samples += chunk
            if size / len(samples) * len(dataset) > budget:
                return dataset
    return CachedDataset(dataset, samples)


def _frozen_bytes(sample: Sample) -> int:
    """Make the arrays of a sample read-only; how much memory they take."""
    arrays = [array for array in (sample.image, sample.mask, sample.instances, sample.boxes) if array is not None]
    for array in arrays:
        array.flags.writeable = False
    return sum(array.nbytes for array in arrays)
