"""Cutting a tensor into blocks along its contraction axis, and into pieces that fit a CPU's cache.

A block axis of size K becomes (ceil(K / B), B), the missing elements zero. The tensor is viewed, never transposed: NCHW
blocks along C are [N, C/16, 16, H, W].

Elementwise torch code is bound by memory unless its temporaries stay in the cache; `pieces` cuts along an axis that no
block crosses, and the reference runs piece by piece. Same arithmetic, same bytes, ten times the speed on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError

PIECE = 1 << 20
QUANTIZABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def require_quantizable(x: object, name: str) -> None:
    """Refuse what has no values that the format `name` could round.

    Raises:
        InputError: no tensor, a sparse or nested one, or a dtype that is not floating point of 16 to 64 bits.
    """
    if not isinstance(x, torch.Tensor):
        raise InputError(f"{name} quantises tensors, not {type(x).__name__}. Make one: torch.as_tensor(x)")
    if x.dtype not in QUANTIZABLE:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in QUANTIZABLE)
        raise InputError(f"{name} quantises floating-point tensors ({known}), not {x.dtype}.")
    if not torch.compiler.is_compiling() and (x.layout != torch.strided or x.is_nested):
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise InputError(f"{name} quantises dense tensors, not {kind} ones. Convert it: x.to_dense()")


def normalized_axis(x: torch.Tensor, axis: int) -> int:
    """`axis` counted from the front.

    Raises:
        InputError: `x` has no such axis.
    """
    if not -x.ndim <= axis < x.ndim:
        raise InputError(f"A tensor of {x.ndim} axes has no axis {axis}.")
    return axis % x.ndim


def pad_to_blocks(x: torch.Tensor, axes: tuple[int, ...], block: int = 16) -> torch.Tensor:
    """Pad with zeros to a multiple of `block` along `axes` (0 or more); `x` itself where nothing is missing."""
    if all(x.shape[axis] % block == 0 for axis in axes):
        return x
    widths = [0] * (2 * x.ndim)
    for axis in axes:
        widths[2 * (x.ndim - 1 - axis) + 1] = -x.shape[axis] % block
    return F.pad(x, widths)


def split_blocks(x: torch.Tensor, axes: tuple[int, ...], block: int = 16) -> torch.Tensor:
    """View each of `axes` (sizes multiples of `block`) as (blocks, block)."""
    for axis in sorted(axes, reverse=True):
        x = x.unflatten(axis, (x.shape[axis] // block, block))
    return x


def inner_axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Where `split_blocks` puts the axes inside a block."""
    return tuple(axis + 1 + order for order, axis in enumerate(sorted(axes)))


def join_blocks(blocks: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Undo `split_blocks`."""
    for axis in sorted(axes):
        blocks = blocks.flatten(axis, axis + 1)
    return blocks


def crop(x: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undo `pad_to_blocks`."""
    return x if x.shape == shape else x[tuple(slice(size) for size in shape)]


def piece_axis(x: torch.Tensor, axes: tuple[int, ...]) -> int:
    """The axis to cut `x` along: the outermost in memory that no block crosses, if there is one."""
    free = [axis for axis in range(x.ndim) if axis not in axes]
    if torch.compiler.is_compiling():  # one piece, never cut; the tracer has no `max` with a key
        return free[0] if free else 0
    return max(free or range(x.ndim), key=lambda axis: (x.shape[axis] > 1, x.stride(axis)))


def pieces(
    x: torch.Tensor, cut: int, axes: tuple[int, ...], block: int, *others: torch.Tensor | None
) -> Iterator[tuple[Any, ...]]:
    """Yield `x` and `others` in corresponding views of about `PIECE` elements, cut along `cut` at whole blocks.

    A CUDA tensor, a small one and one being traced is one piece. What is None, has no axes or has size 1 along `cut`
    stays whole; sizes padded to blocks are cut like unpadded ones.
    """
    size = x.shape[cut]
    # Whether it is traced comes first: asked for its size, a tensor of a free batch would bound the batch of the trace.
    if torch.compiler.is_compiling() or x.device.type != "cpu" or x.numel() <= PIECE:
        yield (x, *others)
        return
    unit = block if cut in axes else 1
    step = max(unit, PIECE * size // x.numel() // unit * unit)
    for start in range(0, size, step):
        yield (
            x.narrow(cut, start, min(step, size - start)),
            *(_narrow(other, cut, start, step) for other in others),
        )


def _narrow(other: torch.Tensor | None, cut: int, start: int, step: int) -> torch.Tensor | None:
    if other is None or other.ndim == 0 or other.shape[cut] == 1:
        return other
    return other.narrow(cut, start, min(step, other.shape[cut] - start))
