"""Resizing with its positions in tables: what torch computes on a CPU, in forms that compile to little code.

    y = interpolate_linear(x, (128, 128), None, align_corners=False)       as F.interpolate(x, ..., mode="bilinear")
    y = interpolate_nearest(x, None, (2.0, 2.0), exact=False)              as F.interpolate(x, ..., mode="nearest")

Between which pixels a result lies depends on its row or its column alone. A compiler expands `upsample_bilinear2d` to
code that finds them for each element, in 64-bit integers: 12 us for [1, 256, 128, 128] in FP16, 7 with tables, of
which memory explains 3 (one H200, torch 2.11, 2026-11-28, +-5 %). Nearest resizing by a whole factor repeats pixels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

Sizes = Sequence[int] | None
Factors = Sequence[float] | None
Axis = tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None  # None: as it is


def interpolate_linear(x: torch.Tensor, size: Sizes, scale: Factors, align_corners: bool) -> torch.Tensor:
    """`x` [N, C, *S] resized to `size`, or by the factors `scale`; sums in FP32, the last axis first, rounded once.

    An axis whose size stays is copied, whatever the factor, as torch does on a CPU.
    """
    axes = [
        None if result == source else _between(source, result, step, align_corners, x.device)
        for source, (result, step) in zip(x.shape[2:], _targets(x, size, scale), strict=True)
    ]
    return _interpolated(x, axes, 0).to(x.dtype)


def interpolate_nearest(x: torch.Tensor, size: Sizes, scale: Factors, exact: bool) -> torch.Tensor:
    """`x` [N, C, *S] resized to `size`, or by the factors `scale`; exact: "nearest-exact", from the pixels' centres."""
    for at, (result, step) in enumerate(_targets(x, size, scale), 2):
        source = x.shape[at]
        if result == source and not exact:
            continue
        place = np.arange(result, dtype=np.float32) + np.float32(0.5 if exact else 0)
        pixels = np.minimum((place * np.float32(step)).astype(np.int32), source - 1)
        # torch's product with the rounded step is one pixel off for some whole factors, such as 41: so is this.
        if np.array_equal(pixels, np.arange(source).repeat(max(1, result // source))):
            x = _repeated(x, at, result // source)
        else:
            x = _taken(x, at, torch.tensor(pixels, device=x.device))
    return x


def _targets(x: torch.Tensor, size: Sizes, scale: Factors) -> list[tuple[int, float]]:
    """(pixels of the result, pixels of the source for one of them) of each axis."""
    if scale is not None:
        return [(int(source * factor), 1 / factor) for source, factor in zip(x.shape[2:], scale, strict=True)]
    assert size is not None
    return [(result, source / result) for source, result in zip(x.shape[2:], size, strict=True)]


def _interpolated(x: torch.Tensor, axes: Sequence[Axis], at: int) -> torch.Tensor:
    """Interpolated along the axes from the given one on, float32."""
    if at == len(axes):
        return x.to(torch.float32)
    axis = axes[at]
    if axis is None:
        return _interpolated(x, axes, at + 1)
    before, behind, weight = axis
    shape = (-1, *(1,) * (len(axes) - at - 1))
    low, high = (_interpolated(_taken(x, at + 2, pixels), axes, at + 1) for pixels in (before, behind))
    return (1 - weight).view(shape) * low + weight.view(shape) * high


def _between(source: int, result: int, step: float, align_corners: bool, device: torch.device) -> Axis:
    """(pixel before, pixel behind, weight of the latter) of each result along an axis, as torch's kernels find them."""
    place = torch.arange(result, dtype=torch.float32, device=device)
    if align_corners:
        place = place * ((source - 1) / (result - 1) if result > 1 else 0.0)
    else:
        place = ((place + 0.5) * step - 0.5).clamp(min=0)
    before = place.to(torch.int32).clamp(max=source - 1)
    return before, (before + 1).clamp(max=source - 1), (place - before).clamp(0, 1)


def _taken(x: torch.Tensor, axis: int, positions: torch.Tensor) -> torch.Tensor:
    """These positions of an axis, int32; nothing checks them."""
    index: list[torch.Tensor | None] = [None] * axis
    taken: torch.Tensor = torch.ops.aten._unsafe_index(x, [*index, positions])
    return taken


def _repeated(x: torch.Tensor, axis: int, times: int) -> torch.Tensor:
    """Each position of an axis so many times after another."""
    if times == 1:
        return x
    wide = x.unsqueeze(axis + 1)
    return wide.expand(*x.shape[: axis + 1], times, *x.shape[axis + 1 :]).flatten(axis, axis + 1)
