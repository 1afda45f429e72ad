"""From a sample to what a model eats: image and mask cropped, flipped and resized together, colours jittered.

Geometry. Evaluation resizes the whole image to height x width. Training takes a window of 1/zoom of the image's height
and width, zoom log-uniform between the two values of `zoom`; above 1 the window lies inside the image, below 1 the
image lies inside the window and the rest is padding: mean colour, mask 255. Crop and resize are one resampling of the
original pixels, so enlarging loses nothing. Images are resampled bilinearly (with antialiasing when shrinking), masks
take the nearest pixel, both from the same box, so they stay aligned. A map of instances is one more mask: number and
class are taken from the same pixel, and padding belongs to no instance.

Colour. Brightness b, contrast c and saturation s are drawn from [1 - jitter, 1 + jitter] and applied as
`grey + s * (x - grey)`, then `m + c * (x - m)` with m the mean grey of the crop, then `b * x`, clipped to [0, 1].

Random numbers are a function of (seed, epoch, index of the sample) alone: neither the number of worker processes nor
resuming in the middle of a run changes a single pixel.

What a transform calls labels is the mask [H, W], or with instances the mask and their numbers, [2, H, W].
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from fp4deploy.data.sample import IGNORE, IMAGE_MEAN, IMAGE_STD, InstanceIds, Pixels, Sample
from fp4deploy.errors import InputError

Box = tuple[float, float, float, float]  # left, top, right, bottom in pixels of the source
Rgb = tuple[float, float, float]
Image32 = NDArray[np.float32]  # [H, W, 3], RGB in [0, 1] or normalised
Labels = Pixels | InstanceIds  # [H, W] of class ids, or [2, H, W] of class ids and numbers of instances
_GREY = np.array([0.299, 0.587, 0.114], dtype=np.float32)  # ITU-R BT.601 luma
_AUGMENT = 1  # keeps these random streams apart from the one that shuffles


class Transform(Protocol):
    """Sample -> (image float32 [3, H, W] normalised, labels int64 [H, W] or [2, H, W])."""

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]: ...


class EvalTransform:
    """Resize to height x width and normalise; takes no random numbers."""

    def __init__(self, height: int, width: int, mean: Rgb = IMAGE_MEAN, std: Rgb = IMAGE_STD) -> None:
        self.height, self.width = height, width
        self._scale, self._offset = _normalisation(mean, std)

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        height, width = sample.mask.shape
        image, labels = _resample(sample, (0.0, 0.0, width, height), self.height, self.width)
        return _to_tensors(image.astype(np.float32) * (self._scale / np.float32(255)) + self._offset, labels)


class NumberedEvalTransform(EvalTransform):
    """As `EvalTransform`, with the sample's index, int64 [], in place of its labels.

    Instances are scored against the annotations at the image's own size, so all that is asked for is which image it is.
    """

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        return super().__call__(sample, epoch, index)[0], torch.tensor(index)


class TrainTransform:
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
        upside_down: bool = False,
    ) -> None:
        if seed < 0:
            raise InputError(f"The seed is {seed}; it must be 0 or more.")
        self.height, self.width, self.seed = height, width, seed
        self.zoom, self.jitter, self.upside_down = zoom, jitter, upside_down
        self._scale, self._offset = _normalisation(mean, std)
        self._mean = np.array(mean, dtype=np.float32)

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng((_AUGMENT, self.seed, epoch, index))
        zoom = float(np.exp(random.uniform(*np.log(self.zoom))))
        across, down, flip = random.random(), random.random(), random.random() < 0.5
        brightness, contrast, saturation = random.uniform(1 - self.jitter, 1 + self.jitter, size=3)

        turn = self.upside_down and random.random() < 0.5

        pixels, labels, top, left = self._window(sample, zoom, across, down)
        image = _jitter(pixels.astype(np.float32) / np.float32(255), brightness, contrast, saturation)
        if labels.shape[-2:] != (self.height, self.width):
            image, labels = self._pad(image, labels, top, left)
        if flip:
            image, labels = image[:, ::-1], labels[..., ::-1]
        if turn:
            image, labels = image[::-1], labels[..., ::-1, :]
        return _to_tensors(image * self._scale + self._offset, labels)

    def _window(self, sample: Sample, zoom: float, across: float, down: float) -> tuple[Pixels, Labels, int, int]:
        """Resampled window, and where it stands in the result when it is smaller than that."""
        height, width = sample.mask.shape
        if zoom >= 1:
            left, top = across * (width - width / zoom), down * (height - height / zoom)
            box = (left, top, min(left + width / zoom, width), min(top + height / zoom, height))
            return *_resample(sample, box, self.height, self.width), 0, 0
        rows, columns = max(1, round(self.height * zoom)), max(1, round(self.width * zoom))
        pixels, labels = _resample(sample, (0.0, 0.0, width, height), rows, columns)
        return pixels, labels, round(down * (self.height - rows)), round(across * (self.width - columns))

    def _pad(self, image: Image32, labels: Labels, top: int, left: int) -> tuple[Image32, Labels]:
        padded = np.broadcast_to(self._mean, (self.height, self.width, 3)).copy()
        height, width = labels.shape[-2:]
        void: Labels = np.zeros((*labels.shape[:-2], self.height, self.width), dtype=labels.dtype)
        (void[0] if void.ndim == 3 else void)[:] = IGNORE
        area = slice(top, top + height), slice(left, left + width)
        padded[area], void[..., area[0], area[1]] = image, labels
        return padded, void


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


def _jitter(image: Image32, brightness: float, contrast: float, saturation: float) -> Image32:
    grey = (image @ _GREY)[..., None]
    middle = float(grey.mean(dtype=np.float64))
    # grey + s (x - grey), then m + c (x - m), then b x: one linear map of x and its grey value.
    image = image * np.float32(brightness * contrast * saturation)
    image += grey * np.float32(brightness * contrast * (1 - saturation))
    image += np.float32(brightness * (1 - contrast) * middle)
    clipped: Image32 = np.clip(image, 0, 1, out=image)
    return clipped


def _normalisation(mean: Rgb, std: Rgb) -> tuple[Image32, Image32]:
    """Scale and offset of (x - mean) / std."""
    spread = np.array(std, dtype=np.float32)
    return np.float32(1) / spread, -np.array(mean, dtype=np.float32) / spread


def _to_tensors(image: Image32, labels: Labels) -> tuple[Tensor, Tensor]:
    channels_first = np.ascontiguousarray(image.transpose(2, 0, 1), dtype=np.float32)
    return torch.from_numpy(channels_first), torch.from_numpy(labels.astype(np.int64))
