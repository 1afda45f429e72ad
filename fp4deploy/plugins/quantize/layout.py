"""The memory layout of a tensor, seen along its contraction axis: (outer, K, inner).

    row-major [N, C, H, W], C        outer N       K = C   inner H W
    channels_last, C                 outer N H W   K = C   inner 1     volumes: outer N D H W
    row-major [O, I, KH, KW], O      outer 1       K = O   inner I KH KW

The kernels process elements in memory order. Rows of a packed tensor, row-scaled amaxes and random numbers are in the
logical order of the axes. Where the two differ, or the tensor is not dense in memory, it is copied first.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import nn

from fp4deploy.formats import NVFP4_BLOCK

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}  # by number of axes


def place(model: nn.Module, device: torch.device, layout: torch.memory_format) -> nn.Module:
    """Move a model, in place; parameters and buffers that `layout` is not for keep theirs, unlike by `Module.to`."""
    model.to(device)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if layout == torch.contiguous_format or CHANNELS_LAST.get(tensor.ndim) == layout:
                tensor.data = tensor.data.contiguous(memory_format=layout)
    return model


def is_channels_last(x: torch.Tensor) -> bool:
    """Whether images or volumes are dense in memory with their channels innermost."""
    return x.ndim in CHANNELS_LAST and x.is_contiguous(memory_format=CHANNELS_LAST[x.ndim])


@dataclass(frozen=True)
class View:
    """A dense tensor as (outer, K, inner) in memory.

    in_order: rows in memory are rows in the logical order of the axes.
    """

    outer: int
    size: int
    inner: int
    in_order: bool

    def groups(self, block: int) -> int:
        """Groups of 16 along K, padded to `block`."""
        return -(-self.size // block) * (block // NVFP4_BLOCK)

    @property
    def rows(self) -> int:
        """Rows along K."""
        return self.outer * self.inner


def view_along(x: torch.Tensor, axis: int) -> View | None:
    """The view of `x` along `axis`; None where it is not dense in memory, or its axes have another order."""
    if x.is_contiguous():
        order = list(range(x.ndim))
    elif is_channels_last(x):
        order = [0, *range(2, x.ndim), 1]
    else:
        return None
    place = order.index(axis)
    sizes = [x.shape[at] for at in order]
    others = order[:place] + order[place + 1 :]
    sorted_others = others == sorted(others)
    return View(prod(sizes[:place]), sizes[place], prod(sizes[place + 1 :]), sorted_others)


def dense(x: torch.Tensor, axis: int, in_order: bool) -> tuple[torch.Tensor, View]:
    """`x` or a row-major copy of it, and its view; with `in_order` its rows lie in the logical order of the axes."""
    view = view_along(x, axis)
    if view is None or (in_order and not view.in_order):
        x = x.contiguous()
        view = view_along(x, axis)
    assert view is not None
    return x, view
