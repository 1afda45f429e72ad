"""Average precision over a validation split, from outputs in any order and of any runtime.

Training and `bench` both use it, so that a row of a table and a line of metrics.jsonl are the same number.
Every process decodes the images it was given; only results, which are small, are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Generic, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from fp4deploy.data import CocoDataset
from fp4deploy.instances.decode import Instances, decode
from fp4deploy.instances.results import Result, as_results
from fp4deploy.instances.scores import InstanceScores, average_precision
from fp4deploy.models.heads import InstanceHead

Found = TypeVar("Found")


class ObjectEvaluation(Generic[Found]):
    """Collects the objects of a split; an image seen twice (a padded last batch) counts once.

    matches: keep which detection found which object. listener: is given the objects of every image.
    """

    scored: ClassVar[Literal["segm", "bbox"]] = "segm"

    def __init__(self, dataset: CocoDataset, limit: int, ground_truth: dict[str, object] | None = None) -> None:
        """limit: detections an image; ground_truth: that of the dataset, where it is known already."""
        self.dataset, self.limit = dataset, limit
        self.ground_truth = ground_truth or dataset.ground_truth()
        self._images, self._categories = dataset.images, dataset.category_ids
        self._found: dict[int, list[Result]] = {}
        self.matches = True
        self.listener: Callable[[int, Found], None] | None = None

    def decode(self, output: Tensor, index: int) -> Found:
        """Objects of one image at its original size."""
        raise NotImplementedError

    def as_results(self, found: Found, index: int) -> list[Result]:
        """COCO results of one image."""
        raise NotImplementedError

    def update(self, outputs: Tensor, labels: Tensor, gather: Callable[..., object] | None = None) -> None:
        """Decode outputs [N, channels, ...] of the images with these indices, int64 [N]."""
        for output, index in zip(outputs, labels.tolist(), strict=True):
            self.add(index, self.decode(output, index))

    def add(self, index: int, found: Found) -> None:
        """Take the objects of one image as they are."""
        if self.listener is not None:
            self.listener(index, found)
        self._found[index] = self.as_results(found, index)

    def results(self) -> list[Result]:
        """COCO results of all images, in the dataset's order; of every process where there are several."""
        return gathered(self._found)

    def compute(self) -> InstanceScores:
        """Score everything seen so far against the whole split."""
        with torch.inference_mode(False):
            return average_precision(self.ground_truth, self.results(), self.limit, self.scored, matches=self.matches)

    def details(self) -> dict[str, object]:
        """Nothing."""
        return {}


class InstanceEvaluation(ObjectEvaluation[Instances]):
    """Masks, decoded from maps."""

    def __init__(self, dataset: CocoDataset, head: InstanceHead, ground_truth: dict[str, object] | None = None) -> None:
        super().__init__(dataset, head.max_detections, ground_truth)
        self.head = head

    def decode(self, output: Tensor, index: int) -> Instances:
        """Instances of one image at its original size."""
        record = self._images[index]
        return decode(output, self.head, (record.height, record.width))

    def as_results(self, found: Instances, index: int) -> list[Result]:
        """COCO results of one image, with masks."""
        return as_results(found, self._images[index].id, self._categories)


def gathered(found: dict[int, list[Result]]) -> list[Result]:
    """Results of all images by their index, of every process where there are several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {index: results for part in parts for index, results in part.items()}
    return [result for index in sorted(found) for result in found[index]]
