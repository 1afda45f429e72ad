"""Transforms from a sample to the input of a model: joint crop, flip and resize of image and mask, colour jitter.

Geometry. Evaluation resizes the whole image to height x width. Training takes a window of 1/zoom of the image's
height and width, zoom log-uniform between the two values of `zoom`; above 1 the window lies inside the image, below 1
the image lies inside the window and the rest is padding: mean colour, mask 255. Crop and resize are one resampling of
the original pixels, so enlarging loses nothing. Images are resampled bilinearly (with antialiasing when shrinking),
masks take the nearest pixel, both from the same box, so they stay aligned. With `aspect` a above 1 the two sides'
zooms differ by a factor log-uniform in [1/a, a]; with `rotate` the result is rotated about its centre by up to
that many degrees, and the corners that this uncovers are padding. A map of instances is one more mask: number and
class are taken from the same pixel, and padding belongs to no instance.

Colour. Brightness b, contrast c and saturation s are drawn from [1 - jitter, 1 + jitter] and applied as `grey + s *
(x - grey)`, then `m + c * (x - m)` with m the mean grey of the crop, then `b * x`. With `hue` h the colours are then
rotated about the grey axis by up to h of a full circle, at constant luma. All of it is one 3 x 4 matrix, applied to
the 8-bit pixels in one pass and rounded and clipped to 8 bits.

Data volume. An augmented image stays 8-bit, as in a file, and is normalised last. `compact` returns the pixels and
`expand` normalises a batch of them on its device: a worker process then sends a fifth of the bytes to the training
process, which matters more than the arithmetic. A transform called as a function does both at once.

Random numbers are a function of (seed, epoch, index of the sample) alone: neither the number of worker processes nor
resuming in the middle of a run changes a single pixel.

Labels are the mask [H, W], or with instances the mask and their numbers, [2, H, W].
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageStat
from torch import Tensor

from fp4deploy.data.sample import IGNORE, IMAGE_MEAN, IMAGE_STD, InstanceIds, Pixels, Sample
from fp4deploy.errors import InputError

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the source
Rgb = tuple[float, ...]  # three values
Labels = Pixels | InstanceIds  # [H, W] of class ids, or [2, H, W] of class ids and numbers of instances
_GREY = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601 luma
_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])  # NTSC, 1953
_TO_RGB = np.linalg.inv(_YIQ)
AUGMENT = 1  # keeps these random streams apart from the one that shuffles


class Transform(Protocol):
    """Sample -> (image float32 [3, H, W] normalised, labels int64), or before that the compact pixels.

    `others` chooses the images of a dataset of `count` that the sample comes with (`Sample.others`).
    """

    def others(self, epoch: int, index: int, count: int) -> tuple[int, ...]: ...

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]: ...
    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], labels uint8 [H, W] or int32 [2, H, W])."""
        ...


def expand(images: Tensor, labels: Tensor, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD) -> tuple[Tensor, Tensor]:
    """Normalise a compact batch on its device; a batch that is already normalised is returned as it is.

    Args:
        images: uint8 [..., H, W, 3], or float32 [..., 3, H, W].
        labels: of any type and shape.

    Returns:
        float32 [..., 3, H, W], strided as the pixels were (channels last), and the labels: int64, or boxes as they are.
    """
    if images.dtype != torch.uint8:
        return images, _whole(labels)
    scale, offset = scale_and_offset(images.device, mean, std)
    return (images.float() * scale + offset).movedim(-1, -3), _whole(labels)


def _whole(labels: Tensor) -> Tensor:
    return labels if labels.is_floating_point() else labels.long()


def padding_colour(mean: Rgb) -> tuple[int, ...]:
    """The 8-bit colour that normalisation takes to 0."""
    return tuple(min(max(round(255 * value), 0), 255) for value in mean)


class EvalTransform:
    """Resize to height x width and normalise; takes no random numbers."""

    def __init__(self, height: int, width: int, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD) -> None:
        self.height, self.width = height, width
        self._mean, self._std = mean, std
        self.padding = padding_colour(mean)

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        image, labels = expand(*self.compact(sample, epoch, index), self._mean, self._std)
        return image.contiguous(), labels

    def others(self, epoch: int, index: int, count: int) -> tuple[int, ...]:
        """An image is evaluated alone."""
        return ()

    def part(self, size: tuple[int, int]) -> tuple[int, int]:
        """What an image of `size`, (height, width), is resized to, at the top left of the input."""
        return self.height, self.width

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], labels uint8 [H, W] or int32 [2, H, W])."""
        height, width = sample.mask.shape
        return _to_tensors(*_resample(sample, (0.0, 0.0, width, height), self.height, self.width))


class NumberedEvalTransform(EvalTransform):
    """As `EvalTransform`, with the sample's index, int64 [], in place of its labels.

    Instances are scored against the annotations at the image's own size, so all that is asked for is which image it is.
    """

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], index int64 [])."""
        return super().compact(sample, epoch, index)[0], torch.tensor(index)


class TrainTransform(EvalTransform):
    """Random window, flip and colour jitter, then as `EvalTransform`; `upside_down` flips top and bottom as well."""

    def __init__(
        self,
        height: int,
        width: int,
        mean: Rgb = IMAGE_MEAN,
        std: Rgb = IMAGE_STD,
        seed: int = 0,
        *,
        zoom: tuple[float, float] = (0.75, 1.75),
        jitter: float = 0.3,
        flip: float = 0.5,
        rotate: float = 0.0,
        aspect: float = 1.0,
        hue: float = 0.0,
        upside_down: bool = False,
        mosaic: float = 0.0,
    ) -> None:
        if seed < 0:
            raise InputError(f"The seed is {seed}; it must be 0 or more.")
        super().__init__(height, width, mean, std)
        self.seed = seed
        self.zoom, self.jitter, self.upside_down = zoom, jitter, upside_down
        self.flip, self.rotate, self.aspect, self.hue, self.mosaic = flip, rotate, aspect, hue, mosaic

    def others(self, epoch: int, index: int, count: int) -> tuple[int, ...]:
        """Masks are not joined."""
        assert not self.mosaic, "only boxes are joined to a mosaic"
        return ()

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], labels uint8 [H, W] or int32 [2, H, W])."""
        random = np.random.default_rng((AUGMENT, self.seed, epoch, index))
        zoom = float(np.exp(random.uniform(*np.log(self.zoom))))
        across, down, flip = random.random(), random.random(), random.random() < self.flip
        brightness, contrast, saturation = random.uniform(1 - self.jitter, 1 + self.jitter, size=3)
        stretch, angle, hue = random.uniform(-1, 1, size=3)  # drawn last: options do not change the values above

        turned = self.upside_down and random.random() < 0.5

        side = float(self.aspect ** (stretch / 2))
        pixels, labels, top, left = self._window(sample, (zoom * side, zoom / side), across, down)
        if self.rotate:
            pixels, labels = self._turn(pixels, labels, self.rotate * angle)
        image = recolour(pixels, brightness, contrast, saturation, self.hue * hue)
        if labels.shape[-2:] != (self.height, self.width):
            image, labels = self._pad(image, labels, top, left)
        if flip:
            image, labels = image[:, ::-1], labels[..., ::-1]
        if turned:
            image, labels = image[::-1], labels[..., ::-1, :]
        return _to_tensors(image, labels)

    def _window(
        self, sample: Sample, zoom: tuple[float, float], across: float, down: float
    ) -> tuple[Pixels, Labels, int, int]:
        """Resampled window, and where it stands in the result when it is smaller than that; `zoom` in x and in y."""
        height, width = sample.mask.shape
        left, right, columns, column = _span(width, self.width, zoom[0], across)
        top, bottom, rows, row = _span(height, self.height, zoom[1], down)
        return *_resample(sample, (left, top, right, bottom), rows, columns), row, column

    def _turn(self, pixels: Pixels, labels: Labels, degrees: float) -> tuple[Pixels, Labels]:
        image = Image.fromarray(pixels).rotate(degrees, Image.Resampling.BILINEAR, fillcolor=self.padding)
        maps = [(labels, IGNORE)] if labels.ndim == 2 else [(labels[0], IGNORE), (labels[1], 0)]
        turned = [Image.fromarray(part).rotate(degrees, Image.Resampling.NEAREST, fillcolor=out) for part, out in maps]
        return np.asarray(image), _together([np.asarray(part) for part in turned])

    def _pad(self, image: Pixels, labels: Labels, top: int, left: int) -> tuple[Pixels, Labels]:
        padded = np.empty((self.height, self.width, 3), dtype=np.uint8)
        padded[:] = self.padding
        void: Labels = np.zeros((*labels.shape[:-2], self.height, self.width), dtype=labels.dtype)
        (void[0] if void.ndim == 3 else void)[:] = IGNORE
        height, width = labels.shape[-2:]
        area = slice(top, top + height), slice(left, left + width)
        padded[area], void[..., area[0], area[1]] = image, labels
        return padded, void


def _span(size: int, target: int, zoom: float, position: float) -> tuple[float, float, int, int]:
    """One side of a window: from and to in pixels of the source, pixels in the result, and the first of them."""
    if zoom >= 1:
        start = position * (size - size / zoom)
        return start, min(start + size / zoom, size), target, 0
    count = max(1, round(target * zoom))
    return 0.0, size, count, round(position * (target - count))


def _resample(sample: Sample, box: Box, height: int, width: int) -> tuple[Pixels, Labels]:
    maps: list[Labels] = [sample.mask] if sample.instances is None else [sample.mask, sample.instances]
    whole = (0.0, 0.0, sample.mask.shape[1], sample.mask.shape[0])
    if box == whole and sample.mask.shape == (height, width):
        return sample.image, _together(maps)
    image = Image.fromarray(sample.image).resize((width, height), Image.Resampling.BILINEAR, box=box)
    nearest = [Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST, box=box) for labels in maps]
    return np.asarray(image), _together([np.asarray(labels) for labels in nearest])


def _together(maps: list[Labels]) -> Labels:
    return maps[0] if len(maps) == 1 else np.stack(maps, dtype=np.int32)


def recolour(image: Pixels, brightness: float, contrast: float, saturation: float, turn: float) -> Pixels:
    """Colour jitter as the module says; `turn` 1 is the full circle of hues."""
    if brightness == contrast == saturation == 1 and not turn:
        return image
    picture = Image.fromarray(image)
    grey = np.broadcast_to(_GREY, (3, 3))
    matrix = brightness * contrast * (saturation * np.eye(3) + (1 - saturation) * grey)
    if turn:
        cos, sin = np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)
        matrix = _TO_RGB @ np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]]) @ _YIQ @ matrix
    offset = 0.0
    if contrast != 1:
        middle = float(_GREY @ np.array(ImageStat.Stat(picture).mean))
        offset = brightness * (1 - contrast) * middle  # grey: a turn of the hue leaves it where it is
    rows = [(*row, offset) for row in matrix.tolist()]
    recoloured: Pixels = np.asarray(picture.convert("RGB", tuple(value for row in rows for value in row)))
    return recoloured


@lru_cache
def scale_and_offset(device: torch.device, mean: Rgb, std: Rgb) -> tuple[Tensor, Tensor]:
    """Scale and offset of (x / 255 - mean) / std, float32 [3]; cached, because a copy to a GPU synchronises."""
    with torch.inference_mode(False):  # whoever asks first
        deviation = torch.tensor(std, dtype=torch.float32)
        scale, offset = 1 / deviation / 255, -torch.tensor(mean, dtype=torch.float32) / deviation
        return scale.to(device), offset.to(device)


def _to_tensors(image: Pixels, labels: Labels) -> tuple[Tensor, Tensor]:
    """Tensors with memory of their own: samples may be shared and read-only."""
    return torch.from_numpy(np.array(image, order="C")), torch.from_numpy(np.array(labels, order="C"))


class LabelEvalTransform(EvalTransform):
    """As `EvalTransform`, with the class of the image as its label."""

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], class int64 [])."""
        return super().compact(_plain(sample), epoch, index)[0], _label(sample)


class LabelTrainTransform(TrainTransform):
    """As `TrainTransform`, with the class of the image as its label."""

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], class int64 [])."""
        return super().compact(_plain(sample), epoch, index)[0], _label(sample)


def _plain(sample: Sample) -> Sample:
    """The sample with a mask that is cheap to cut: it is not looked at."""
    return replace(sample, mask=np.zeros(sample.image.shape[:2], np.uint8))


def _label(sample: Sample) -> Tensor:
    return torch.tensor(int(sample.mask[0, 0]))
