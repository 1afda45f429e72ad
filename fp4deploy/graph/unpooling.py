"""Max unpooling without indices: from the windows that the pooling read, in operators that every runtime has.

    y, at = max_pool2d(x, 2, return_indices=True); ...; z = max_unpool2d(y', at, 2)          ENet, SegNet

Indices are integers as large as a feature map, which FP16 does not hold, and TensorRT has no MaxUnpool. Where windows
do not overlap, an element of `z` is that of `y'` if `x` had its maximum there, and 0 elsewhere:

    windows [N, C, H/k, k, W/k, k] of x;  first = the first element of a window that equals its maximum
    z = where(first, y' [N, C, H/k, 1, W/k, 1], 0) [N, C, H, W]

The first of several equal ones, as in torch: after ReLU whole windows are 0.

`unpooling` writes this in place of the calls while a module is traced. Windows that overlap or are padded, and indices
that are used for a map of another width, stay calls of max_unpool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.graph.replacement import Table

_NAMES = {axes: (f"max_pool{axes}d_with_indices", f"max_unpool{axes}d") for axes in (1, 2, 3)}
_POOLS = {getattr(F, pool): axes for axes, (pool, _) in _NAMES.items()}
_UNPOOLS = {getattr(F, unpool): axes for axes, (_, unpool) in _NAMES.items()}


@dataclass(frozen=True)
class _Pooled:
    """indices: kept, so that its id is of this tensor alone. first: [..., H/k, k, W/k, k]. size: of what was pooled."""

    indices: torch.Tensor
    first: torch.Tensor
    kernel: tuple[int, ...]
    size: tuple[object, ...]


def unpooling() -> Table:
    """By this table `Rewriting` computes max_unpool1d, 2d and 3d of non-overlapping windows without indices.

    >>> from fp4deploy.graph.replacement import Rewriting
    >>> x = torch.rand(1, 1, 4, 4)
    >>> y, indices = F.max_pool2d(x, 2, return_indices=True)
    >>> with Rewriting(unpooling()):
    ...     y, same = F.max_pool2d(x, 2, return_indices=True)
    ...     z = F.max_unpool2d(y, same, 2)
    >>> torch.equal(z, F.max_unpool2d(y, indices, 2))
    True
    """
    known: dict[int, _Pooled] = {}
    pools = {function: partial(_pool, known, axes) for function, axes in _POOLS.items()}
    return pools | {function: partial(_unpool, known, axes) for function, axes in _UNPOOLS.items()}


def _pool(
    known: dict[int, _Pooled],
    axes: int,
    call: Callable[..., Any],
    input: torch.Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = True,
) -> object:
    values, indices = call(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
    kernel = _each(kernel_size, axes)
    plain = _each(padding, axes) == (0,) * axes and _each(dilation, axes) == (1,) * axes
    if ceil_mode or not plain or _strides(stride, kernel) != kernel:
        return values, indices
    known[id(indices)] = _Pooled(indices, _first(input, kernel), kernel, tuple(input.shape[-axes:]))
    plain_pool: Callable[..., torch.Tensor] = getattr(F, f"max_pool{axes}d")
    return plain_pool(input, kernel), indices


def _unpool(
    known: dict[int, _Pooled],
    axes: int,
    call: Callable[..., Any],
    input: torch.Tensor,
    indices: torch.Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    output_size: Sequence[Any] | None = None,
) -> object:
    pooled, kernel = known.get(id(indices)), _each(kernel_size, axes)
    if pooled is None or _each(padding, axes) != (0,) * axes or _strides(stride, kernel) != kernel:
        return call(input, indices, kernel_size, stride, padding, output_size)
    places = input.shape[-axes:]
    size = [extent * step for extent, step in zip(places, kernel, strict=True)]
    if output_size is not None:
        size = list(output_size[-axes:])
    # Indices count through a map of the pooled one's width.
    if kernel != pooled.kernel or any(mine != other for mine, other in zip(size[1:], pooled.size[1:], strict=True)):
        return call(input, indices, kernel_size, stride, padding, output_size)
    spread = input
    for axis in range(-1, -2 * axes, -2):
        spread = spread.unsqueeze(axis)
    spread = torch.where(pooled.first, spread, torch.zeros_like(spread))
    for axis in range(axes):  # [..., H/k, k, W/k, k] -> [..., H, W]
        spread = spread.flatten(input.ndim - axes + axis, input.ndim - axes + axis + 1)
    missing = [whole - extent * step for whole, extent, step in zip(size, places, kernel, strict=True)]
    if all(isinstance(each, int) and each == 0 for each in missing):
        return spread
    return F.pad(spread, [each for extra in reversed(missing) for each in (0, extra)])


def _first(x: torch.Tensor, kernel: tuple[int, ...]) -> torch.Tensor:
    """Whether an element is the first maximum of its window; [..., H/k, k, W/k, k]."""
    axes = len(kernel)
    for axis, step in zip(range(x.ndim - axes, x.ndim), kernel, strict=True):
        if not isinstance(x.shape[axis], int) or x.shape[axis] % step:
            x = x.narrow(axis, 0, x.shape[axis] // step * step)
    for axis, step in zip(range(-1, -axes - 1, -1), reversed(kernel), strict=True):
        place = axis * 2 + 1  # behind it, each axis has become two
        x = x.unflatten(place, (x.shape[place] // step, step))
    within = list(range(-2 * axes + 1, 0, 2))
    best = x == x.amax(within, keepdim=True)
    count = torch.Size(kernel).numel()
    order = torch.arange(count, 0, -1, dtype=x.dtype, device=x.device).reshape(kernel)
    for axis in range(-2, -2 * axes, -2):
        order = order.unsqueeze(axis)
    rank = best * order
    return rank == rank.amax(within, keepdim=True)


def _each(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * axes if len(values) == 1 else values


def _strides(stride: int | Sequence[int] | None, kernel: tuple[int, ...]) -> tuple[int, ...]:
    return kernel if stride is None or stride == [] else _each(stride, len(kernel))
