"""Resampling between grids of the same extent: every axis from its own number of voxels to another.

Voxels are cells: the first and the last of both grids end at the same borders (`grid_mode` of scipy, `align_corners`
off in torch). Images are resampled by cubic splines, and along an axis whose voxels are more than `ANISOTROPIC` times
thicker than the finest linearly, where splines through few thick slices overshoot. Scores of classes are resampled
linearly, and labels as the scores that are 1 for their class, so that the most likely class decides and no value is
invented.

Source for the separate treatment of thick slices: Isensee et al., "nnU-Net", 2021.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from fp4deploy.data.sample import Pixels

ANISOTROPIC = 3.0
BAND = 2**25  # elements of resampled scores that are held at once


def size_at(size: Sequence[int], spacing: Sequence[float], target: Sequence[float]) -> tuple[int, ...]:
    """Voxels along each axis after a change of spacing, one at least.

    >>> size_at((10, 64, 64), (3.0, 1.0, 1.0), (1.5, 1.0, 2.0))
    (20, 64, 32)
    """
    return tuple(max(1, round(side * own / new)) for side, own, new in zip(size, spacing, target, strict=True))


def resample_image(voxels: NDArray[np.float32], size: Sequence[int], spacing: Sequence[float]) -> NDArray[np.float32]:
    """One channel [D, H, W] on a grid of `size`; `spacing` is that of the voxels."""
    from scipy import ndimage

    if voxels.shape == tuple(size):
        return voxels
    thick = [step > ANISOTROPIC * min(spacing) for step in spacing]
    for order, chosen in ((3, [not each for each in thick]), (1, thick)):
        zoom = [new / old if use else 1.0 for new, old, use in zip(size, voxels.shape, chosen, strict=True)]
        if any(each != 1 for each in zoom):
            voxels = ndimage.zoom(voxels, zoom, order=order, mode="nearest", grid_mode=True)
    assert voxels.shape == tuple(size)
    return voxels.astype(np.float32, copy=False)


def resample_labels(labels: Pixels, size: Sequence[int]) -> Pixels:
    """Labels uint8 [D, H, W] on a grid of `size`: the value whose linearly resampled share is the largest."""
    if labels.shape == tuple(size):
        return labels
    best = np.full(tuple(size), -1.0, np.float32)
    result = np.zeros(tuple(size), np.uint8)
    for value in np.unique(labels):
        share = torch.from_numpy((labels == value).astype(np.float32))[None, None]
        found = F.interpolate(share, tuple(size), mode="trilinear", align_corners=False)[0, 0].numpy()
        result[found > best] = value
        np.maximum(best, found, out=best)
    return result


def most_likely(scores: NDArray[Any], size: Sequence[int]) -> Pixels:
    """The class of each voxel [*size] of scores [classes, D, H, W] that are resampled linearly, some slices at a time.

    `scores` may be a file that is mapped into memory: a band of slices of it is read at a time.
    """
    classes, depth = scores.shape[:2]
    labels = np.empty(tuple(size), np.uint8)
    each = max(1, BAND // (classes * int(np.prod(size[1:]))))
    for top in range(0, size[0], each):
        place = np.arange(top, min(top + each, size[0]))
        source = np.clip((place + 0.5) * (depth / size[0]) - 0.5, 0, depth - 1)
        below = np.floor(source).astype(int)
        above = np.minimum(below + 1, depth - 1)
        first, last = int(below[0]), int(above[-1])
        read = torch.from_numpy(np.ascontiguousarray(scores[:, first : last + 1], np.float32))
        share = torch.from_numpy((source - below).astype(np.float32))[:, None, None]
        band = torch.lerp(read[:, below - first], read[:, above - first], share)
        if band.shape[2:] != tuple(size[1:]):
            band = F.interpolate(band.movedim(1, 0), tuple(size[1:]), mode="bilinear", align_corners=False).movedim(
                0, 1
            )
        labels[top : top + len(place)] = band.argmax(0).numpy()
    return labels
