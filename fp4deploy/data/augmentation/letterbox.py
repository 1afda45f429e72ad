"""Transforms for boxes: images keep their aspect ratio, and boxes move with the pixels.

    letterbox     scale r = min(H / h, W / w); the image lies at the top left, the rest is padding (mean colour)
    x' = r_x x + left,  y' = r_y y + top            r_x = round(r w) / w, so that it is exact after rounding

Training scales further by a zoom, log-uniform between the two values of `zoom`, and with `aspect` a by two zooms that
differ by a factor log-uniform in [1/a, a]. What is then larger than the input is cut at random, what is smaller lies at
random. Flips mirror pixels and boxes. Colour is as of `transforms`, and so are the random numbers: a function of (seed,
epoch, index) alone. A box of which less than `MIN_VISIBLE` of its area is left, or less than a pixel of a side, is
dropped.

A mosaic shows four images at once, in the four windows into which a point in the middle half of the input divides it.
Each has a zoom, an aspect and a cut of its own, as above and against the whole input, so that objects keep the sizes
that they have alone. Flips and colour are common to the four. A box is cut at its window, which is small: a rest that
alone would be dropped is seen too often to be background, and counts neither way, as a crowd does.

Rotation is refused: the box around a rotated box is larger than the object.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fp4deploy.data.augmentation.transforms import AUGMENT, NumberedEvalTransform, Rgb, TrainTransform, recolour
from fp4deploy.data.sample import IGNORE, IMAGE_MEAN, IMAGE_STD, Boxes, Pixels, Sample

MIN_VISIBLE = 0.25  # of a box's area
MIN_SIDE = 1.0  # pixels of the input
PAD = -1.0  # class of a row without a box
MOSAIC = 4  # images of a mosaic; also keeps its random streams apart from the others
MIDDLE = (0.25, 0.75)  # of a side, where the windows of a mosaic meet
_CHOICE, _LAYOUT = range(2)  # random streams of a mosaic: which images, and where they lie


@dataclass(frozen=True)
class Placement:
    """Where an image of h x w pixels lies in the input: x' = x * across + left, y' = y * down + top; its size there."""

    across: float
    down: float
    left: int
    top: int
    rows: int
    columns: int

    def to_input(self, boxes: Boxes) -> Boxes:
        """Boxes [M, 4] (left, top, right, bottom) of the image in pixels of the input."""
        return boxes * np.array([self.across, self.down] * 2, np.float32) + np.array([self.left, self.top] * 2)

    def to_image(self, boxes: Boxes) -> Boxes:
        """Boxes [M, 4] of the input in pixels of the image."""
        return (boxes - np.array([self.left, self.top] * 2)) / np.array([self.across, self.down] * 2, np.float32)


def letterbox(size: tuple[int, int], target: tuple[int, int]) -> Placement:
    """The placement of an image of `size` (height, width) in an input of `target`.

    >>> letterbox((50, 100), (64, 64))
    Placement(across=0.64, down=0.64, left=0, top=0, rows=32, columns=64)
    """
    ratio = min(target[0] / size[0], target[1] / size[1])
    return _placed(size, (ratio, ratio), (0.0, 0.0), target, fit=True)


def _placed(
    size: tuple[int, int], zoom: tuple[float, float], where: tuple[float, float], target: tuple[int, int], fit: bool
) -> Placement:
    """Scaled by `zoom` (down, across); `where` in [0, 1) chooses the cut, or the place in the padding."""
    rows, columns = (max(1, round(side * ratio)) for side, ratio in zip(size, zoom, strict=True))
    if fit:
        rows, columns = min(rows, target[0]), min(columns, target[1])
    top, left = (round(share * (room - side)) for share, room, side in zip(where, target, (rows, columns), strict=True))
    return Placement(columns / size[1], rows / size[0], left, top, rows, columns)


def place_image(image: Pixels, placement: Placement, target: tuple[int, int], padding: tuple[int, ...]) -> Pixels:
    """The input uint8 [H, W, 3]: one resampling of the pixels that are seen."""
    first = max(0, placement.left), max(0, placement.top)
    last = min(target[1], placement.left + placement.columns), min(target[0], placement.top + placement.rows)
    scale, start = (placement.across, placement.down), (placement.left, placement.top)
    seen = tuple(
        (edge - begin) / ratio
        for corner in (first, last)
        for edge, begin, ratio in zip(corner, start, scale, strict=True)
    )
    limit = (image.shape[1], image.shape[0]) * 2
    source: Any = tuple(min(max(edge, 0.0), float(most)) for edge, most in zip(seen, limit, strict=True))
    size = (last[0] - first[0], last[1] - first[1])
    if source == (0.0, 0.0, float(limit[0]), float(limit[1])) and size == limit[:2]:
        part = image
    else:
        part = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR, box=source))
    if part.shape[:2] == target:
        return part
    whole = np.empty((*target, 3), np.uint8)
    whole[:] = padding
    whole[first[1] : last[1], first[0] : last[0]] = part
    return whole


class LetterboxTransform(NumberedEvalTransform):
    """Letterbox and normalise; the sample's index, int64 [], stands for its labels."""

    def part(self, size: tuple[int, int]) -> tuple[int, int]:
        """Of an image's own aspect ratio."""
        placement = letterbox(size, (self.height, self.width))
        return placement.rows, placement.columns

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], index int64 [])."""
        target = (self.height, self.width)
        placement = letterbox((sample.image.shape[0], sample.image.shape[1]), target)
        pixels = place_image(sample.image, placement, target, self.padding)
        return torch.from_numpy(np.array(pixels, order="C")), torch.tensor(index)


class BoxTrainTransform(TrainTransform):
    """Random zoom, cut, flips and colour; labels are float32 [M, 5]: class (255: crowd), left, top, right, bottom.

    There is always one row at least; rows without a box have the class `PAD`.
    """

    def __init__(
        self, height: int, width: int, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(height, width, mean, std, seed, **options)
        assert not self.rotate, "boxes are not rotated"

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], boxes float32 [M, 5])."""
        random = np.random.default_rng((AUGMENT, self.seed, epoch, index))
        zoom = float(np.exp(random.uniform(*np.log(self.zoom))))
        across, down, flip = random.random(), random.random(), random.random() < self.flip
        brightness, contrast, saturation = random.uniform(1 - self.jitter, 1 + self.jitter, size=3)
        stretch, hue = random.uniform(-1, 1, size=2)
        turned = self.upside_down and random.random() < 0.5

        if sample.others:
            pixels, boxes = self._joined((sample, *sample.others), self._mosaic_random(epoch, index, _LAYOUT))
        else:
            pixels, boxes = self._part(sample, (self.height, self.width), zoom, stretch, (down, across))
        image = recolour(pixels, brightness, contrast, saturation, self.hue * hue)
        if flip:
            image = image[:, ::-1]
            boxes = boxes[:, [0, 3, 2, 1, 4]] * np.array([1, -1, 1, -1, 1]) + np.array([0, 1, 0, 1, 0]) * self.width
        if turned:
            image = image[::-1]
            boxes = boxes[:, [0, 1, 4, 3, 2]] * np.array([1, 1, -1, 1, -1]) + np.array([0, 0, 1, 0, 1]) * self.height
        if not len(boxes):
            boxes = np.array([[PAD, 0, 0, 0, 0]])
        return torch.from_numpy(np.array(image, order="C")), torch.from_numpy(boxes.astype(np.float32))

    def others(self, epoch: int, index: int, count: int) -> tuple[int, ...]:
        """The other images of a mosaic, in a share `mosaic` of the samples."""
        if not self.mosaic:
            return ()
        random = self._mosaic_random(epoch, index, _CHOICE)
        chosen = random.integers(count, size=MOSAIC - 1)
        return tuple(map(int, chosen)) if random.random() < self.mosaic else ()

    def _mosaic_random(self, epoch: int, index: int, stream: int) -> np.random.Generator:
        return np.random.default_rng((MOSAIC, self.seed, epoch, index, stream))

    def _joined(self, samples: tuple[Sample, ...], random: np.random.Generator) -> tuple[Pixels, Boxes]:
        """A mosaic of four samples: the input's pixels, and boxes [M, 5]."""
        row, column = (round(side * random.uniform(*MIDDLE)) for side in (self.height, self.width))
        image, found = np.empty((self.height, self.width, 3), np.uint8), []
        windows = product(((0, row), (row, self.height)), ((0, column), (column, self.width)))
        for sample, ((top, bottom), (left, right)) in zip(samples, windows, strict=True):
            zoom, stretch = float(np.exp(random.uniform(*np.log(self.zoom)))), random.uniform(-1, 1)
            where = random.random(), random.random()
            pixels, boxes = self._part(sample, (bottom - top, right - left), zoom, stretch, where)
            image[top:bottom, left:right] = pixels
            found.append(boxes + np.array([0, left, top, left, top], np.float32))
        return image, np.concatenate(found)

    def _part(
        self, sample: Sample, window: tuple[int, int], zoom: float, stretch: float, where: tuple[float, float]
    ) -> tuple[Pixels, Boxes]:
        """A sample in a window (height, width) of the input: its pixels, and the boxes [M, 5] that are seen there."""
        assert sample.boxes is not None
        size = sample.image.shape[0], sample.image.shape[1]
        ratio, side = zoom * min(self.height / size[0], self.width / size[1]), float(self.aspect ** (stretch / 2))
        placement = _placed(size, (ratio / side, ratio * side), where, window, fit=False)
        boxes = np.concatenate((sample.boxes[:, :1], placement.to_input(sample.boxes[:, 1:])), 1, dtype=np.float32)
        seen = visible(boxes, window, rests=window != (self.height, self.width))
        return place_image(sample.image, placement, window, self.padding), seen


def visible(boxes: Boxes, size: tuple[int, int], rests: bool = False) -> Boxes:
    """Boxes [M, 5] cut at the border of an input of `size` (height, width); too small rests are dropped.

    rests: those with too little of their area become crowds.
    """
    edges = boxes[:, 1:]
    limit = np.array([size[1], size[0]] * 2, np.float32)
    cut = np.clip(edges, 0, limit)
    sides, whole = cut[:, 2:] - cut[:, :2], edges[:, 2:] - edges[:, :2]
    enough = sides.prod(1) >= MIN_VISIBLE * whole.prod(1)
    kept = (sides >= MIN_SIDE).all(1) & (enough | rests)
    classes = np.where(enough[:, None], boxes[:, :1], np.float32(IGNORE))
    return np.concatenate((classes[kept], cut[kept]), 1)
