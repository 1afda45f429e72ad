"""Average precision of boxes over a validation split, from outputs in any order and of any runtime.

Training and `bench` both use it. Every process decodes the images it was given; only results are exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fp4deploy.data import BoxDataset
from fp4deploy.detection.decode import Detections, FoundBoxes, decode_boxes, in_image
from fp4deploy.detection.errors import Confusion, Errors, confusion, error_kinds
from fp4deploy.instances.evaluation import ObjectEvaluation
from fp4deploy.instances.results import Result
from fp4deploy.models.boxes import DetectionHead


class DetectionEvaluation(ObjectEvaluation[Detections]):
    """Boxes, decoded from maps or by the file itself."""

    scored = "bbox"

    def __init__(
        self,
        dataset: BoxDataset,
        head: DetectionHead,
        target: tuple[int, int],
        ground_truth: dict[str, object] | None = None,
    ) -> None:
        """target: height and width of the network's input; ground_truth: as of `ObjectEvaluation`."""
        super().__init__(dataset, head.max_detections, ground_truth)
        self.head, self.target = head, target

    def decode(self, output: Tensor, index: int) -> Detections:
        """Boxes of one image at its original size, from its outputs [channels, places]."""
        record = self._images[index]
        return decode_boxes(output, self.head, self.target, (record.height, record.width))

    def as_results(self, found: Detections, index: int) -> list[Result]:
        """COCO results of one image, with boxes."""
        return as_results(found, self._images[index].id, self._categories)

    def update_decoded(self, found: Iterable[FoundBoxes], labels: Tensor) -> None:
        """Take boxes that a file has decoded itself, of the images with these indices."""
        for boxes, index in zip(found, labels.tolist(), strict=True):
            record = self._images[index]
            self.add(index, in_image(boxes, self.head, self.target, (record.height, record.width)))

    def errors(self) -> Errors:
        """Kinds of errors, by `detection.errors`."""
        with torch.inference_mode(False):
            return error_kinds(self.ground_truth, self.results(), self.head.max_detections)

    def confusion(self) -> Confusion:
        """What objects were detected as, by `detection.errors`."""
        return confusion(self.ground_truth, self.results(), self.head.max_detections)

    def details(self) -> dict[str, object]:
        """Kinds of errors, and the confusion."""
        return {"errors": self.errors(), "confusion": self.confusion()}


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
