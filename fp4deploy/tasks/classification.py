"""Image classification: a class for every image, scored by the share of images whose most likely class is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, VAL, SegmentationDataset
from fp4deploy.data.augmentation.labels import LabelEvalTransform, LabelTrainTransform
from fp4deploy.data.augmentation.transforms import Rgb, Transform
from fp4deploy.data.dataset import require_split
from fp4deploy.data.folders import FolderDataset
from fp4deploy.errors import InputError
from fp4deploy.metrics import LabelScore, LabelScores
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Size
from fp4deploy.tasks.protocol import Gather

PIXELS = "it is of pixels, and this task has one class an image; leave it as it is"


class ClassificationTask:
    """`Task` of image classification."""

    name, key, metric, per_class = "classification", "top1", "top-1", "recall"
    counts_objects, at_input_size, boxes, whole_images = False, False, False, True
    unused: Mapping[str, str] = dict.fromkeys(("augment.mosaic", "train.class_balance", "train.class_weights"), PIXELS)

    def transform(self, size: Size, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, whole: bool = False) -> Transform:
        """Images resized to the input, and their classes."""
        height, width = size
        return LabelEvalTransform(height, width, mean, std)

    def augmentation(self, size: Size, seed: int, foreground: float = 0.0, **options: Any) -> Transform:
        """Zoom, cut, flips and colour."""
        height, width = size
        return LabelTrainTransform(height, width, seed=seed, **options)

    def open(
        self, root: Path, split: str, classes: Sequence[str] | None = None, stuff: Sequence[str] = (),
        labelled: bool = True,
    ) -> SegmentationDataset:  # fmt: skip
        """A split of folders of images, one folder a class."""
        require_split(split)
        if not root.is_dir():
            raise InputError(f"The dataset folder {root} does not exist.")
        return FolderDataset(root, split, classes)

    def for_card(self, card: ModelCard, data: Path, split: str = VAL, labelled: bool = False) -> SegmentationDataset:
        """A split with the classes of a model."""
        return self.open(data, split, card.class_names)

    def untiled(self, card: ModelCard) -> str:
        """A tile is no image."""
        return "The classes of tiles are not that of an image."

    def evaluation(
        self, dataset: SegmentationDataset, card: ModelCard, ground_truth: dict[str, Any] | None = None
    ) -> LabelEvaluation:
        """Top-1, and the recall of each class."""
        return LabelEvaluation(dataset.class_names)

    def ground_truth(self, dataset: SegmentationDataset) -> None:
        """None: classes come with the batches."""
        return


class LabelEvaluation:
    """Collects the most likely class of each image."""

    matches = False

    def __init__(self, class_names: tuple[str, ...]) -> None:
        self._score = LabelScore(class_names)

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather | None = None) -> None:
        """Logits [N, classes] and classes [N]."""
        prediction = outputs.argmax(dim=1)
        if gather is not None:
            prediction, labels = gather((prediction, labels))
        self._score.update(prediction, labels)

    def compute(self) -> LabelScores:
        """Top-1 and the recall of each class."""
        return self._score.compute()

    def details(self) -> dict[str, Any]:
        """Nothing."""
        return {}
