"""Image classification: a class for every image, scored by the share of images whose most likely class is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp4deploy.data import VAL, SegmentationDataset
from fp4deploy.data.augmentation.transforms import LabelEvalTransform, LabelTrainTransform
from fp4deploy.data.dataset import require_directory, require_split
from fp4deploy.data.folders import FolderDataset
from fp4deploy.metrics import LabelScore
from fp4deploy.models.card import ModelCard
from fp4deploy.tasks.images import ClassEvaluation, ImageTask

PIXELS = "it is of pixels, and this task has one class an image; leave it as it is"


class ClassificationTask(ImageTask):
    """`Task` of image classification."""

    name, key, metric, per_class, hub = "classification", "top1", "top-1", "recall", "image-classification"
    at_input_size, whole_images, apart = False, True, "The classes of tiles are not that of an image."
    evaluated, augmented = LabelEvalTransform, LabelTrainTransform
    unused: Mapping[str, str] = dict.fromkeys(
        ("augment.mosaic", "train.class_balance", "train.class_weights", "train.auprc", "train.tversky"), PIXELS
    )

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split of folders of images, one folder a class."""
        require_split(split)
        require_directory(root)
        return FolderDataset(root, split, classes)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes of a model."""
        return self.open(data, split, card.class_names)

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, object] | None = None
    ) -> ClassEvaluation:
        """Top-1, and the recall of each class."""
        return ClassEvaluation(LabelScore(dataset.class_names))
