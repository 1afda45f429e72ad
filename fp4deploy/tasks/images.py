"""What tasks of images have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, CocoDataset, EvalTransform, SegmentationDataset, TrainTransform
from fp4deploy.data.augmentation.transforms import Rgb, Transform
from fp4deploy.metrics import LabelScore, LabelScores, Scores, SegmentationScore
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Size
from fp4deploy.tasks.protocol import Gather


class ImageTask:
    """A `Task` of images with one class for each pixel or image.

    evaluated, augmented: the transforms of its samples; apart: why outputs of tiles cannot be joined, None if they can.
    """

    counts_objects, at_input_size, boxes, whole_images = False, True, False, False
    unused: Mapping[str, str] = {}
    evaluated: ClassVar[type[EvalTransform]] = EvalTransform
    augmented: ClassVar[type[TrainTransform]] = TrainTransform
    apart: ClassVar[str | None] = None

    def transform(self, size: Size, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, whole: bool = False) -> Transform:
        """Images resized to the input, or in its corner."""
        height, width = size
        return self.evaluated(height, width, mean, std)

    def augmentation(self, size: Size, seed: int, foreground: float = 0.0, **options: Any) -> Transform:
        """Zoom, cut, flips and colour; of boxes mosaics, too."""
        height, width = size
        return self.augmented(height, width, seed=seed, **options)

    def untiled(self, card: ModelCard) -> str | None:
        """Why the outputs of an image's tiles cannot be joined."""
        return self.apart

    def ground_truth(self, dataset: SegmentationDataset) -> dict[str, Any] | None:
        """None: masks and classes come with the batches. Of objects the annotations as pycocotools reads them."""
        return cast(CocoDataset, dataset).ground_truth() if self.counts_objects else None


class ClassEvaluation:
    """Collects the most likely class of each pixel or image."""

    matches = False

    def __init__(self, score: SegmentationScore | LabelScore) -> None:
        self._score = score

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather | None = None) -> None:
        """Logits [N, classes, H, W] and masks [N, H, W], or logits [N, classes] and classes [N]."""
        prediction = outputs.argmax(dim=1)
        if gather is not None:
            prediction, labels = gather((prediction, labels))
        self._score.update(prediction, labels)

    def compute(self) -> Scores | LabelScores:
        """mIoU, IoU of each class and pixel accuracy; or top-1 and the recall of each class."""
        return self._score.compute()

    def details(self) -> dict[str, object]:
        """Nothing."""
        return {}
