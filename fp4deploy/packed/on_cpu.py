"""Convolutions of activations that are decoded already, as the network runs them on a CPU.

The numbers are those of the reference (`plugins.gemm.reference`) up to the rounding of a sum: torch adds the bias. On a
small network every call of torch counts, so there are few.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.packed.graph import Conv2d, ConvTranspose2d
from fp4deploy.packed.operators import channels_last
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference


def convolution(
    node: Conv2d | ConvTranspose2d, sources: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Feature maps [N, H, W, C_i], concatenated along C -> [N, O, OH, OW] in channels_last.

    Args:
        node: one that has a kernel for packed operands (`network.has_kernel`).
        weight: as the file has it, [O, KH, KW, C].
        sources, weight, bias: float32; bias [O].
    """
    if not all(weight.shape) or not all(all(x.shape) for x in sources):
        return _empty(node, sources, weight, bias)
    joined = sources[0] if len(sources) == 1 else torch.cat(sources, -1)
    x = joined.permute(0, 3, 1, 2)
    if isinstance(node, ConvTranspose2d):
        y = F.conv_transpose2d(x, weight.permute(3, 0, 1, 2), bias, 2)
    else:
        y = F.conv2d(x, weight.permute(0, 3, 1, 2), bias, node.stride, node.padding, node.dilation)
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
        place = (node.stride[0], node.padding[0], node.dilation[0])
        y = conv2d_reference(tuple(sources), weight, bias, *place, node.relu, torch.float32)
    empty: torch.Tensor = y.permute(0, 3, 1, 2)
    return empty
