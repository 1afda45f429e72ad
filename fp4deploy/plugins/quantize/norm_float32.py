"""GroupNorm + ReLU (+ pooling 2x2) of float32 feature maps on a CPU, in few operations and few passes over memory.

    d = x + bias - mean,   y = relu(gamma rstd d + beta),   the variance being the mean of d^2 over a group

Every step is rounded to float32. Kernels compute a fused a x + b of FP16 values, and their reference (`norm_pack`) does
so in float64; here is neither, and what the result is compared with is torch's GroupNorm.

torch's own kernel for channels_last takes the place of a dozen operations where it is exact to 3e-6. It adds x and x^2
one after another: of 352 x 480 pixels its rstd is off by 2e-5, and where the mean is 8 standard deviations, by 6e-4. So
it gets few pixels only, and what it found is discarded where the mean is far from 0. Then, as of all other feature
maps, the moments are off by 1e-7.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

PIECE = 1 << 18  # elements: temporaries that stay in a cache
FEW = 1 << 15  # pixels that torch's kernel may add where the mean is 0; fewer farther from it
NEAR = 3.0  # standard deviations of the mean from 0 that torch's kernel may have


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
    few = x.numel() > 0 and x.shape[1] * x.shape[2] <= FEW
    y = _by_torch(x if bias is None else x + bias, weight, beta, groups, eps) if few else None
    if y is None:
        y = _normalized(x.flatten(1, 2), bias, weight, beta, groups, eps).view(x.shape)
    return [maximum_of_pixels(y) if each else y for each in pooled]


def maximum_of_pixels(y: torch.Tensor) -> torch.Tensor:
    """[N, H, W, C] -> [N, H/2, W/2, C]."""
    rows = torch.maximum(y[:, ::2], y[:, 1::2])
    return torch.maximum(rows[:, :, ::2], rows[:, :, 1::2])


def _by_torch(
    x: torch.Tensor, weight: torch.Tensor, beta: torch.Tensor, groups: int, eps: float
) -> torch.Tensor | None:
    n, height, width, channels = x.shape
    y, mean, rstd = torch.native_group_norm(
        x.permute(0, 3, 1, 2), weight, beta, n, channels, height * width, groups, eps
    )
    near = mean.mul_(rstd).abs_().amax().item()
    if not near <= NEAR or height * width * (1 + near * near) > FEW:  # also with a NaN
        return None
    return y.relu_().permute(0, 2, 3, 1).contiguous()


def _normalized(
    x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, beta: torch.Tensor, groups: int, eps: float
) -> torch.Tensor:
    """y of x [N, pixels, C]."""
    n, pixels, channels = x.shape
    means = x.sum(1).div_(max(1, pixels))
    offset = _of_groups(means if bias is None else means.add_(bias), groups)
    if bias is not None:
        offset = offset - bias
    y = torch.empty_like(x)
    step = max(1, PIECE // max(1, n * channels))
    outs = (y,) if pixels <= step else y.split(step, 1)
    parts = (x,) if pixels <= step else x.split(step, 1)
    squares = [torch.sub(part, offset, out=out).square().sum(1) for part, out in zip(parts, outs, strict=True)]
    variance = _of_groups(sum(squares[1:], squares[0]).div_(max(1, pixels)), groups)
    slope = variance.add_(eps).rsqrt_().mul_(weight)
    for out in outs:
        torch.addcmul(beta, slope, out, out=out).relu_()
    return y


def _of_groups(values: torch.Tensor, groups: int) -> torch.Tensor:
    """The mean of a group's channels at each of them: [N, C] -> [N, 1, C]."""
    n, channels = values.shape
    grouped = values.view(n, groups, channels // groups)
    return grouped.mean(2, keepdim=True).expand_as(grouped).reshape(n, 1, channels)
