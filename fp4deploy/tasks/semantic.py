"""Semantic segmentation: a class for every pixel, scored by mIoU at the size of the input; of volumes at their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fp4deploy.data import (
    IMAGE_MEAN,
    IMAGE_STD,
    VAL,
    SegmentationDataset,
    open_dataset,
    validation_set,
)
from fp4deploy.data.augmentation.transforms import Rgb, Transform
from fp4deploy.data.augmentation.volumes import VolumeTrainTransform, VolumeTransform
from fp4deploy.data.volumes.dataset import VolumeDataset
from fp4deploy.metrics import SegmentationScore
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import VOLUME, Size
from fp4deploy.tasks.images import ClassEvaluation, ImageTask
from fp4deploy.tasks.volumes import VolumeEvaluation

MOSAIC = "it joins images with boxes, and this task has masks; leave it 0, or train with task=detection"


class SemanticTask(ImageTask):
    """`Task` of semantic segmentation."""

    name, key, metric, per_class, hub = "semantic", "miou", "mIoU", "IoU", "image-segmentation"
    unused: Mapping[str, str] = {"augment.mosaic": MOSAIC}

    def transform(self, size: Size, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, whole: bool = False) -> Transform:
        """Images resized to the input; volumes whole, or a window of the input's size."""
        if len(size) == VOLUME:
            return VolumeTransform(size, whole)
        return super().transform(size, mean, std, whole)

    def augmentation(self, size: Size, seed: int, foreground: float = 0.0, **options: Any) -> Transform:
        """Zoom, cut, flips and colour; of volumes zoom, cut, flips and intensities."""
        if len(size) == VOLUME:
            own = {name: options[name] for name in ("zoom", "jitter", "flip")}
            return VolumeTrainTransform(size, seed, foreground=foreground, **own)
        return super().augmentation(size, seed, **options)

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split with its masks."""
        return open_dataset(root, split, classes)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes of a model."""
        return validation_set(card, data, split)

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, object] | None = None
    ) -> ClassEvaluation | VolumeEvaluation:
        """mIoU over the classes of the data; of volumes Dice, too."""
        if isinstance(dataset, VolumeDataset):
            return VolumeEvaluation(dataset)
        return ClassEvaluation(SegmentationScore(len(dataset.class_names), dataset.class_names), dataset.background)
