"""Transforms from a volume to the input of a network: windows of the network's size, mirrored and of other intensities.

A volume comes normalised and at one spacing (`volumes.dataset`), so an evaluation takes it as it is. Training takes a
window: in a share `foreground` of the samples its centre is a voxel of a class other than the background, drawn evenly
from the classes that the volume has, and else it lies anywhere. A window is 1/zoom of the input's size along each axis,
zoom log-uniform, resampled linearly (labels to the nearest voxel). What lies outside the volume is 0, the mean, and is
void in the labels.

Intensities of a channel become `b x + c`, b from [1 - jitter, 1 + jitter] and c from [-jitter, jitter] standard
deviations. `flip` mirrors along each axis on its own. Random numbers are a function of (seed, epoch, index) alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fp4deploy.data.augmentation.transforms import AUGMENT
from fp4deploy.data.sample import IGNORE, Sample
from fp4deploy.errors import InputError
from fp4deploy.models.volumes import Size


class VolumeTransform:
    """A volume as it is scored, with its index in place of labels; or a window of the network's size in its middle."""

    def __init__(self, size: Size, whole: bool = False) -> None:
        self.size, self.whole = size, whole

    def others(self, epoch: int, index: int, count: int) -> tuple[int, ...]:
        """A volume is taken alone."""
        return ()

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(float32 [C, D, H, W] of the volume, index int64 []), or (float32 [C, *size], labels int64 [*size])."""
        if self.whole:
            return torch.from_numpy(np.array(sample.image)), torch.tensor(index)
        inside = np.argwhere((sample.mask > 0) & (sample.mask != IGNORE))
        middle = inside.mean(0) if len(inside) else np.array(sample.mask.shape) / 2
        image, labels = _window(sample, middle, self.size)
        return image, labels.long()

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """As `__call__`: there is no smaller form."""
        return self(sample, epoch, index)


class VolumeTrainTransform(VolumeTransform):
    """A random window, mirrored and of other intensities, and its labels int64 [*size]."""

    def __init__(
        self,
        size: Size,
        seed: int = 0,
        *,
        zoom: tuple[float, float] = (0.85, 1.4),
        jitter: float = 0.3,
        flip: float = 0.5,
        foreground: float = 1 / 3,
    ) -> None:
        if seed < 0:
            raise InputError(f"The seed is {seed}; it must be 0 or more.")
        super().__init__(size)
        self.seed, self.zoom, self.jitter, self.flip, self.foreground = seed, zoom, jitter, flip, foreground

    def __call__(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        random = np.random.default_rng((AUGMENT, self.seed, epoch, index))
        zoom = float(np.exp(random.uniform(*np.log(self.zoom))))
        size = [max(1, round(side / zoom)) for side in self.size]
        image, labels = _window(sample, self._centre(sample, size, random), size)
        if tuple(size) != tuple(self.size):
            image = F.interpolate(image[None], self.size, mode="trilinear", align_corners=False)[0]
            labels = F.interpolate(labels[None, None], self.size, mode="nearest-exact")[0, 0]
        axes = [axis for axis, chance in enumerate(random.random(len(self.size))) if chance < self.flip]
        scale = random.uniform(1 - self.jitter, 1 + self.jitter, len(image)).astype(np.float32)
        offset = random.uniform(-self.jitter, self.jitter, len(image)).astype(np.float32)
        image, labels = image.flip([axis + 1 for axis in axes]), labels.flip(axes)
        each = (-1, *[1] * len(self.size))
        known = (labels != IGNORE)[None]  # padding stays the mean
        image = image * torch.from_numpy(scale).view(each) + torch.from_numpy(offset).view(each) * known
        return image.contiguous(), labels.long().contiguous()

    def _centre(self, sample: Sample, size: Sequence[int], random: np.random.Generator) -> np.ndarray:
        """The middle of a window of `size`, in voxels of the volume."""
        classes = np.unique(sample.mask)
        classes = classes[(classes > 0) & (classes != IGNORE)]
        if random.random() < self.foreground and len(classes):
            places = np.flatnonzero(sample.mask == random.choice(classes))
            return np.array(np.unravel_index(random.choice(places), sample.mask.shape)) + 0.5
        spare = np.maximum(np.array(sample.mask.shape) - size, 0)  # a smaller volume stays whole, in the middle
        start = random.random(len(size)) * spare
        return np.where(spare > 0, start + np.array(size) / 2, np.array(sample.mask.shape) / 2)


def _window(sample: Sample, centre: np.ndarray, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Voxels [C, *size] around `centre`, and labels uint8 [*size]; the window is moved inside where it fits."""
    shape = np.array(sample.mask.shape)
    start = np.round(centre - np.array(size) / 2).astype(int)
    start = np.where(shape > size, np.clip(start, 0, np.maximum(shape - size, 0)), (shape - size) // 2)
    first = np.maximum(start, 0)
    read = tuple(slice(at, at + min(side, own)) for at, side, own in zip(first, size, shape, strict=True))
    write = tuple(slice(each.start - at, each.stop - at) for each, at in zip(read, start, strict=True))
    image = np.zeros((len(sample.image), *size), np.float32)
    labels = np.full(tuple(size), IGNORE, np.uint8)
    for channel, voxels in zip(image, sample.image, strict=True):
        channel[write] = voxels[read]
    labels[write] = sample.mask[read]
    return torch.from_numpy(image), torch.from_numpy(labels)
