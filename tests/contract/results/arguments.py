"""Awkward arguments: not square, not in order, with ties, voids and empty classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import numpy as np
import torch

from fp4deploy.data.sample import Sample
from tests.contract.results.plain import Answer, plain


def _random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def real(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Normal numbers, of which some are large."""
    x = scale * torch.from_numpy(_random(seed).normal(size=shape)).float()
    return torch.where(x.abs() > 1.8, 6 * x, x)


def classes(*shape: int, count: int = 4, seed: int = 0, void: bool = True) -> torch.Tensor:
    """Blobs of class ids; the last class occurs nowhere; some are void."""
    small = _random(seed).integers(0, count - 1, [-(-size // 4) for size in shape])
    for axis, size in enumerate(shape):
        small = np.take(small.repeat(4, axis), range(size), axis)
    found = torch.from_numpy(small)
    if void:
        found.view(-1)[5::17] = 255
    return found


def picture(height: int = 21, width: int = 34, seed: int = 0) -> np.ndarray[Any, Any]:
    """A gradient with noise, uint8 [H, W, 3]."""
    ramp = np.add.outer(5 * np.arange(height), 3 * np.arange(width))[..., None] * np.array([1, 0.6, 0.2])
    return np.clip(ramp + _random(seed).normal(20, 15, (height, width, 3)), 0, 255).astype(np.uint8)


def objects(height: int = 21, width: int = 34) -> np.ndarray[Any, Any]:
    """Numbers of objects [H, W]; two touch, one has a pixel."""
    ids = np.zeros((height, width), np.int32)
    ids[2:9, 3:12], ids[5:14, 12:20], ids[15:20, 1:30], ids[0, 33] = 1, 2, 4, 3
    return ids


def scene(seed: int = 0) -> Sample:
    """An image with a mask, objects and boxes."""
    mask = np.where(objects() > 0, 1 + objects() % 2, 0).astype(np.uint8)
    mask[18:, 30:] = 255
    rows = np.array([[1, 3, 2, 12, 9], [2, 12, 5, 20, 14], [255, 1, 15, 30, 20], [1, 30, 0, 34, 3]], np.float32)
    return Sample(picture(seed=seed), mask, f"{seed}", objects(), rows)


def volume() -> Sample:
    """Two channels, [2, 9, 14, 11]."""
    voxels = _random().normal(size=(2, 9, 14, 11)).astype(np.float32)
    return Sample(cast(Any, voxels), classes(9, 14, 11, count=3, void=False).numpy().astype(np.uint8), "v")


def augmented(kind: Callable[..., Any], given: Sample, size: tuple[int, ...], **options: Any) -> Answer:
    """Images and labels of some epochs and indices, with each option changed alone."""

    def answers() -> Any:
        found = {}
        for name, value in {"": None, **options}.items():
            transform = kind(*size, **({name: value} if name else {}))
            found[name] = [plain(transform(given, epoch, index)) for epoch, index in ((0, 0), (0, 5), (3, 1))]
        return found

    return answers


def gathered(heads: Iterable[Any], decode: Callable[[Any], Any]) -> Answer:
    return lambda: [plain(decode(head)) for head in heads]
