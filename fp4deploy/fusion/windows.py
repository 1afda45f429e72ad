"""Depthwise convolutions and maximum pooling as shifted operands, which a compiler fuses with the layers around them.

A library's kernel reads and writes the feature map once more than necessary, and cuDNN's for channels_last are far from
the time of memory: 20 us for 7x7 taps on [1, 96, 128, 128] in FP16, of which memory explains 2 (cuDNN 9 of torch 2.11,
one H200, 2026-11-28, +-5 %).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce

import torch
import torch.nn.functional as F

MAX_TAPS = 49


def depthwise_conv2d(
    x: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """`x` [N, C, H, W] with filters [C, 1, KH, KW], one a channel: float32 [N, C, OH, OW], summed row by row."""
    channels, _, *taps = weight.shape
    filters = weight.flatten(1).t().contiguous().to(torch.float32)  # of each tap the channels are neighbours
    parts = _windows(x, taps, stride, padding, dilation, 0.0)
    products = (part.to(torch.float32) * row.view(channels, 1, 1) for part, row in zip(parts, filters, strict=True))
    return reduce(torch.add, products)


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
    height, width = (
        (size - step * (count - 1) - 1) // by + 1
        for size, step, count, by in zip(padded.shape[2:], dilation, taps, stride, strict=True)
    )
    for row in range(taps[0]):
        for column in range(taps[1]):
            top, left = dilation[0] * row, dilation[1] * column
            rows = padded[:, :, top : top + stride[0] * (height - 1) + 1 : stride[0]]
            yield rows[..., left : left + stride[1] * (width - 1) + 1 : stride[1]]
