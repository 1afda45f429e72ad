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
from fp4deploy.qat.operators.quantizers import quantize_operand, quantize_unfolded, shared_rotation, unfolds_by_kernel
from fp4deploy.qat.outliers import OutlierChannels, quantize_split, rows_of, spread
from fp4deploy.qat.recipes import QuantSpec, Recipe

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
    ) -> torch.Tensor:
        if outliers is None:
            xq, in_range = quantize_operand(x, recipe.activation, (gemms.input_axis,), amax, (gemms.groups,))
        else:
            xq, in_range = quantize_split_input(x, gemms, recipe, outliers), None
        wq = quantize_forward_weight(weight, gemms, recipe, outliers)
        ctx.gemms, ctx.recipe, ctx.strides, ctx.outliers = gemms, recipe, xq.stride(), outliers
        ctx.save_for_backward(xq if recipe.reuses_activation else x, wq if recipe.reuses_weight else weight, in_range)
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return gemms.forward(xq, wq, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, in_range = ctx.saved_tensors
        dgrad = partial(_dgrad, gradient, weight, x, ctx.gemms, ctx.recipe)
        wgrad = _wgrad if ctx.outliers is None else partial(_split_wgrad, outliers=ctx.outliers)
        return needed_gradients(
            ctx, gradient, dgrad, partial(wgrad, gradient, x, weight, ctx.gemms, ctx.recipe), in_range
        )


def quantized_gemms(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gemms: Gemms,
    recipe: Recipe,
    amax: torch.Tensor | None = None,
    outliers: OutlierChannels | None = None,
) -> torch.Tensor:
    """Y of a layer, its forward, dgrad and wgrad GEMMs quantised by `recipe`.

    Args:
        x: [..., C] for a linear layer; [N, C, H, W] or [C, H, W] for a convolution, with its own spatial axes.
        weight, bias: the layer's own; bias may be None.
        amax: static global amax of `x`, float32 [], where the recipe's activation is static.
        outliers: input channels in MXFP8, of a layer with one group.
    """
    return apply_to_batch(
        x, gemms, lambda batch: _QuantizedGemms.apply(batch, weight, bias, gemms, recipe, amax, outliers)
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


def _dgrad(gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, gemms: Gemms, recipe: Recipe) -> torch.Tensor:
    rotation = shared_rotation(recipe.dgrad_gradient, gradient.device)
    g, _ = quantize_operand(gradient, recipe.dgrad_gradient, (gemms.input_axis,), None, (gemms.groups,), rotation)
    axes, groups = gemms.weight_axes[::-1], gemms.weight_groups[::-1]
    w, _ = quantize_operand(weight, recipe.dgrad_weight, axes, None, groups, rotation)
    return gemms.dgrad(g, w.to(g.dtype), x)


def _wgrad(gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gemms: Gemms, recipe: Recipe) -> torch.Tensor:
    if not (recipe.wgrad_gradient or recipe.wgrad_activation):
        return gemms.plain_wgrad(gradient, x, weight)
    rotation = shared_rotation(recipe.wgrad_gradient, gradient.device)
    g = _rows(gradient, x, recipe.wgrad_gradient, gemms, True, gradient.dtype, rotation)
    rows = _rows(x, gradient, recipe.wgrad_activation, gemms, False, gradient.dtype, rotation)
    return gemms.wgrad(g, rows, weight)


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
    fine, _ = quantize_operand(rows_of(columns, channels, outliers.others), recipe.wgrad_activation, axes)
    dw = gemms.wgrad(g, spread(fine, channels, outliers.others), weight)
    coarse = fake_quantize_mxfp8(rows_of(columns, channels, outliers.chosen), axes[0])
    return dw + gemms.wgrad(fake_quantize_mxfp8(rows, axes[0]), spread(coarse, channels, outliers.chosen), weight)


def _rows(
    operand: torch.Tensor,
    other: torch.Tensor,
    spec: QuantSpec | None,
    gemms: Gemms,
    is_gradient: bool,
    dtype: torch.dtype,
    rotation: torch.Tensor | None,
) -> torch.Tensor:
    """G or X as rows over tokens or pixels, quantised, of `dtype`; on a GPU not unfolded in memory before it is."""
    unfolds = gemms.unfolds_gradient if is_gradient else gemms.unfolds_input
    if unfolds and isinstance(gemms, ConvGemms) and spec is not None and unfolds_by_kernel(operand, spec):
        return quantize_unfolded(operand, spec, gemms.unfolding(other.shape[2:]), dtype)
    rows = (gemms.wgrad_gradient if is_gradient else gemms.wgrad_input)(operand, other.shape)
    return quantize_operand(rows, spec, (gemms.wgrad_axis,), rotation=rotation)[0].to(dtype)
