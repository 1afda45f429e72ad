"""Straight-through estimator around fake-quantisation.

Rounding has zero gradient almost everywhere; the estimator passes the gradient through as if it were the identity.
With a dynamic global scale an element exceeds 6 only by the rounding of its block's scale, and the gradient is the
plain identity. With a static scale an element whose |x * e| exceeds 6 is clipped to the largest value
of its block, its output no longer depends on it, and its gradient is 0.

Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.plugins.quantize.dispatch import mask_gradient
from fp4deploy.qat.operators.quantizers import quantize_and_measure, quantize_operand
from fp4deploy.qat.recipes import QuantSpec


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        spec: QuantSpec,
        axes: tuple[int, ...],
        amax: torch.Tensor | None,
        groups: tuple[int, ...],
    ) -> torch.Tensor:
        quantized, in_range = quantize_operand(x, spec, axes, amax, groups)
        if in_range is not None:
            ctx.save_for_backward(in_range)
            ctx.strides, ctx.axis = quantized.stride(), axes[-1]
        return quantized

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: checkpointing without reentrance unpacks a tensor a single time
        gradient = mask_gradient(gradients[0], saved[0], ctx.strides, ctx.axis) if saved else gradients[0]
        return gradient, None, None, None, None


class _FakeQuantizeAndMeasure(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        spec: QuantSpec,
        axes: tuple[int, ...],
        amax: torch.Tensor,
        groups: tuple[int, ...],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        quantized, in_range, largest = quantize_and_measure(x, spec, axes, amax, groups)
        ctx.save_for_backward(in_range)
        ctx.strides, ctx.axis = quantized.stride(), axes[-1]
        ctx.mark_non_differentiable(largest)
        return quantized, largest

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (in_range,) = ctx.saved_tensors
        return mask_gradient(gradients[0], in_range, ctx.strides, ctx.axis), None, None, None, None


def fake_quantize(
    x: torch.Tensor,
    spec: QuantSpec | None,
    axes: tuple[int, ...],
    amax: torch.Tensor | None = None,
    groups: tuple[int, ...] = (1,),
) -> torch.Tensor:
    """`quantizers.quantize_operand`, differentiable straight through; `x` itself where `spec` is None.

    Args:
        amax: float32 [], static global amax (clipped gradient), or None for the amax of `x` (identity gradient).
    """
    if spec is None:
        return x
    if not (x.requires_grad and torch.is_grad_enabled()):
        return quantize_operand(x, spec, axes, amax, groups)[0]
    quantized: torch.Tensor = _FakeQuantize.apply(x, spec, axes, amax, groups)
    return quantized


def fake_quantize_and_measure(
    x: torch.Tensor, spec: QuantSpec | None, axes: tuple[int, ...], amax: torch.Tensor, groups: tuple[int, ...] = (1,)
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fake_quantize` with a static amax, and the finite amax of `x` itself, float32 [], from the same pass."""
    assert spec is not None
    if not (x.requires_grad and torch.is_grad_enabled()):
        quantized, _, largest = quantize_and_measure(x, spec, axes, amax, groups)
        return quantized, largest
    both: tuple[torch.Tensor, torch.Tensor] = _FakeQuantizeAndMeasure.apply(x, spec, axes, amax, groups)
    return both
