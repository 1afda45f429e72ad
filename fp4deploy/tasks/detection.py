"""Object detection: a box for every object, scored by COCO's AP at the images' own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from fp4deploy.data import (
    IMAGE_MEAN,
    IMAGE_STD,
    VAL,
    BoxDataset,
    BoxTrainTransform,
    LetterboxTransform,
    SegmentationDataset,
    box_set,
    open_boxes,
)
from fp4deploy.data.augmentation.transforms import Rgb
from fp4deploy.detection import DetectionEvaluation
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Size

OVER_PIXELS = "it is of losses over pixels; task=detection has detection.alpha and .gamma"


class DetectionTask:
    """`Task` of object detection."""

    name, key, metric, per_class = "detection", "ap", "AP", "AP"
    counts_objects, at_input_size, boxes, whole_images = True, False, True, False
    unused: Mapping[str, str] = {
        "augment.rotate": "the box around a rotated box is larger than its object; leave it 0 for task=detection",
        **dict.fromkeys(("train.class_weights", "train.class_balance", "train.label_smoothing"), OVER_PIXELS),
    }

    def transform(
        self, size: Size, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, whole: bool = False
    ) -> LetterboxTransform:
        """Images as they are, in the corner of the input."""
        height, width = size
        return LetterboxTransform(height, width, mean, std)

    def augmentation(self, size: Size, seed: int, foreground: float = 0.0, **options: Any) -> BoxTrainTransform:
        """Zoom, cut, flips, colour and mosaics."""
        height, width = size
        return BoxTrainTransform(height, width, seed=seed, **options)

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split with its boxes."""
        return open_boxes(root, split, classes)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes of a model."""
        return box_set(card, data, split)

    def untiled(self, card: ModelCard) -> str:
        """An object that two tiles share has a box in each."""
        return "Boxes are not joined across tiles."

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, Any] | None = None
    ) -> DetectionEvaluation:
        """AP of boxes."""
        assert isinstance(card.head, DetectionHead)
        return DetectionEvaluation(cast(BoxDataset, dataset), card.head, (card.height, card.width), ground_truth)

    def ground_truth(self, dataset: SegmentationDataset) -> dict[str, Any]:
        """The annotations as pycocotools reads them."""
        return cast(BoxDataset, dataset).ground_truth()
