"""The three GEMMs of a layer with outlier channels: packed FP4 operands for the others, MXFP8 for those.

What `backward_gemms` emulates for `qat.outliers`. The GEMMs of the other channels are those of any recipe with double
quantisation. The chosen channels, a tenth by default, are multiplied by torch: their values are of MXFP8, in the dtype
of the activation. The dgrad is one FP4 GEMM of all channels.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.formats.mxfp8 import fake_quantize_mxfp8
from fp4deploy.qat.fp4_gemms import dispatch
from fp4deploy.qat.fp4_gemms.operands import pack_operand, required
from fp4deploy.qat.fp4_gemms.reference import Gemms
from fp4deploy.qat.operators.gemms import needed_gradients
from fp4deploy.qat.outliers import OutlierChannels
from fp4deploy.qat.recipes import Recipe


class SplitGemms(torch.autograd.Function):
    """Y of a layer of one group; see the module's page."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemms: Gemms,
        recipe: Recipe,
        outliers: OutlierChannels,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        axis, along = gemms.input_axis, gemms.weight_axes[1]
        packed = pack_operand(x.index_select(axis, outliers.others), required(recipe.activation), (axis,))
        filters = pack_operand(weight.index_select(along, outliers.others), required(recipe.weight), gemms.weight_axes)
        chosen = fake_quantize_mxfp8(x.index_select(axis, outliers.chosen), axis)
        fine = fake_quantize_mxfp8(weight.index_select(along, outliers.chosen), along)
        ctx.gemms, ctx.recipe, ctx.outliers = gemms, recipe, outliers
        ctx.x_shape, ctx.weight_shape = x.shape, weight.shape
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.packed, ctx.filters, ctx.counts = packed.described(), filters.described(), len(packed.tensors())
        ctx.save_for_backward(chosen, fine, *packed.tensors(), *filters.tensors())
        with torch.autocast(x.device.type, enabled=False):
            y: torch.Tensor = dispatch.fprop(packed, filters, bias, gemms, dtype)
            return y + gemms.forward(chosen.to(dtype), fine.to(dtype), None)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        chosen, fine, *saved = ctx.saved_tensors
        x_dtype, weight_dtype, _ = ctx.dtypes

        def dgrad() -> torch.Tensor:
            filters = ctx.filters.with_tensors(saved[ctx.counts :]).dequantize(weight_dtype)
            return _dgrad(gradient, filters, fine, ctx)

        def wgrad() -> torch.Tensor:
            return _wgrad(gradient, ctx.packed.with_tensors(saved[: ctx.counts]).dequantize(x_dtype), chosen, ctx)

        return needed_gradients(ctx, gradient, dgrad, wgrad)


def _dgrad(gradient: torch.Tensor, filters: torch.Tensor, fine: torch.Tensor, ctx: Any) -> torch.Tensor:
    gemms, recipe, outliers = ctx.gemms, ctx.recipe, ctx.outliers
    g = pack_operand(gradient, required(recipe.dgrad_gradient), (gemms.input_axis,))
    along, weight = gemms.weight_axes[1], filters.new_empty(ctx.weight_shape)
    weight.index_copy_(along, outliers.others, filters).index_copy_(along, outliers.chosen, fine)
    w = pack_operand(weight, required(recipe.dgrad_weight), gemms.weight_axes[::-1])
    return dispatch.dgrad(g, w, gemms, ctx.x_shape, gradient.dtype)


def _wgrad(gradient: torch.Tensor, x: torch.Tensor, chosen: torch.Tensor, ctx: Any) -> torch.Tensor:
    """dW; `x`, `chosen`: the other and the chosen channels of what the forward multiplied."""
    gemms, outliers, axis = ctx.gemms, ctx.outliers, ctx.gemms.wgrad_axis
    along, shape = gemms.weight_axes[1], list(ctx.weight_shape)
    dw = gradient.new_empty(shape)
    shape[along] = outliers.others.numel()
    dw.index_copy_(along, outliers.others, _packed_wgrad(gradient, x, torch.Size(shape), ctx).to(gradient.dtype))
    shape[along] = outliers.chosen.numel()
    rows = fake_quantize_mxfp8(gemms.wgrad_gradient(gradient, ctx.x_shape), axis)
    columns = fake_quantize_mxfp8(gemms.wgrad_input(chosen, gradient.shape).to(gradient.dtype), axis)
    return dw.index_copy_(along, outliers.chosen, gemms.wgrad(rows, columns, dw.new_empty(shape)))


def _packed_wgrad(gradient: torch.Tensor, x: torch.Tensor, shape: torch.Size, ctx: Any) -> torch.Tensor:
    gemms, axes = ctx.gemms, (ctx.gemms.wgrad_axis,)
    of_gradient, of_input = required(ctx.recipe.wgrad_gradient), required(ctx.recipe.wgrad_activation)
    g = pack_operand(gemms.wgrad_gradient(gradient, ctx.x_shape), of_gradient, axes)
    operand = pack_operand(gemms.wgrad_input(x, gradient.shape), of_input, axes)
    return dispatch.wgrad(g, operand, gemms, shape, gradient.dtype)
