"""Convolutions of activations that are decoded already, as the network runs them on a CPU.

The numbers are those of the reference (`plugins.gemm.reference`) up to the rounding of a sum: torch adds the bias. On a
small network every call of torch counts, so there are few.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.packed.graph import Conv2d, ConvTranspose2d
from fp4deploy.packed.operators import channels_last
from fp4deploy.plugins.gemm.reference import (
    CONVOLUTIONS,
    TRANSPOSED,
    conv2d_reference,
    conv_transpose2d_reference,
)


def convolution(
    node: Conv2d | ConvTranspose2d, sources: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Feature maps [N, H, W, C_i] or volumes, concatenated along C -> [N, O, OH, OW] in channels_last.

    Args:
        node: one that has a kernel for packed operands (`network.has_kernel`).
        weight: as the file has it, [O, taps, C].
        sources, weight, bias: float32; bias [O].
    """
    if not all(weight.shape) or not all(all(x.shape) for x in sources):
        return _empty(node, sources, weight, bias)
    joined = sources[0] if len(sources) == 1 else torch.cat(sources, -1)
    x = joined.movedim(-1, 1)
    if isinstance(node, ConvTranspose2d):
        y = TRANSPOSED[x.ndim - 2](x, weight.movedim(-1, 0), bias, node.stride)
    else:
        y = CONVOLUTIONS[x.ndim - 2](x, weight.movedim(-1, 1), bias, node.stride, node.padding, node.dilation)
        if node.relu:
            y = y.relu_()
    return channels_last(y)


def _empty(
    node: Conv2d | ConvTranspose2d, sources: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A sum of nothing, or nothing: torch refuses some of these."""
    y: Any
    if isinstance(node, ConvTranspose2d):
        y = conv_transpose2d_reference(sources[0], weight, bias, False, torch.float32)
    else:
        place = (node.stride, node.padding, node.dilation)
        y = conv2d_reference(tuple(sources), weight, bias, *place, node.relu, torch.float32)
    empty: torch.Tensor = y.movedim(-1, 1)
    return empty
