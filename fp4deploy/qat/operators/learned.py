"""A static amax that is trained: where an activation is worth clipping, the loss says so.

The global scale of a tensor is S = A / (6 * 448), and the largest scale of a block is 448 S = A / 6: whatever lies in a
block whose amax exceeds A is quantised with the scale A / 6 and saturates at A. Below that the scale of a block follows
the block, and A changes only how it is rounded. With s = A / 6 the output of a saturated block is q = s round(x / s),
and straight through the rounding

    dq / dA  =  (q - x) / A        where |x| <= A                (its step grows with A)
             =  q / A = +-1        where x is clipped            (it moves with A)
             =  0                  in every other block

summed over the tensor and divided by the root of its number of elements, so that the gradient of one scalar does not
drown those of the weights when all are clipped together. x has the gradient of any static scale: 0 where it is clipped.

A block format needs this less than a format with one scale for a tensor: an outlier costs its own block of 16, and A
can only trade that against the range left for the scales of small blocks.

Sources: Choi et al., "PACT: Parameterized Clipping Activation for Quantized Neural Networks", 2018, for the clipped
part; Esser et al., "Learned Step Size Quantization", 2020, for the step and the normalisation of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.quantize.dispatch import mask_gradient
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.qat.recipes import QuantSpec

SMALLEST = 1e-6  # an amax of 0 would have no scale


class _FakeQuantizeLearned(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, amax: torch.Tensor, spec: QuantSpec, axis: int, groups: int) -> torch.Tensor:
        quantized, in_range = quantize_operand(x, spec, (axis,), amax, (groups,))
        ctx.save_for_backward(in_range, _slope(x, quantized, amax, axis, groups))
        ctx.strides, ctx.axis = quantized.stride(), axis
        return quantized

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_range, slope = ctx.saved_tensors
        gradient = gradients[0]
        damax = (gradient.float() * slope.float()).sum() / slope.numel() ** 0.5
        dx = mask_gradient(gradient, in_range, ctx.strides, ctx.axis) if ctx.needs_input_grad[0] else None
        return dx, damax, None, None, None


def fake_quantize_learned(
    x: torch.Tensor, spec: QuantSpec, axis: int, amax: torch.Tensor, groups: int = 1
) -> torch.Tensor:
    """Fake-quantise `x` in 1-D blocks along `axis` with a static amax that has a gradient.

    Args:
        amax: float32 [], positive.
        groups: groups of the axis that blocks do not cross.

    Returns:
        x' in the dtype of `x`, the values of `ste.fake_quantize` with the same amax.
    """
    if not torch.is_grad_enabled():
        return quantize_operand(x, spec, (axis,), amax, (groups,))[0]
    quantized: torch.Tensor = _FakeQuantizeLearned.apply(x, amax, spec, axis, groups)
    return quantized


@torch.no_grad()
def keep_positive(amaxes: Iterable[torch.Tensor]) -> None:
    """Hold learned amaxes above zero, after a step of the optimiser."""
    found = [amax.detach() for amax in amaxes]
    if found:
        torch._foreach_clamp_min_(found, SMALLEST)


def _slope(x: torch.Tensor, quantized: torch.Tensor, amax: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """dq / dA of every element, in the dtype of `x`."""
    amax = amax.to(torch.float32)
    values, q = x.to(torch.float32), quantized.to(torch.float32)
    moved = torch.where(values.abs() > amax, q, q - values) / amax
    return torch.where(_in_saturated_blocks(values.abs(), amax, axis, groups), moved, 0.0).to(x.dtype)


def _in_saturated_blocks(magnitude: torch.Tensor, amax: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """bool like `magnitude`: the element's block holds something larger than `amax`."""
    last = magnitude.movedim(axis, -1)
    grouped = last.unflatten(-1, (groups, last.shape[-1] // groups))
    channels = grouped.shape[-1]
    blocks = F.pad(grouped, (0, -channels % NVFP4_BLOCK)).unflatten(-1, (-1, NVFP4_BLOCK))
    beyond = (blocks.amax(-1, keepdim=True) > amax).expand_as(blocks)
    return beyond.flatten(-2)[..., :channels].flatten(-2).movedim(-1, axis)
