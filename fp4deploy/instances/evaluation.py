"""Average precision over a validation split, from outputs in any order and of any runtime.

Training and `bench` both use it, so that a row of a table and a line of metrics.jsonl are the same number.
Every process decodes the images it was given; only results, which are small, are exchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp4deploy.data import CocoDataset
from fp4deploy.instances.decode import Instances, decode
from fp4deploy.instances.results import Result, as_results
from fp4deploy.instances.scores import InstanceScores, average_precision
from fp4deploy.models.heads import InstanceHead


class InstanceEvaluation:
    """Collects the instances of a split; an image seen twice (a padded last batch) counts once."""

    def __init__(self, dataset: CocoDataset, head: InstanceHead, ground_truth: dict[str, Any] | None = None) -> None:
        """`ground_truth`: that of the dataset, where it is known already; drawing a large one takes a while."""
        self.dataset, self.head = dataset, head
        self.ground_truth = ground_truth or dataset.ground_truth()
        self._images, self._categories = dataset.images, dataset.category_ids
        self._found: dict[int, list[Result]] = {}
        self.matches = True  # keep which detection found which object
        self.listener: Callable[[int, Instances], None] | None = None  # is given every image's instances

    def update(self, outputs: Tensor, indices: Tensor, gather: Callable[..., Any] | None = None) -> None:
        """Decode outputs [N, channels, h, w] of the images with these indices, int64 [N]."""
        for output, index in zip(outputs, indices.tolist(), strict=True):
            self.add(index, self.decode(output, index))

    def decode(self, output: Tensor, index: int) -> Instances:
        """Instances of one image at its original size."""
        record = self._images[index]
        return decode(output, self.head, (record.height, record.width))

    def add(self, index: int, found: Instances) -> None:
        """Take the instances of one image as they are."""
        if self.listener is not None:
            self.listener(index, found)
        self._found[index] = as_results(found, self._images[index].id, self._categories)

    def results(self) -> list[Result]:
        """COCO results of all images, in the dataset's order; of every process where there are several."""
        return gathered(self._found)

    def compute(self) -> InstanceScores:
        """Score everything seen so far against the whole split."""
        with torch.inference_mode(False):
            return average_precision(self.ground_truth, self.results(), self.head.max_detections, matches=self.matches)

    def details(self) -> dict[str, Any]:
        """Nothing."""
        return {}


def gathered(found: dict[int, list[Result]]) -> list[Result]:
    """Results of all images by their index, of every process where there are several."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, found)
        found = {index: results for part in parts for index, results in part.items()}
    return [result for index in sorted(found) for result in found[index]]
