"""GroupNorm as an affine map whose statistics a compiler takes.

    a, b = group_norm_map(x, bias, weight, beta, groups, eps)        x [N, pixels, C] -> float32 [N, C] each
    y = a x + b

The kernels of `plugins.quantize.statistics` read a feature map at the bandwidth of memory, and then combine its parts
in a second launch. What is small lies in the cache, and its time is that of launches: there Inductor's reductions, one
to three kernels, are as fast or faster (`packed.writer.LARGE_MAP`).
"""

from __future__ import annotations

import torch


def group_norm_map(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """a and b of GroupNorm(x + bias); bias, weight and beta float32 [C]."""
    shape = (groups, x.shape[-1] // groups)
    values = x.to(torch.float32).view(*x.shape[:2], *shape)
    weight, beta = weight.view(shape), beta.view(shape)
    shift = torch.zeros_like(beta) if bias is None else bias.view(shape)
    variance, mean = torch.var_mean(values if bias is None else values + shift, (1, 3), correction=0)
    a = weight * (variance + eps).rsqrt()[..., None]
    b = a * (shift - mean[..., None]) + beta
    return a.flatten(1), b.flatten(1)
