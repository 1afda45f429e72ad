"""Resampling between grids of the same extent: every axis from its own number of voxels to another.

Voxels are cells: the first and the last of both grids end at the same borders (`grid_mode` of scipy, `align_corners`
off in torch). Images are resampled by cubic splines, and along an axis whose voxels are more than `ANISOTROPIC` times
thicker than the finest linearly, where splines through few thick slices overshoot. Scores of classes are resampled
linearly, and labels as the scores that are 1 for their class, so that the most likely class decides and no value is
invented.

Axes are separable, so that all of this is a matrix along each axis (`axis_matrix`), multiplied where the volume is.

Source for the separate treatment of thick slices: Isensee et al., "nnU-Net", 2021.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
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


@lru_cache(maxsize=32)
def axis_matrix(old: int, new: int, order: int) -> torch.Tensor:
    """What splines of an order do along one axis, float32 [new, old]: scipy's result for the identity.

    Resampling is linear and separable, so that of a volume it is three matrix products, on any device. Order 0 takes
    the nearest voxel, as `map_coordinates` does.
    """
    from scipy import ndimage

    if order == 0:
        places = (np.arange(new) + 0.5) * (old / new) - 0.5
        nearest = ndimage.map_coordinates(np.arange(old), [places], order=0, mode="nearest")
        return F.one_hot(torch.from_numpy(nearest).long(), old).float()
    found = ndimage.zoom(np.eye(old), (new / old, 1.0), order=order, mode="nearest", grid_mode=True)
    assert found.shape == (new, old)
    return torch.from_numpy(found.astype(np.float32))


def resampled_bands(
    x: torch.Tensor | NDArray[Any], size: Sequence[int], orders: Sequence[int], clip: bool = False
) -> Iterator[torch.Tensor]:
    """`x` [C, D, H, W] on a grid of `size`, float32 on its device, in bands along the first axis.

    Args:
        x: an array may be a file that is mapped into memory: a band reads the slices that it needs.
        orders: of the splines along each axis.
        clip: to the range of each channel, and of each slice along an axis of order 0, as skimage does.
    """
    channels, _, *plane = x.shape
    device = x.device if isinstance(x, torch.Tensor) else torch.device("cpu")
    rows, *others = (
        None if old == new else axis_matrix(old, new, order).to(device)
        for old, new, order in zip(x.shape[1:], size, orders, strict=True)
    )
    limits: list[torch.Tensor] = []
    if clip:
        whole, axes = torch.as_tensor(x), [axis for axis, order in enumerate(orders, 1) if order]
        limits = [whole.amin(axes, keepdim=True).float(), whole.amax(axes, keepdim=True).float()]
    each = max(1, BAND // (channels * max(math.prod(size[1:]), math.prod(plane))))
    for top in range(0, size[0], each):
        part, band_rows = slice(top, top + each), None
        if rows is not None:
            used = rows[part].any(0).nonzero()
            source = slice(int(used[0]), int(used[-1]) + 1)
            band_rows, part = rows[part, source], source
        matrices = (band_rows, *others)
        band = _along(torch.as_tensor(x[:, part]).float(), matrices)
        if clip:
            chosen = [None if order else matrix for order, matrix in zip(orders, matrices, strict=True)]
            low, high = (_along(limit if orders[0] else limit[:, part], chosen) for limit in limits)
            band = band.clamp(low, high)
        yield band


def _along(x: torch.Tensor, matrices: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """`x` [C, D, H, W] with each matrix [new, old] applied along its axis; None changes nothing."""
    for axis, matrix in enumerate(matrices, 1):
        if matrix is not None:
            shape = list(x.shape)
            shape[axis] = len(matrix)
            flat = x.reshape(math.prod(shape[:axis]), x.shape[axis], -1)
            x = (flat[..., 0] @ matrix.T if axis == x.ndim - 1 else matrix @ flat).reshape(shape)
    return x


def resample_image(voxels: NDArray[np.float32], size: Sequence[int], spacing: Sequence[float]) -> NDArray[np.float32]:
    """One channel [D, H, W] on a grid of `size`; `spacing` is that of the voxels."""
    if voxels.shape == tuple(size):
        return voxels
    orders = [1 if step > ANISOTROPIC * min(spacing) else 3 for step in spacing]
    return torch.cat(list(resampled_bands(voxels[None], size, orders)), 1)[0].numpy()


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
    bands = resampled_bands(scores, size, (1, 1, 1))
    return np.concatenate([band.argmax(0).to(torch.uint8).cpu().numpy() for band in bands])
