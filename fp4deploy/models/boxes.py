"""The output of a detection model: one tensor [N, channels, places], and when two of them mean the same.

The places are the pixels of its feature maps, shallow to deep, each map row by row; with several anchors a pixel, all
pixels of the first anchor, then those of the second. A model of four strides and an image of H x W pixels has
sum_s ceil(H / s) ceil(W / s) pixels. One tensor, so that quantisation, export and every runtime treat a detector as any
other network.

    channels     class logits | four numbers of a box [| centre-ness]
    prior        of a place: a point x, y and a size w, h, in pixels of the input
    distances    left, top, right, bottom: from the point to the sides of the box, in units of the prior's size
    box          x - w left,  y - h top,  x + w right,  y + h bottom
    score        sqrt(sigmoid(class logit) * sigmoid(centre-ness)), without centre-ness sigmoid(class logit)

| method | prior of row i, column j of stride s | distances of the four numbers |
|---|---|---|
| `fcos` | ((j + 1/2) s, (i + 1/2) s), s x s | exp: every box holds its place |
| `fcos_relu` | (j s, i s), s x s | max(0, ·) |
| `retinanet` | (j s, i s), nine anchors of 4 s to 6.3 s in three shapes | e^c / 2 - a, e^d / 2 - b, ... + a, ... + b |

The latter two are of torchvision's FCOS and RetinaNet; RetinaNet has no centre-ness.

A distance in units of the prior keeps the channels of all maps alike. The raw numbers leave the network; what makes
distances and scores of them is part of the decoding, in FP32.

Sources: Tian et al., "FCOS: Fully Convolutional One-Stage Object Detection", 2019; Lin et al., "Focal Loss for Dense
Object Detection", 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from fp4deploy.models.heads import MAX_CLASSES, MAX_DETECTIONS
from fp4deploy.system.schema import Count, Float

FURTHEST = 7.0  # largest exponent of a distance: e^7 strides, beyond any image
WIDEST = math.log(1000 / 16)  # largest exponent of the size of an anchor's box, as of torchvision
SCALES, RATIOS = (1.0, 2 ** (1 / 3), 2 ** (2 / 3)), (0.5, 1.0, 2.0)  # of anchors; a ratio is height / width
SMALLEST = 4  # strides, the side of the smallest square anchor
MAX_STRIDES = 8
MAX_STRIDE = 1024
MAX_WIDTH = 4096
MAX_DEPTH = 16
SHOWN = 0.3  # score from which the export gate compares a box
CLOSE_SCORE = 0.05
CLOSE_BOX = 0.9  # IoU


@dataclass(frozen=True)
class DetectionHead:
    """Layout of the output, and how boxes are read from it. The types limit what a card in a file may say.

    Args:
        method: "fcos", "fcos_relu" or "retinanet", as in the table of this module.
        classes: classes of objects, without background.
        strides: of the feature maps, ascending, in pixels of the input.
        width, depth: channels and 3x3 convolutions of each of the two towers.
        threshold: smallest score of a box.
        nms: IoU above which the box with the lower score is left out, within a class.
        max_detections: most boxes of an image, those with the highest scores; also COCO's maxDets.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    unit: ClassVar[str] = "boxes"

    method: Literal["fcos", "fcos_relu", "retinanet"]
    classes: Annotated[Count, Field(ge=1, le=MAX_CLASSES)]
    strides: Annotated[
        tuple[Annotated[Count, Field(ge=1, le=MAX_STRIDE)], ...], Field(min_length=1, max_length=MAX_STRIDES)
    ] = (4, 8, 16, 32)
    width: Annotated[Count, Field(ge=8, le=MAX_WIDTH)] = 128
    depth: Annotated[Count, Field(ge=1, le=MAX_DEPTH)] = 2
    threshold: Annotated[Float, Field(ge=0, lt=1)] = 0.05
    nms: Annotated[Float, Field(gt=0, le=1)] = 0.6
    max_detections: Annotated[Count, Field(ge=1, le=MAX_DETECTIONS)] = 100

    @property
    def centred(self) -> bool:
        """Whether there is a channel of centre-ness."""
        return self.method != "retinanet"

    @property
    def anchors(self) -> int:
        """Priors of a pixel of a feature map."""
        return len(SCALES) * len(RATIOS) if self.method == "retinanet" else 1

    @property
    def offset(self) -> float:
        """Where the point of a pixel lies between its edges: 0 to 1."""
        return 0.5 if self.method == "fcos" else 0.0

    @property
    def channels(self) -> int:
        """Output channels of the model."""
        return self.classes + 4 + self.centred

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
        """Left, top, right, bottom [..., 4, places] in units of the prior's size."""
        return DISTANCES[self.method](outputs.narrow(-2, self.classes, 4))

    def centredness(self, outputs: Tensor) -> Tensor:
        """Logits [..., places]; only where `centred`."""
        return outputs.select(-2, self.classes + 4)

    def scores(self, outputs: Tensor) -> Tensor:
        """[..., classes, places], 0 to 1."""
        found = self.class_logits(outputs).sigmoid()
        return (found * self.centredness(outputs).sigmoid().unsqueeze(-2)).sqrt() if self.centred else found

    def output_size(self, height: int, width: int) -> tuple[int, ...]:
        """The number of places, for an input of height x width pixels."""
        return (self.anchors * sum(rows * columns for rows, columns in map_sizes(self.strides, height, width)),)

    def priors(self, height: int, width: int, device: torch.device | str = "cpu") -> Tensor:
        """x, y, w and h of every place, float32 [4, places], in pixels of an input of height x width."""
        parts = []
        for stride, (rows, columns) in zip(self.strides, map_sizes(self.strides, height, width), strict=True):
            y = (torch.arange(rows, device=device, dtype=torch.float32) + self.offset) * stride
            x = (torch.arange(columns, device=device, dtype=torch.float32) + self.offset) * stride
            points = torch.stack((x.expand(rows, columns), y[:, None].expand(rows, columns))).flatten(1)[:, None]
            sizes = (anchor_sizes(stride) if self.anchors > 1 else torch.full((2, 1), float(stride))).to(device)
            shape = (2, self.anchors, rows * columns)
            parts.append(torch.cat((points.expand(shape), sizes[..., None].expand(shape))).flatten(1))
        return torch.cat(parts, 1)

    def agreeing(self, expected: Tensor, given: Tensor) -> Tensor:
        """The boxes of both outputs that the other one has as well, as bool [boxes].

        A box counts where it has an area and a score of at least `SHOWN` in one of the outputs. The other has it where
        the score of the same class at the same place differs by at most `CLOSE_SCORE`, and the two boxes have an IoU of
        at least `CLOSE_BOX`. Boxes are matched at their places and not after the suppression of overlapping boxes: of
        two almost equal boxes it leaves either, whatever the precision. An image without such a box counts as one that
        agrees; one with NaN or Inf as one that does not.
        """
        expected, given = expected.float(), given.float()
        finite = given.isfinite().flatten(1).all(1)
        before, after = self.scores(expected), self.scores(given)
        first, second = self.distances(expected), self.distances(given)
        counted = (before >= SHOWN) & (_area(first) > 0).unsqueeze(-2)
        counted |= (after >= SHOWN) & (_area(second) > 0).unsqueeze(-2)
        overlap = distance_iou(first, second).unsqueeze(-2)
        same = ((before - after).abs() <= CLOSE_SCORE) & (overlap >= CLOSE_BOX) & finite[:, None, None]
        empty = ~counted.flatten(1).any(1)
        return torch.cat((same[counted], finite[empty]))


def _between_anchor_and_box(numbers: Tensor) -> Tensor:
    """Distances of a shift of the centre and the logarithms of the sides, all in units of the anchor."""
    shift, half = numbers.narrow(-2, 0, 2), numbers.narrow(-2, 2, 2).clamp(max=WIDEST).exp() / 2
    return torch.cat((half - shift, half + shift), -2)


DISTANCES: dict[str, Callable[[Tensor], Tensor]] = {  # of the four numbers [..., 4, places] of a method
    "fcos": lambda numbers: numbers.clamp(max=FURTHEST).exp(),
    "fcos_relu": lambda numbers: numbers.clamp(min=0),
    "retinanet": _between_anchor_and_box,
}


def anchor_sizes(stride: int) -> Tensor:
    """Width and height of the anchors of a stride, float32 [2, anchors] in pixels: whole and even, as of torchvision.

    >>> anchor_sizes(8)[:, 0].tolist()
    [46.0, 22.0]
    """
    sides = torch.tensor([float(int(SMALLEST * stride * scale)) for scale in SCALES])
    tall = torch.tensor(RATIOS).sqrt()[:, None]
    return 2 * (torch.stack(((1 / tall * sides).flatten(), (tall * sides).flatten())) / 2).round()


def distance_iou(first: Tensor, second: Tensor) -> Tensor:
    """IoU [..., places] of pairs of boxes of one prior, as distances [..., 4, places]; NaN without any area."""
    shared = _area(torch.minimum(first, second), least=0.0)
    return shared / (_area(first) + _area(second) - shared)


def _area(distances: Tensor, least: float | None = None) -> Tensor:
    """Of boxes, in units of the prior's; `least`: of a side."""
    left, top, right, bottom = distances.unbind(-2)
    sides = (left + right, top + bottom)
    across, down = sides if least is None else (side.clamp(min=least) for side in sides)
    return across * down


def map_sizes(strides: Sequence[int], height: int, width: int) -> list[tuple[int, int]]:
    """Rows and columns of each feature map of an input of height x width pixels."""
    return [(-(-height // stride), -(-width // stride)) for stride in strides]
