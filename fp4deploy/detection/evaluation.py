"""Average precision of boxes over a validation split, from outputs in any order and of any runtime.

Training and `bench` both use it. Every process decodes the images it was given; only results are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from fp4deploy.data import BoxDataset
from fp4deploy.detection.decode import Detections, FoundBoxes, decode_boxes, in_image
from fp4deploy.detection.errors import Confusion, Errors, confusion, error_kinds
from fp4deploy.instances.evaluation import gathered
from fp4deploy.instances.results import Result
from fp4deploy.instances.scores import InstanceScores, average_precision
from fp4deploy.models.boxes import DetectionHead


class DetectionEvaluation:
    """Collects the boxes of a split; an image seen twice (a padded last batch) counts once."""

    def __init__(
        self,
        dataset: BoxDataset,
        head: DetectionHead,
        target: tuple[int, int],
        ground_truth: dict[str, Any] | None = None,
    ) -> None:
        """target: height and width of the network's input; ground_truth: of the dataset, where it is known already."""
        self.dataset, self.head, self.target = dataset, head, target
        self.ground_truth = ground_truth or dataset.ground_truth()
        self._images, self._categories = dataset.images, dataset.category_ids
        self._found: dict[int, list[Result]] = {}
        self.matches = True  # keep which detection found which object
        self.listener: Callable[[int, Detections], None] | None = None  # is given every image's boxes

    def update(self, outputs: Tensor, labels: Tensor, gather: Callable[..., Any] | None = None) -> None:
        """Decode outputs [N, channels, places] of the images with these indices, int64 [N]."""
        for output, index in zip(outputs, labels.tolist(), strict=True):
            record = self._images[index]
            self.add(index, decode_boxes(output, self.head, self.target, (record.height, record.width)))

    def update_decoded(self, found: Iterable[FoundBoxes], labels: Tensor) -> None:
        """Take boxes that a file has decoded itself, of the images with these indices."""
        for boxes, index in zip(found, labels.tolist(), strict=True):
            record = self._images[index]
            self.add(index, in_image(boxes, self.head, self.target, (record.height, record.width)))

    def add(self, index: int, found: Detections) -> None:
        """Take the boxes of one image as they are."""
        if self.listener is not None:
            self.listener(index, found)
        self._found[index] = as_results(found, self._images[index].id, self._categories)

    def results(self) -> list[Result]:
        """COCO results of all images, in the dataset's order; of every process where there are several."""
        return gathered(self._found)

    def errors(self) -> Errors:
        """Kinds of errors, by `detection.errors`."""
        with torch.inference_mode(False):
            return error_kinds(self.ground_truth, self.results(), self.head.max_detections)

    def confusion(self) -> Confusion:
        """What objects were detected as, by `detection.errors`."""
        return confusion(self.ground_truth, self.results(), self.head.max_detections)

    def details(self) -> dict[str, Any]:
        """Kinds of errors, and the confusion."""
        return {"errors": self.errors(), "confusion": self.confusion()}

    def compute(self) -> InstanceScores:
        """Score everything seen so far against the whole split."""
        with torch.inference_mode(False):
            found = self.results()
            return average_precision(self.ground_truth, found, self.head.max_detections, "bbox", matches=self.matches)


def as_results(found: Detections, image_id: int, category_ids: dict[int, int]) -> list[Result]:
    """COCO results of one image, boxes as [x, y, width, height]; `category_ids` maps classes to the file's ids."""
    return [
        {
            "image_id": image_id,
            "category_id": category_ids[int(number)],
            "bbox": [float(left), float(top), float(right - left), float(bottom - top)],
            "score": float(score),
        }
        for (left, top, right, bottom), number, score in zip(found.boxes, found.classes, found.scores, strict=True)
    ]
