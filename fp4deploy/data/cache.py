"""Keeping a small dataset decoded in memory.

Decoding a JPEG and drawing its polygons costs more than training a small model on it, and every epoch pays it again.
A set that fits the budget is decoded once, before training: 4 bytes a pixel (RGB and class; 8 with instances), original
size, so that cached samples are exactly the samples read from disk. Worker processes share the memory of the process
that forked them. A set that does not fit is not cached at all: a part of it would save only that part of the time.
"""

from __future__ import annotations

from fp4deploy.data.sample import Sample, SegmentationDataset

DEFAULT_BUDGET = 2**30  # bytes
_PROBE = 16  # samples after which the size of the whole set is estimated


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
    for index in range(len(dataset)):
        sample = dataset.load(index)
        sample.image.flags.writeable = False
        sample.mask.flags.writeable = False
        if sample.instances is not None:
            sample.instances.flags.writeable = False
            size += sample.instances.nbytes
        samples.append(sample)
        size += sample.image.nbytes + sample.mask.nbytes
        expected = size if len(samples) < _PROBE else size / len(samples) * len(dataset)
        if expected > budget:
            return dataset
    return CachedDataset(dataset, samples)
