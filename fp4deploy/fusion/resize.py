"""Resizing with its positions in tables: what torch computes, in a form that compiles to little code.

    y = interpolate_linear(x, (128, 128), None, align_corners=False)       as F.interpolate(x, ..., mode="bilinear")

Where a result lies between two pixels depends on its row or column alone. A compiler that expands `upsample_bilinear2d`
computes that for each element, in 64-bit integers: 12 us for [1, 256, 128, 128] in FP16, of which memory explains 3 (one
H200, torch 2.11, 2026-11-28, +-5 %). Here it is a table of each axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def interpolate_linear(
    x: torch.Tensor, size: Sequence[int] | None, scale: Sequence[float] | None, align_corners: bool
) -> torch.Tensor:
    """`x` [N, C, *S] resized to `size`, or by the factors `scale`; sums in FP32, the last axis first, rounded once."""
    sizes = list(x.shape[2:])
    factors = [None] * len(sizes) if scale is None else list(scale)
    wanted = [int(a * float(b)) for a, b in zip(sizes, factors, strict=True)] if size is None else list(size)
    axes = [_positions(*each, align_corners, x.device) for each in zip(sizes, wanted, factors, strict=True)]
    return _between(x, axes, 0).to(x.dtype)


Axis = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _between(x: torch.Tensor, axes: Sequence[Axis], at: int) -> torch.Tensor:
    """Interpolated along the axes from the given one on, float32."""
    if at == len(axes):
        return x.to(torch.float32)
    before, behind, weight = axes[at]
    shape = (-1, *(1,) * (len(axes) - at - 1))
    index: list[torch.Tensor | None] = [None] * (at + 2)
    low, high = (_between(torch.ops.aten._unsafe_index(x, [*index, place]), axes, at + 1) for place in (before, behind))
    return (1 - weight).view(shape) * low + weight.view(shape) * high


def _positions(source: int, result: int, factor: float | None, align_corners: bool, device: torch.device) -> Axis:
    """(pixel before, pixel behind, weight of the latter) of each result along an axis, as torch's kernels find them."""
    place = torch.arange(result, dtype=torch.float32, device=device)
    if align_corners:
        place = place * ((source - 1) / (result - 1) if result > 1 else 0.0)
    else:
        place = ((place + 0.5) * (1 / factor if factor else source / result) - 0.5).clamp(min=0)
    before = place.to(torch.int32).clamp(max=source - 1)
    return before, (before + 1).clamp(max=source - 1), (place - before).clamp(0, 1)


def interpolate_nearest(
    x: torch.Tensor, size: Sequence[int] | None, scale: Sequence[float] | None, exact: bool
) -> torch.Tensor:
    """`x` [N, C, *S] resized to `size`, or by the factors `scale`, as F.interpolate with "nearest", or "nearest-exact"."""
    for at, source in enumerate(x.shape[2:]):
        factor = None if scale is None else scale[at]
        result = int(source * float(factor)) if size is None else size[at]
        if result % source == 0 and (factor is None or factor == result // source):
            x = _repeated(x, at + 2, result // source)
            continue
        place = torch.arange(result, dtype=torch.float32, device=x.device) + (0.5 if exact else 0.0)
        pixel = (place * (1 / factor if factor else source / result)).to(torch.int32).clamp(max=source - 1)
        index: list[torch.Tensor | None] = [None] * (at + 2)
        x = torch.ops.aten._unsafe_index(x, [*index, pixel])
    return x


def _repeated(x: torch.Tensor, axis: int, times: int) -> torch.Tensor:
    """Each position of an axis so many times after another."""
    if times == 1:
        return x
    wide = x.unsqueeze(axis + 1)
    return wide.expand(*x.shape[: axis + 1], times, *x.shape[axis + 1 :]).flatten(axis, axis + 1)
