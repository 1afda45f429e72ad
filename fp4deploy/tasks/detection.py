"""Object detection: a box for every object, scored by COCO's AP at the images' own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from fp4deploy.data import (
    VAL,
    BoxDataset,
    BoxTrainTransform,
    LetterboxTransform,
    SegmentationDataset,
    box_set,
    open_boxes,
)
from fp4deploy.detection import DetectionEvaluation
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.models.card import ModelCard
from fp4deploy.tasks.images import AS_OBJECTS, ImageTask

OVER_PIXELS = "it is of losses over pixels; task=detection has detection.alpha and .gamma"


class DetectionTask(ImageTask):
    """`Task` of object detection."""

    name, key, metric, per_class, hub = "detection", "ap", "AP", "AP", "object-detection"
    counts_objects, at_input_size, boxes = True, False, True
    evaluated, augmented, apart = LetterboxTransform, BoxTrainTransform, "Boxes are not joined across tiles."
    unused: Mapping[str, str] = {
        "augment.rotate": "the box around a rotated box is larger than its object; leave it 0 for task=detection",
        **dict.fromkeys(
            ("train.class_weights", "train.class_balance", "train.label_smoothing", "train.tversky"), OVER_PIXELS
        ),
        "train.auprc": AS_OBJECTS,
    }

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split with its boxes."""
        return open_boxes(root, split, classes)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes of a model."""
        return box_set(card, data, split)

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, object] | None = None
    ) -> DetectionEvaluation:
        """AP of boxes."""
        assert isinstance(card.head, DetectionHead)
        return DetectionEvaluation(cast(BoxDataset, dataset), card.head, (card.height, card.width), ground_truth)
