"""Straight-through estimator around NVFP4 fake-quantisation.

Rounding has zero gradient almost everywhere; the estimator passes the gradient through as if it were the identity.
With a dynamic global scale an element exceeds 6 only by the rounding of its block's scale, and the gradient is the
plain identity. With a static scale an element whose |x * e| exceeds 6 is clipped to the largest value
of its block, its output no longer depends on it, and its gradient is 0.

Source: Bengio, Leonard, Courville, "Estimating or Propagating Gradients Through Stochastic Neurons", 2013.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.formats import fake_quantize_nvfp4


class _FakeQuantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, axes: tuple[int, ...], amax: torch.Tensor | None) -> torch.Tensor:
        quantized, inside = fake_quantize_nvfp4(x, axes, amax)
        if amax is not None:
            ctx.save_for_backward(inside)
        return quantized

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (gradient,) = gradients
        return (gradient * ctx.saved_tensors[0] if ctx.saved_tensors else gradient), None, None


def fake_quantize(x: torch.Tensor, axes: tuple[int, ...], amax: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise and dequantise `x` along its contraction `axes`, differentiable straight through.

    Args:
        x: any shape, floating point.
        axes: one axis for 1-D blocks, two for 16 x 16 blocks.
        amax: float32 [], static global amax (clipped gradient), or None for the amax of `x` (identity gradient).
    """
    quantized: torch.Tensor = _FakeQuantize.apply(x, axes, amax)
    return quantized
