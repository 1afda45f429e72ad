"""A part of a split, evenly spaced, for a first look at a model on a large set; a split several times over."""

from __future__ import annotations

import copy
from typing import TypeVar, cast

from fp4deploy.data.coco.dataset import CocoDataset
from fp4deploy.data.sample import Sample, SegmentationDataset, evenly
from fp4deploy.data.volumes.dataset import VolumeDataset

Dataset = TypeVar("Dataset", bound=SegmentationDataset)


def part_of(dataset: Dataset, count: int | None) -> Dataset:
    """`count` images of a dataset, evenly spaced and in its order; all where there are no more, or for None.

    The annotations go with their images: average precision of a part is that of these images alone.
    """
    if count is None or count >= len(dataset):
        return dataset
    places = evenly(len(dataset), count)
    if isinstance(dataset, CocoDataset | VolumeDataset):
        part = copy.copy(dataset)
        part.keep(places)
        return cast(Dataset, part)
    return cast(Dataset, _Part(dataset, places))


def repeated(dataset: SegmentationDataset, times: int) -> SegmentationDataset:
    """A dataset `times` times over: longer epochs of a small set."""
    return dataset if times == 1 else _Part(dataset, [*range(len(dataset))] * times)


class _Part:
    """The images of a dataset at `places`; implements `SegmentationDataset`."""

    def __init__(self, dataset: SegmentationDataset, places: list[int]) -> None:
        self.class_names, self.background, self.layout = dataset.class_names, dataset.background, dataset.layout
        self._dataset, self._places = dataset, places

    def __len__(self) -> int:
        return len(self._places)

    def load(self, index: int) -> Sample:
        return self._dataset.load(self._places[index])
