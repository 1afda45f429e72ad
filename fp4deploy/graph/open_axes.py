"""Axes of open size divided into as many parts as the code says, in operators whose bounds follow from the size.

    F.adaptive_avg_pool2d(x, 3)     for i in 0, 1, 2: mean of the rows  i H // 3  to  -(-(i + 1) H // 3)
    torch.tensor_split(x, 3, 2)     part i: rows  i (H // 3) + min(i, H mod 3)  to  those of i + 1
    torch.chunk(x, 3, 2)            part i: rows  i c  to  (i + 1) c,  c = -(-H // 3)

torch.export decides how long each part of `tensor_split` is by the example's size, and torch's ONNX exporter computes
the windows of an adaptive pooling from it: at any other size the graph is of another network, which nothing says.

`divided` writes the slices in place of the calls while a module is traced. A window of an adaptive pooling is its rows
times its columns, so that one axis after the other is reduced. Axes of fixed size stay as they are called, but for
maxima, which torch's ONNX exporter does not know. `chunk` gives fewer parts at a size of at most (parts - 1)^2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.graph.replacement import Function, Table

_AVERAGES = {getattr(F, f"adaptive_avg_pool{axes}d"): axes for axes in (1, 2, 3)}
_MAXIMA = {getattr(F, f"adaptive_max_pool{axes}d"): axes for axes in (1, 2, 3)}
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)
_CHUNKS = (torch.chunk, torch.Tensor.chunk)
Size = Any  # int or torch.SymInt


def divided(pools: bool = True) -> Table:
    """By this table `Rewriting` divides axes of open size by slices.

    Args:
        pools: adaptive poolings, too, for a graph that has no node of them; `interpolate(mode="area")` is one.

    >>> from fp4deploy.graph.replacement import Rewriting
    >>> x = torch.rand(1, 2, 7, 8)
    >>> with Rewriting(divided()):
    ...     y = F.adaptive_max_pool2d(x, 3)
    >>> torch.equal(y, F.adaptive_max_pool2d(x, 3))
    True
    """
    found: dict[object, Function] = {**dict.fromkeys(_SPLITS, _split), **dict.fromkeys(_CHUNKS, _chunks)}
    if pools:
        found |= {function: partial(_pooled, torch.mean, axes) for function, axes in _AVERAGES.items()}
        found |= {function: partial(_pooled, torch.amax, axes) for function, axes in _MAXIMA.items()}
        found[F.interpolate] = _area
    return {function: partial(_or_call, parts) for function, parts in found.items()}


def _or_call(parts: Function, call: Function, *args: object, **kwargs: object) -> object:
    found = parts(*args, **kwargs)
    return call(*args, **kwargs) if found is None else found


def _pooled(
    reduce: Callable[..., torch.Tensor],
    axes: int,
    input: torch.Tensor,
    output_size: Any,
    return_indices: bool = False,
) -> torch.Tensor | None:
    """The adaptive pooling of the last axes; None where it stays a call."""
    counts = [output_size] * axes if isinstance(output_size, int) else list(output_size)  # None: as many as there are
    fixed = reduce is torch.mean and not any(isinstance(size, torch.SymInt) for size in input.shape[-axes:])
    if return_indices or fixed or any(isinstance(count, torch.SymInt) for count in counts) or set(counts) == {1}:
        return None
    for at, count in enumerate(counts):
        if count is None:
            continue
        axis = input.ndim - axes + at
        size = input.shape[axis]
        bounds = [(place * size // count, -(-(place + 1) * size // count)) for place in range(count)]
        input = torch.cat([reduce(part, axis, keepdim=True) for part in _slices(input, axis, bounds)], axis)
    return input


def _area(
    input: torch.Tensor,
    size: object = None,
    scale_factor: object = None,
    mode: str = "nearest",
    *_: object,
    **__: object,
) -> torch.Tensor | None:
    """An average over areas is an adaptive pooling; None where the number of areas depends on the size."""
    if mode != "area" or size is None:
        return None
    return _pooled(torch.mean, input.ndim - 2, input, size)


def _split(input: torch.Tensor, indices_or_sections: object = None, dim: int = 0, **named: object) -> object:
    """Parts whose sizes differ by one at most; None where the axis has a fixed size, or bounds are given."""
    count = named.get("sections", indices_or_sections)
    size = input.shape[dim]
    if not isinstance(count, int) or not isinstance(size, torch.SymInt):
        return None
    starts = [place * (size // count) + torch.sym_min(place, size % count) for place in range(count)]
    return tuple(_slices(input, dim, list(zip(starts, [*starts[1:], None], strict=True))))


def _chunks(input: torch.Tensor, chunks: int, dim: int = 0) -> object:
    size = input.shape[dim]
    if not isinstance(size, torch.SymInt):
        return None
    starts = [place * -(-size // chunks) for place in range(chunks)]
    return tuple(_slices(input, dim, list(zip(starts, [*starts[1:], None], strict=True))))


def _slices(x: torch.Tensor, axis: int, bounds: Sequence[tuple[Size, Size | None]]) -> list[torch.Tensor]:
    index: list[Any] = [slice(None)] * x.ndim

    def part(start: Size, end: Size | None) -> torch.Tensor:
        index[axis] = slice(start, end)
        return x[tuple(index)]

    return [part(*each) for each in bounds]
