"""What tasks of images have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from fp4deploy.data import IMAGE_MEAN, IMAGE_STD, CocoDataset, EvalTransform, SegmentationDataset, TrainTransform
from fp4deploy.data.augmentation.transforms import Rgb, Transform
from fp4deploy.data.sample import IGNORE
from fp4deploy.metrics import LabelScore, LabelScores, Scores, SegmentationScore, average_precision
from fp4deploy.models.card import ModelCard
from fp4deploy.models.volumes import Size
from fp4deploy.tasks.protocol import Gather

AS_OBJECTS = "it is of pixels, and this task scores objects; leave it false"


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
    """Collects the most likely class of each pixel or image.

    curves: also keep the probabilities of all pixels and measure `Scores.auprc`; set before the first `update`.
    """

    matches = False
    curves = False

    def __init__(self, score: SegmentationScore | LabelScore, background: int = 0) -> None:
        """background: how many classes in front are not counted by `curves`."""
        self._score, self._background = score, background
        self._kept: list[tuple[Tensor, Tensor]] = []

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather | None = None) -> None:
        """Logits [N, classes, H, W] and masks [N, H, W], or logits [N, classes] and classes [N]."""
        found = [outputs.argmax(dim=1), labels]
        if self.curves:
            found.append(outputs.float().softmax(1)[:, self._background :])
        prediction, labels, *probabilities = found if gather is None else gather(tuple(found))
        self._score.update(prediction, labels)
        for each in probabilities:
            labelled = labels != IGNORE
            self._kept.append((each.movedim(1, 0)[:, labelled], labels[labelled]))

    def compute(self) -> Scores | LabelScores:
        """mIoU, IoU of each class and pixel accuracy; or top-1 and the recall of each class."""
        scores = self._score.compute()
        return replace(scores, auprc=self._auprc()) if isinstance(scores, Scores) and self.curves else scores

    def _auprc(self) -> float:
        if not self._kept:
            return math.nan
        probabilities, labels = (torch.cat(each, -1) for each in zip(*self._kept, strict=True))
        areas = [
            average_precision(each, labels == place) for place, each in enumerate(probabilities, start=self._background)
        ]
        known = [area for area in areas if area is not None]
        return sum(known) / len(known) if known else math.nan

    def details(self) -> dict[str, object]:
        """Nothing."""
        return {}
