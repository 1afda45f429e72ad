"""The three GEMMs of a layer in one autograd function, each with operands quantised for it.

The forward quantises X and W along the input channels. The backward quantises again along other axes: G and W along
the output channels for dgrad, G and X along the tokens or pixels for wgrad (`gemms` has the table). Neither gradient
can reuse the forward's blocks, so autograd's own backward, which would, is replaced.

Bias gradients are sums, not GEMMs, and stay in high precision. Under autocast the backward GEMMs run in the precision
of the output, as autograd's would.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fp4deploy.formats.mxfp8 import fake_quantize_mxfp8
from fp4deploy.qat.operators.gemms import ConvGemms, LinearGemms, apply_to_batch, needed_gradients
from fp4deploy.qat.operators.quantizers import quantize_operand, shared_rotation
from fp4deploy.qat.operators.wgrad_operands import activation_operand, gradient_operands
from fp4deploy.qat.outliers import OutlierChannels, part_of, quantize_split, spread
from fp4deploy.qat.recipes import Recipe

Gemms = LinearGemms | ConvGemms


class _QuantizedGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemms: Gemms,
        recipe: Recipe,
        amax: torch.Tensor | None,
        outliers: OutlierChannels | None,
        own: torch.Tensor | None,
    ) -> torch.Tensor:
        if outliers is None:
            axes, groups = (gemms.input_axis,), (gemms.groups,)
            xq, in_range = quantize_operand(x, recipe.activation, axes, amax, groups, own=own)
        else:
            xq, in_range = quantize_split_input(x, gemms, recipe, outliers), None
        wq = quantize_forward_weight(weight, gemms, recipe, outliers)
        ctx.gemms, ctx.recipe, ctx.strides, ctx.outliers = gemms, recipe, xq.stride(), outliers
        ctx.save_for_backward(xq if recipe.reuses_activation else x, wq if recipe.reuses_weight else weight, in_range)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        if wq.dtype != xq.dtype:  # a forward with FP16 activations that runs without autocast
            wq, bias = wq.to(xq.dtype), None if bias is None else bias.to(xq.dtype)
        return gemms.forward(xq, wq, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, in_range = ctx.saved_tensors
        gemms, recipe, (needs_dx, needs_dw, *_) = ctx.gemms, ctx.recipe, ctx.needs_input_grad
        plain = not (recipe.wgrad_gradient or recipe.wgrad_activation)
        together = needs_dw and not plain and ctx.outliers is None
        rotations = [shared_rotation(spec, gradient.device) for spec in (recipe.dgrad_gradient, recipe.wgrad_gradient)]
        by_channels, by_width = gradient_operands(gradient, x.shape, gemms, recipe, needs_dx, together, rotations)

        def wgrad() -> torch.Tensor:
            if plain:
                return gemms.plain_wgrad(gradient, x, weight)
            if ctx.outliers is not None:
                return _split_wgrad(gradient, x, weight, gemms, recipe, ctx.outliers)
            rows = activation_operand(x, gradient, gemms, recipe, rotations[1])
            return gemms.wgrad(by_width, rows, weight)

        dgrad = partial(_dgrad, by_channels, weight, x, gemms, recipe, rotations[0])
        return *needed_gradients(ctx, gradient, dgrad, wgrad, in_range), None


def quantized_gemms(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gemms: Gemms,
    recipe: Recipe,
    amax: torch.Tensor | None = None,
    outliers: OutlierChannels | None = None,
    own: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y of a layer, its forward, dgrad and wgrad GEMMs quantised by `recipe`.

    Args:
        x: [..., C] for a linear layer; [N, C, H, W] or [C, H, W] for a convolution, with its own spatial axes.
        weight, bias: the layer's own; bias may be None.
        amax: static global amax of `x`, float32 [], where the recipe's activation is static.
        outliers: input channels in MXFP8, of a layer with one group.
        own: the amax of `x`, float32 [], where what wrote it found it; of channels that are not finite, nothing counts.
    """
    return apply_to_batch(
        x, gemms, lambda batch: _QuantizedGemms.apply(batch, weight, bias, gemms, recipe, amax, outliers, own)
    )


def quantize_split_input(x: torch.Tensor, gemms: Gemms, recipe: Recipe, outliers: OutlierChannels) -> torch.Tensor:
    """X of the forward with its outlier channels in MXFP8."""
    axis = gemms.input_axis
    return quantize_split(x, axis, outliers, lambda part: quantize_operand(part, recipe.activation, (axis,))[0])


def quantize_forward_weight(
    weight: torch.Tensor, gemms: Gemms, recipe: Recipe, outliers: OutlierChannels | None
) -> torch.Tensor:
    """W of the forward, with its outlier channels in MXFP8 where there are some."""
    axes, groups = gemms.weight_axes, gemms.weight_groups
    if outliers is None:
        return quantize_operand(weight, recipe.weight, axes, None, groups)[0]
    return quantize_split(weight, axes[1], outliers, lambda part: quantize_operand(part, recipe.weight, axes)[0])


def _dgrad(
    g: torch.Tensor,
    weight: torch.Tensor,
    x: torch.Tensor,
    gemms: Gemms,
    recipe: Recipe,
    rotation: torch.Tensor | None,
) -> torch.Tensor:
    axes, groups = gemms.weight_axes[::-1], gemms.weight_groups[::-1]
    w, _ = quantize_operand(weight, recipe.dgrad_weight, axes, None, groups, rotation)
    return gemms.dgrad(g, w.to(g.dtype), x)


def _split_wgrad(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    gemms: Gemms,
    recipe: Recipe,
    outliers: OutlierChannels,
) -> torch.Tensor:
    """The wgrad whose outlier channels are a GEMM of MXFP8 operands, the others one of FP4."""
    channels, axes = weight.shape[gemms.weight_axes[1]], (gemms.wgrad_axis,)
    rows, columns = gemms.wgrad_gradient(gradient, x.shape), gemms.wgrad_input(x, gradient.shape).to(gradient.dtype)
    g, _ = quantize_operand(rows, recipe.wgrad_gradient, axes)
    fine, _ = quantize_operand(part_of(columns, channels, outliers.others), recipe.wgrad_activation, axes)
    dw = gemms.wgrad(g, spread(fine, channels, outliers.others), weight)
    coarse = fake_quantize_mxfp8(part_of(columns, channels, outliers.chosen), axes[0])
    return dw + gemms.wgrad(fake_quantize_mxfp8(rows, axes[0]), spread(coarse, channels, outliers.chosen), weight)
