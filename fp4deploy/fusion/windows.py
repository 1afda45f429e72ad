"""Depthwise convolutions and maximum pooling as shifted operands, which a compiler fuses with the layers around them.

A library's kernel reads and writes the feature map once more than necessary, and what follows it, such as a GELU and
the quantisation for the next layer, is a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.nn.functional as F

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.runtime.torch_library import operator

# So many terms are fused in seconds. 7x7 taps, in the 18 layers of a ConvNeXt, took more than two minutes of compiling
# (16 cores beside an H200, torch 2.11, 2026-11-28).
MAX_TAPS, MAX_POOL_TAPS = 9, 25


def depthwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """`x` [N, C, H, W] with filters [C, 1, KH, KW], one a channel: float32 [N, C, OH, OW] in channels_last."""
    filters = weight.flatten(1).t().contiguous().to(torch.float32)  # of each tap the channels are neighbours
    operator = torch.ops.fp4deploy.depthwise_conv2d
    found: torch.Tensor = operator(x, filters, weight.shape[2:], stride, padding, dilation)
    return found


def _fake_depthwise_conv2d(x, filters, taps, stride, padding, dilation):  # type: ignore[no-untyped-def]
    height, width = (output_size(*axis) for axis in zip(x.shape[2:], taps, stride, padding, dilation, strict=True))
    shape = (x.shape[0], height, width, x.shape[1])
    return torch.empty(shape, dtype=torch.float32, device=x.device).movedim(-1, 1)


@operator(
    "depthwise_conv2d(Tensor x, Tensor filters, int[] taps, int[] stride, int[] padding, int[] dilation) -> Tensor",
    _fake_depthwise_conv2d,
    "CompositeExplicitAutograd",
)
def elementary_depthwise_conv2d(
    x: torch.Tensor,
    filters: torch.Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> torch.Tensor:
    """What `depthwise_conv2d` stands for: a sum row by row of the filter; filters: float32 [taps, C]."""
    parts = _windows(x, taps, stride, padding, dilation, 0.0)
    products = (part.to(torch.float32) * row.view(-1, 1, 1) for part, row in zip(parts, filters, strict=True))
    pixels = reduce(torch.add, products).movedim(1, -1)
    return torch.ops.aten.clone.default(pixels, memory_format=torch.contiguous_format).movedim(-1, 1)


def max_pool2d(
    x: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """`x` [N, C, H, W] -> [N, C, OH, OW], the largest of each window, NaN where one is; sizes are rounded down."""
    return reduce(torch.maximum, _windows(x, kernel, stride, padding, dilation, float("-inf")))


def _windows(
    x: torch.Tensor,
    taps: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    value: float,
) -> Iterator[torch.Tensor]:
    """For each tap what it reads [N, C, OH, OW], row by row; padded with `value`."""
    padded = F.pad(x, (padding[1], padding[1], padding[0], padding[0]), value=value) if any(padding) else x
    height, width = (output_size(*axis) for axis in zip(x.shape[2:], taps, stride, padding, dilation, strict=True))
    for row in range(taps[0]):
        for column in range(taps[1]):
            top, left = dilation[0] * row, dilation[1] * column
            rows = torch.ops.aten.slice(padded, 2, top, top + stride[0] * (height - 1) + 1, stride[0])
            yield torch.ops.aten.slice(rows, 3, left, left + stride[1] * (width - 1) + 1, stride[1])
