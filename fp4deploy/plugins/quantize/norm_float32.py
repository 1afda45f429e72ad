"""GroupNorm + ReLU (+ pooling 2x2) of float32 feature maps on a CPU, in few operations and few passes over memory.

    d = x + bias - mean,   y = relu(gamma rstd d + beta),   the variance being the mean of d^2 over a group

Every step is rounded to float32. Kernels compute a fused a x + b of FP16 values, and their reference (`norm_pack`) does
so in float64; here is neither, and what the result is compared with is torch's GroupNorm.

torch's own kernel for channels_last is not used: it adds x and x^2 one after another, so that of 352 x 480 pixels its
rstd is off by 2e-5, and where the mean is 8 standard deviations, by 6e-4. Here the moments are off by 1e-7. What is off
by more moves codes of the next layer, and those the classes of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from fp4deploy.formats.scales import kept

PIECE = 1 << 18  # elements: temporaries that stay in a cache


def norm_relu(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
    pooled: Sequence[bool] = (False,),
) -> list[torch.Tensor]:
    """y, or the maximum of y over 2 x 2 pixels, for each of `pooled`.

    Args:
        x: float32 [N, H, W, C], contiguous; H and W even where something is pooled.
        bias, weight, beta: float32 [C], as `norm_pack.norm_relu_pack` takes them.
    """
    y = _normalized(x.flatten(1, 2), bias, weight, beta, groups, eps).view(x.shape)
    return [maximum_of_pixels(y) if each else y for each in pooled]


def maximum_of_pixels(y: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C] -> [N, H/2, W/2, C]."""
    rows = torch.maximum(y[:, ::2], y[:, 1::2])
    return torch.maximum(rows[:, :, ::2], rows[:, :, 1::2])


def _normalized(
    x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, beta: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """y of x [N, pixels, C]."""
    n, pixels, channels = x.shape
    count = pixels * channels // groups
    means = x.sum(1)
    if bias is not None:
        means.add_(bias, alpha=pixels)
    offset = _of_groups(means, groups, count)
    if bias is not None:
        offset = offset - bias
    y = torch.empty_like(x)
    step = max(1, PIECE // max(1, n * channels))
    outs = (y,) if pixels <= step else y.split(step, 1)
    parts = (x,) if pixels <= step else x.split(step, 1)
    squares = [_squares(torch.sub(part, offset, out=out)) for part, out in zip(parts, outs, strict=True)]
    variance = _of_groups(sum(squares[1:], squares[0]), groups, count)
    slope = variance.add_(kept(eps)).rsqrt_().mul_(weight)
    for out in outs:
        torch.addcmul(beta, slope, out, out=out).relu_()
    return y


def _squares(d: torch.Tensor) -> torch.Tensor:
    """The sum of d^2 over the pixels: [N, pixels, C] -> [N, C]."""
    return torch.mul(d, d).sum(1)  # not `square`, which torch computes as a power


def _of_groups(sums: torch.Tensor, groups: int, count: int) -> torch.Tensor:
    """Sums [N, C] over a group's channels, divided by its elements, at each of the channels: [N, 1, C]."""
    n, channels = sums.shape
    size = channels // groups
    return (sums.view(n * groups, size) @ _averaging(size, count)).view(n, 1, channels)


@lru_cache(maxsize=256)
def _averaging(size: int, count: int) -> torch.Tensor:
    """A matrix [size, size] whose product has the same sum in every column, divided by `count` elements (0: not)."""
    return torch.full((size, size), 1 / max(1, count), dtype=torch.float32)
