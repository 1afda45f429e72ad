"""Instance segmentation: an object for every pixel of a thing, scored by COCO's AP at the images' own size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from fp4deploy.data import (
    VAL,
    CocoDataset,
    NumberedEvalTransform,
    SegmentationDataset,
    instance_set,
    open_instances,
)
from fp4deploy.instances import InstanceEvaluation
from fp4deploy.models.card import ModelCard
from fp4deploy.models.heads import InstanceHead
from fp4deploy.tasks.images import AS_OBJECTS, ImageTask
from fp4deploy.tasks.semantic import MOSAIC

SOFTMAX = (
    "distillation compares the softmax over classes, and the outputs of an instance model are not all of classes; "
    "leave it 0, or train with task=semantic"
)


class InstanceTask(ImageTask):
    """`Task` of instance segmentation."""

    name, key, metric, per_class, hub = "instance", "ap", "AP", "AP", "image-segmentation"
    counts_objects, at_input_size, evaluated = True, False, NumberedEvalTransform
    unused: Mapping[str, str] = {"augment.mosaic": MOSAIC, "distill.weight": SOFTMAX, "train.auprc": AS_OBJECTS}

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split, with numbers of objects where it is to be trained on."""
        return open_instances(root, split, classes, stuff, labelled)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes and the stuff of a model."""
        return instance_set(card, data, labelled, split)

    def untiled(self, card: ModelCard) -> str | None:
        """Masks of the set method are numbered anew in each tile."""
        joined = isinstance(card.head, InstanceHead) and card.head.method != "set"
        return None if joined else "The masks of this instance model have no meaning across tiles."

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, object] | None = None
    ) -> InstanceEvaluation:
        """AP of masks."""
        assert isinstance(card.head, InstanceHead)
        return InstanceEvaluation(cast(CocoDataset, dataset), card.head, ground_truth)
