"""Outputs of a detector that finds every box of an image."""

from __future__ import annotations

import numpy as np
import torch

from fp4deploy.data.augmentation.letterbox import letterbox
from fp4deploy.data.sample import IGNORE, Sample
from fp4deploy.models.boxes import DetectionHead
from fp4deploy.train.losses.boxes import assign, centre_ness


def _from_anchor(distances: torch.Tensor) -> torch.Tensor:
    before, after = distances[:2], distances[2:]
    return torch.cat(((after - before) / 2, (after + before).log()))


NUMBERS = {"fcos": torch.log, "fcos_relu": lambda distances: distances, "retinanet": _from_anchor}


def perfect_output(sample: Sample, head: DetectionHead, target: tuple[int, int]) -> torch.Tensor:
    """[channels, places] that decode to the boxes of a sample."""
    assert sample.boxes is not None
    placed = letterbox((sample.image.shape[0], sample.image.shape[1]), target)
    boxes = sample.boxes[sample.boxes[:, 0] != IGNORE]
    rows = np.concatenate((boxes[:, :1], placed.to_input(boxes[:, 1:])), 1).reshape(1, -1, 5)
    labels = torch.from_numpy(np.concatenate((rows, np.full((1, 1, 5), -1.0)), 1)).float()
    found = assign(labels, head, target)
    outputs = torch.full((head.channels, found.classes.shape[1]), -20.0)
    outputs[head.classes : head.classes + 4] = NUMBERS[head.method](found.distances[0])
    for number in range(head.classes):
        outputs[number][found.classes[0] == number] = 10.0
    if head.centred:
        outputs[-1] = 10 * (centre_ness(found.distances)[0] - 0.5)
    return outputs
