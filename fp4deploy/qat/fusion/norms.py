"""Layers written out for fusion: normalisation that tells its moments, and resizing that repeats pixels.

y = act(w (x - mean) rstd + b) is monotone in x within a channel, also with every operation rounded. So the amax of y
follows from the largest and smallest x of each channel, which the kernel that computes the moments finds while it reads
x. Without this a quantiser with the current amax would read the feature map once more.

A compiler contracts a * b + c in one kernel and not in another, and torch's own BatchNorm has yet another order, so
this amax may differ from that of y in the last places. Too small an amax takes the gradient from the largest element,
which then lies beyond it: in 75 of 100 random tensors for an amax one ulp below, in 24 for the exact one (its scale is
rounded too), in none for one ulp above. Hence a margin upwards.

GroupNorm and InstanceNorm are written out for channels_last: moments of each channel and image first, groups combined
from them, and a backward in closed form with two sums. torch reshapes to [1, N C, H, W], which is a transposed copy.
BatchNorm is torch's own operator, with its running statistics.
"""

from __future__ import annotations

from typing import Any

import torch

Moments = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
MARGIN = 1 + 2**-21  # of an amax from moments, about four ulps


@torch.compiler.allow_in_graph
def batch_norm(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    momentum: float,
    eps: float,
) -> Moments:
    """(y, mean, rstd) of `F.batch_norm` in training; the moments are [1, C, 1, ...]."""
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, running_mean, running_var, True, momentum, eps)
    shape = (1, -1, *(1,) * (x.ndim - 2))
    return y, mean.detach().view(shape), rstd.detach().view(shape)


@torch.compiler.allow_in_graph
def group_norm(
    x: torch.Tensor, groups: int, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, widens: bool
) -> Moments:
    """(y, mean, rstd) of `F.group_norm`, or with a group a channel of `F.instance_norm`; moments are [N, C, 1, ...].

    widens: under autocast y is float32, as torch has it for GroupNorm.
    """
    dtype = torch.float32 if widens and torch.is_autocast_enabled(x.device.type) else x.dtype
    result: Moments = _GroupNorm.apply(x, groups, weight, bias, eps, dtype)
    return result


@torch.compiler.allow_in_graph
def amax_of_norm(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    slope: float,
) -> torch.Tensor:
    """The largest finite magnitude of leaky_relu(y, slope) and a margin; y is the normalised `x`, in its dtype.

    slope: 0 for a ReLU, 1 where no activation follows.

    Returns:
        float32 [], no smaller than the amax of what is quantised and at most about eight ulps larger.
    """
    tensors = [None if each is None else each.detach() for each in (x, mean, rstd, weight, bias)]
    largest: torch.Tensor = torch.ops.fp4deploy.traced_norm_amax(*tensors, y.dtype, slope)
    return largest * MARGIN


@torch.compiler.allow_in_graph
def repeat_pixels(x: torch.Tensor, *factors: int) -> torch.Tensor:
    """`F.interpolate` to the nearest pixel by whole factors, one a spatial axis.

    Its gradient is a sum over the copies; that of torch's operator adds them with atomic operations once compiled.
    """
    last = x.movedim(1, -1)
    sizes = last.shape
    for axis in range(len(factors), 0, -1):
        last = last.unsqueeze(axis + 1)
    shape = [sizes[0], *(each for pair in zip(sizes[1:-1], factors, strict=True) for each in pair), sizes[-1]]
    whole = [size * factor for size, factor in zip(sizes[1:-1], factors, strict=True)]
    return last.expand(shape).reshape(sizes[0], *whole, sizes[-1]).movedim(-1, 1)


class _GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: int,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        dtype: torch.dtype,
    ) -> Moments:
        spatial = list(range(2, x.ndim))
        variance, mean = torch.var_mean(x.float(), spatial, correction=0, keepdim=True)
        if groups != x.shape[1]:
            channel = mean
            mean = _of_group(channel, groups)
            variance = _of_group(variance + (channel - mean).square(), groups)
        rstd = (variance + eps).rsqrt()
        y = _affine((x.float() - mean) * rstd, weight, bias).to(dtype)
        ctx.groups = groups
        ctx.save_for_backward(x, mean, rstd, weight)
        ctx.mark_non_differentiable(mean, rstd)
        return y, mean, rstd

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, mean, rstd, weight = ctx.saved_tensors
        spatial = list(range(2, x.ndim))
        gradient = gradients[0].float()
        normalized = (x.float() - mean) * rstd
        sums = gradient.sum(spatial, keepdim=True), (gradient * normalized).sum(spatial, keepdim=True)
        scale = _shaped(weight, x) if weight is not None else 1.0
        pixels = x[0, 0].numel()
        one, two = (_of_group(total * scale, ctx.groups) / pixels for total in sums)
        dx = (rstd * (gradient * scale - one - normalized * two)).to(x.dtype)
        dbias, dweight = (total.sum(0).flatten() if weight is not None else None for total in sums)
        return dx, None, dweight, dbias, None, None


def _of_group(values: torch.Tensor, groups: int) -> torch.Tensor:
    """The mean over the channels of each group, for every channel; [N, C, 1, ...]."""
    if groups == values.shape[1]:
        return values
    grouped = values.unflatten(1, (groups, values.shape[1] // groups))
    return grouped.mean(2, keepdim=True).expand_as(grouped).flatten(1, 2)


def _affine(normalized: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    if weight is not None:
        normalized = normalized * _shaped(weight, normalized)
    return normalized if bias is None else normalized + _shaped(bias, normalized)


def _shaped(parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return parameter.view(1, -1, *(1,) * (like.ndim - 2))
