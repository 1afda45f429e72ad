"""From a sample to what a model eats: image and mask cropped, flipped and resized together, colours jittered.

Geometry. Evaluation resizes the whole image to height x width. Training takes a window of 1/zoom of the image's
height and width, zoom log-uniform between the two values of `zoom`; above 1 the window lies inside the image, below 1
the image lies inside the window and the rest is padding: mean colour, mask 255. Crop and resize are one resampling of
the original pixels, so enlarging loses nothing. Images are resampled bilinearly (with antialiasing when shrinking),
masks take the nearest pixel, both from the same box, so they stay aligned. With `aspect` a above 1 the two sides'
zooms differ by a factor log-uniform in [1/a, a]; with `rotate` the result turns about its centre by up to so many
degrees, and the corners that this uncovers are padding.

Colour. Brightness b, contrast c and saturation s are drawn from [1 - jitter, 1 + jitter] and applied as
`grey + s * (x - grey)`, then `m + c * (x - m)` with m the mean grey of the crop, then `b * x`, clipped to [0, 1]. With
`hue` h the colours then turn about the grey axis by up to h of a full circle, at the same luma.

Random numbers are a function of (seed, epoch, index of the sample) alone: neither the number of worker processes nor
resuming in the middle of a run changes a single pixel.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fp4deploy.data.sample import IGNORE, IMAGE_MEAN, IMAGE_STD, Pixels, Sample
from fp4deploy.errors import InputError

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the source
Rgb = tuple[float, float, float]
Image32 = NDArray[np.float32]  # [H, W, 3], RGB in [0, 1] or normalised
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601 luma
_YIQ = np.array([[0.299, 0.587, 0.114], [0.596, -0.274, -0.322], [0.211, -0.523, 0.312]])  # NTSC, 1953
_AUGMENT = 1  # keeps these random streams apart from the one that shuffles


class Transform(Protocol):
    """Sample -> (image float32 [3, H, W] normalised, mask int64 [H, W])."""

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]: ...


class EvalTransform:
    """Resize to height x width and normalise; takes no random numbers."""

    def __init__(self, height: int, width: int, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD) -> None:
        self.height, self.width = height, width
        self._scale, self._offset = _normalisation(mean, std)

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        height, width = sample.mask.shape
        image, mask = _resample(sample, (0.0, 0.0, width, height), self.height, self.width)
        return _to_tensors(image.astype(np.float32) * (self._scale / np.float32(255)) + self._offset, mask)


class TrainTransform:
    """Random window, horizontal flip and colour jitter, then as `EvalTransform`."""

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
    ) -> None:
        if seed < 0:
            raise InputError(f"The seed is {seed}; it must be 0 or more.")
        self.height, self.width, self.seed = height, width, seed
        self.zoom, self.jitter = zoom, jitter
        self.flip, self.rotate, self.aspect, self.hue = flip, rotate, aspect, hue
        self._scale, self._offset = _normalisation(mean, std)
        self._mean = np.array(mean, dtype=np.float32)

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng((_AUGMENT, self.seed, epoch, index))
        zoom = float(np.exp(random.uniform(*np.log(self.zoom))))
        across, down, flip = random.random(), random.random(), random.random() < self.flip
        brightness, contrast, saturation = random.uniform(1 - self.jitter, 1 + self.jitter, size=3)
        stretch, angle, hue = random.uniform(-1, 1, size=3)  # last, so that what is off changes nothing above

        side = float(self.aspect ** (stretch / 2))
        pixels, mask, top, left = self._window(sample, (zoom * side, zoom / side), across, down)
        if self.rotate:
            pixels, mask = self._turn(pixels, mask, self.rotate * angle)
        image = _jitter(pixels.astype(np.float32) / np.float32(255), brightness, contrast, saturation)
        if self.hue:
            image = _turn_hue(image, self.hue * hue)
        if mask.shape != (self.height, self.width):
            image, mask = self._pad(image, mask, top, left)
        if flip:
            image, mask = image[:, ::-1], mask[:, ::-1]
        return _to_tensors(image * self._scale + self._offset, mask)

    def _window(
        self, sample: Sample, zoom: tuple[float, float], across: float, down: float
    ) -> tuple[Pixels, Pixels, int, int]:
        """Resampled window, and where it stands in the result when it is smaller than that; `zoom` in x and in y."""
        height, width = sample.mask.shape
        left, right, columns, column = _span(width, self.width, zoom[0], across)
        top, bottom, rows, row = _span(height, self.height, zoom[1], down)
        return *_resample(sample, (left, top, right, bottom), rows, columns), row, column

    def _turn(self, pixels: Pixels, mask: Pixels, degrees: float) -> tuple[Pixels, Pixels]:
        fill = tuple(int(value) for value in (255 * self._mean).round())
        image = Image.fromarray(pixels).rotate(degrees, Image.Resampling.BILINEAR, fillcolor=fill)
        void = Image.fromarray(mask).rotate(degrees, Image.Resampling.NEAREST, fillcolor=IGNORE)
        return np.asarray(image), np.asarray(void)

    def _pad(self, image: Image32, mask: Pixels, top: int, left: int) -> tuple[Image32, Pixels]:
        padded = np.broadcast_to(self._mean, (self.height, self.width, 3)).copy()
        void = np.full((self.height, self.width), IGNORE, dtype=np.uint8)
        area = slice(top, top + mask.shape[0]), slice(left, left + mask.shape[1])
        padded[area], void[area] = image, mask
        return padded, void


def _span(size: int, target: int, zoom: float, position: float) -> tuple[float, float, int, int]:
    """One side of a window: from and to in pixels of the source, pixels in the result, and the first of them."""
    if zoom >= 1:
        start = position * (size - size / zoom)
        return start, min(start + size / zoom, size), target, 0
    count = max(1, round(target * zoom))
    return 0.0, size, count, round(position * (target - count))


def _resample(sample: Sample, box: Box, height: int, width: int) -> tuple[Pixels, Pixels]:
    whole = (0.0, 0.0, sample.mask.shape[1], sample.mask.shape[0])
    if box == whole and sample.mask.shape == (height, width):
        return sample.image, sample.mask
    image = Image.fromarray(sample.image).resize((width, height), Image.Resampling.BILINEAR, box=box)
    mask = Image.fromarray(sample.mask).resize((width, height), Image.Resampling.NEAREST, box=box)
    return np.asarray(image), np.asarray(mask)


def _jitter(image: Image32, brightness: float, contrast: float, saturation: float) -> Image32:
    grey = (image @ _GREY)[..., None]
    middle = float(grey.mean(dtype=np.float64))
    # grey + s (x - grey), then m + c (x - m), then b x: one linear map of x and its grey value.
    image = image * np.float32(brightness * contrast * saturation)
    image += grey * np.float32(brightness * contrast * (1 - saturation))
    image += np.float32(brightness * (1 - contrast) * middle)
    clipped: Image32 = np.clip(image, 0, 1, out=image)
    return clipped


def _turn_hue(image: Image32, turn: float) -> Image32:
    """Turn the colours about the grey axis in YIQ, which keeps the luma; `turn` 1 is the full circle."""
    cos, sin = np.cos(2 * np.pi * turn), np.sin(2 * np.pi * turn)
    rotation = np.array([[1, 0, 0], [0, cos, -sin], [0, sin, cos]])
    matrix = (np.linalg.inv(_YIQ) @ rotation @ _YIQ).astype(np.float32)
    turned: Image32 = np.clip(image @ matrix.T, 0, 1)
    return turned


def _normalisation(mean: Rgb, std: Rgb) -> tuple[Image32, Image32]:
    """Scale and offset of (x - mean) / std."""
    spread = np.array(std, dtype=np.float32)
    return np.float32(1) / spread, -np.array(mean, dtype=np.float32) / spread


def _to_tensors(image: Image32, mask: Pixels) -> tuple[Tensor, Tensor]:
    channels_first = np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32)
    return torch.from_numpy(channels_first), torch.from_numpy(mask.astype(np.int64))
