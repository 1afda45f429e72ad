"""The output of a detection model: one tensor [N, classes + 5, places], and when two of them mean the same.

The places are the pixels of its feature maps, shallow to deep, each map row by row. A model of four strides and an
image of H x W pixels has sum_s ceil(H / s) ceil(W / s) of them. One tensor, so that quantisation, export and every
runtime treat a detector as any other network.

    channels     class logits | left, top, right, bottom | centre-ness
    place        row i, column j of stride s: the point  x = (j + 1/2) s,  y = (i + 1/2) s,  in pixels of the input
    box          x - s e^left,  y - s e^top,  x + s e^right,  y + s e^bottom
    score        sqrt(sigmoid(class logit) * sigmoid(centre-ness))

The exponential keeps every box around its place, and a distance in strides keeps the channels of all maps alike. The
raw numbers leave the network; exponential and sigmoid are part of the decoding, in FP32.

Source: Tian et al., "FCOS: Fully Convolutional One-Stage Object Detection", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from fp4deploy.models.heads import MOST_CLASSES, MOST_DETECTIONS
from fp4deploy.schema import Count, Float

FURTHEST = 7.0  # largest exponent of a distance: e^7 strides, beyond any image
MOST_STRIDES = 8
MOST_STRIDE = 1024
MOST_WIDTH = 4096
MOST_DEPTH = 16
SHOWN = 0.3  # score from which the export gate compares a box
CLOSE_SCORE = 0.05
CLOSE_BOX = 0.9  # IoU


@dataclass(frozen=True)
class DetectionHead:
    """Layout of the output, and how boxes are read from it. The types limit what a card in a file may say.

    Args:
        classes: classes of objects, without background.
        strides: of the feature maps, ascending, in pixels of the input.
        width, depth: channels and 3x3 convolutions of each of the two towers.
        threshold: smallest score of a box.
        nms: IoU above which the box with the lower score is left out, within a class.
        max_detections: most boxes of an image, those with the highest scores; also COCO's maxDets.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    unit: ClassVar[str] = "boxes"

    method: Literal["fcos"]
    classes: Annotated[Count, Field(ge=1, le=MOST_CLASSES)]
    strides: Annotated[
        tuple[Annotated[Count, Field(ge=1, le=MOST_STRIDE)], ...], Field(min_length=1, max_length=MOST_STRIDES)
    ] = (4, 8, 16, 32)
    width: Annotated[Count, Field(ge=8, le=MOST_WIDTH)] = 128
    depth: Annotated[Count, Field(ge=1, le=MOST_DEPTH)] = 2
    threshold: Annotated[Float, Field(ge=0, lt=1)] = 0.05
    nms: Annotated[Float, Field(gt=0, le=1)] = 0.6
    max_detections: Annotated[Count, Field(ge=1, le=MOST_DETECTIONS)] = 100

    @property
    def channels(self) -> int:
        """Output channels of the model."""
        return self.classes + 5

    @property
    def compared(self) -> str:
        """What two outputs agree on, for messages."""
        return f"boxes of a score from {SHOWN:g}"

    @property
    def layout(self) -> str:
        """The output, for messages."""
        return f"'{self.method}' with {self.classes} classes on strides {', '.join(map(str, self.strides))}"

    def class_logits(self, outputs: Tensor) -> Tensor:
        """[..., classes, places] of outputs [..., channels, places]."""
        return outputs.narrow(-2, 0, self.classes)

    def distances(self, outputs: Tensor) -> Tensor:
        """Left, top, right, bottom [..., 4, places] in strides, above 0."""
        return outputs.narrow(-2, self.classes, 4).clamp(max=FURTHEST).exp()

    def centredness(self, outputs: Tensor) -> Tensor:
        """Logits [..., places]."""
        return outputs.select(-2, self.classes + 4)

    def scores(self, outputs: Tensor) -> Tensor:
        """[..., classes, places], 0 to 1."""
        return (self.class_logits(outputs).sigmoid() * self.centredness(outputs).sigmoid().unsqueeze(-2)).sqrt()

    def output_size(self, height: int, width: int) -> tuple[int, ...]:
        """The number of places, for an input of height x width pixels."""
        return (sum(rows * columns for rows, columns in map_sizes(self.strides, height, width)),)

    def agreeing(self, expected: Tensor, given: Tensor) -> Tensor:
        """The boxes of both outputs that the other one has as well, as bool [boxes].

        A box counts where its score is at least `SHOWN` in one of the outputs. The other has it where the score of the
        same class at the same place differs by at most `CLOSE_SCORE`, and the two boxes have an IoU of at least
        `CLOSE_BOX`. Boxes are matched at their places and not after the suppression of overlapping boxes: of two almost
        equal boxes it leaves either, whatever the precision. An image without such a box counts as one that agrees;
        one with NaN or Inf as one that does not.
        """
        expected, given = expected.float(), given.float()
        finite = given.isfinite().flatten(1).all(1)
        before, after = self.scores(expected), self.scores(given)
        counted = (before >= SHOWN) | (after >= SHOWN)
        overlap = distance_iou(self.distances(expected), self.distances(given)).unsqueeze(-2)
        same = ((before - after).abs() <= CLOSE_SCORE) & (overlap >= CLOSE_BOX) & finite[:, None, None]
        empty = ~counted.flatten(1).any(1)
        return torch.cat((same[counted], finite[empty]))


def distance_iou(first: Tensor, second: Tensor) -> Tensor:
    """IoU [..., places] of pairs of boxes around one place, as distances [..., 4, places]."""
    inside = torch.minimum(first, second)
    shared = (inside.select(-2, 0) + inside.select(-2, 2)) * (inside.select(-2, 1) + inside.select(-2, 3))
    return shared / (_area(first) + _area(second) - shared)


def _area(distances: Tensor) -> Tensor:
    left, top, right, bottom = distances.unbind(-2)
    return (left + right) * (top + bottom)


def map_sizes(strides: Sequence[int], height: int, width: int) -> list[tuple[int, int]]:
    """Rows and columns of each feature map of an input of height x width pixels."""
    return [(-(-height // stride), -(-width // stride)) for stride in strides]


def places(strides: Sequence[int], height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
    """x, y and stride of every place, float32 [3, places], in pixels of the input."""
    parts = []
    for stride, (rows, columns) in zip(strides, map_sizes(strides, height, width), strict=True):
        y = (torch.arange(rows, device=device, dtype=torch.float32) + 0.5) * stride
        x = (torch.arange(columns, device=device, dtype=torch.float32) + 0.5) * stride
        grid = torch.stack((x.expand(rows, columns), y[:, None].expand(rows, columns)))
        parts.append(torch.cat((grid, torch.full_like(grid[:1], stride))).flatten(1))
    return torch.cat(parts, 1)
