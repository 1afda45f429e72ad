"""The three GEMMs of a layer on packed operands, as one autograd function: what `backward_gemms` emulates.

What the backward keeps of the activation:

    recipe and layer                                     kept                                     bits an element
    double_quantization                                  X packed for the forward                 4.5 (MXFP4: 4.25)
    Linear, ConvTranspose2d, Conv of one tap, stride 1   X packed for the wgrad                   4.5 (4.25)
    any other convolution                                X as it came                             16 or 32

The wgrad of a convolution with several taps quantises the activation once for each column of the filter
(`ConvGemms.widen`), 13.5 bits an element for three. There X is kept as it came, usually the tensor that the activation
function before it keeps anyway. Gradients are packed when they arrive
and dropped after their GEMM.

For the same seeds codes are those of the emulation. Random numbers are drawn in its order, except that an activation
which is packed in the forward and rounded stochastically is drawn there.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from fp4deploy.qat.fp4_gemms import dispatch
from fp4deploy.qat.fp4_gemms.operands import PackedOperand, pack_operand, required
from fp4deploy.qat.fp4_gemms.outliers import SplitGemms
from fp4deploy.qat.fp4_gemms.reference import Gemms
from fp4deploy.qat.operators.gemms import apply_to_batch, needed_gradients
from fp4deploy.qat.operators.quantizers import quantize_operand, shared_rotation
from fp4deploy.qat.outliers import OutlierChannels
from fp4deploy.qat.recipes import Recipe
from fp4deploy.tracing import not_compiled


class _PackedGemms(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gemms: Gemms,
        recipe: Recipe,
        amax: torch.Tensor | None,
        recording: bool,
    ) -> torch.Tensor:
        dtype = output_dtype(x)
        packed = pack_operand(x, required(recipe.activation), (gemms.input_axis,), amax, (gemms.groups,))
        filters = pack_operand(weight, required(recipe.weight), gemms.weight_axes, None, gemms.weight_groups)
        with torch.autocast(x.device.type, enabled=False):
            y = dispatch.fprop(packed, filters, bias, gemms, dtype)
        if recording:
            ctx.x_shape, ctx.gemms, ctx.recipe = x.shape, gemms, recipe
            _keep(ctx, x, weight, packed, filters, amax, y.shape)
            ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        in_range, *saved = ctx.saved_tensors
        weight, activation = saved[: ctx.counts], saved[ctx.counts :]
        gemms, recipe, (needs_dx, needs_dw, *_) = ctx.gemms, ctx.recipe, ctx.needs_input_grad
        along, across = required(recipe.dgrad_gradient), required(recipe.wgrad_gradient)
        turned, turned_too = (shared_rotation(spec, gradient.device) for spec in (along, across))
        by_channels = by_width = None
        if needs_dx:
            by_channels = pack_operand(gradient, along, (gemms.input_axis,), None, (gemms.groups,), turned)
        if needs_dw:
            rows = gemms.wgrad_gradient(gradient, ctx.x_shape)
            by_width = pack_operand(rows, across, (gemms.wgrad_axis,), rotation=turned_too)
        dgrad = partial(_dgrad, by_channels, weight, turned, gradient.dtype, ctx)
        wgrad = partial(_wgrad, by_width, gradient, activation, turned_too, ctx)
        return needed_gradients(ctx, gradient, dgrad, wgrad, in_range)


@not_compiled
def packed_gemms(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gemms: Gemms,
    recipe: Recipe,
    amax: torch.Tensor | None = None,
    outliers: OutlierChannels | None = None,
) -> torch.Tensor:
    """Y of a layer whose three GEMMs have packed FP4 operands; `backward_gemms.quantized_gemms` is its emulation.

    Args:
        x: [..., C] for a linear layer; [N, C, H, W] or [C, H, W] for a convolution, with its own spatial axes.
        weight, bias: the layer's own; bias may be None.
        recipe: one that `requirements.require_packed` accepts.
        amax: static global amax of `x`, float32 [], where the recipe's activation is static.
        outliers: input channels in MXFP8, of a layer with one group.
    """

    def run(batch: torch.Tensor) -> Any:
        if outliers is None:
            return _PackedGemms.apply(batch, weight, bias, gemms, recipe, amax, torch.is_grad_enabled())
        return SplitGemms.apply(batch, weight, bias, gemms, recipe, outliers, output_dtype(x))

    return apply_to_batch(x, gemms, run)


def _keep(
    ctx: Any,
    x: torch.Tensor,
    weight: torch.Tensor,
    packed: PackedOperand,
    filters: PackedOperand,
    amax: torch.Tensor | None,
    y_shape: torch.Size,
) -> None:
    """Save for the backward what the module's table says."""
    gemms, recipe, in_range = ctx.gemms, ctx.recipe, None
    if amax is not None:
        values, in_range = quantize_operand(x, recipe.activation, (gemms.input_axis,), amax, (gemms.groups,))
        ctx.strides = values.stride()
    ctx.packed = None
    kept: tuple[torch.Tensor, ...] = ()
    source: tuple[torch.Tensor, ...] = (weight,)
    if recipe.double_quantization:
        ctx.filters, source = filters.described(), filters.tensors()
    if not ctx.needs_input_grad[1]:
        pass
    elif recipe.double_quantization:
        ctx.packed, kept = packed.described(), packed.tensors()
    elif gemms.widens_input or required(recipe.wgrad_activation).rounding == "ms_eden":
        kept = (x,)  # a rotation is shared with the gradient, which is not there yet
    else:
        rows = gemms.wgrad_input(x, y_shape)
        operand = pack_operand(rows, required(recipe.wgrad_activation), (gemms.wgrad_axis,))
        ctx.packed, kept = operand.described(), operand.tensors()
    ctx.weight, ctx.counts = (weight.shape, weight.dtype), len(source)
    ctx.save_for_backward(in_range, *source, *kept)


def _dgrad(
    g: PackedOperand | None, saved: list[torch.Tensor], rotation: torch.Tensor | None, dtype: torch.dtype, ctx: Any
) -> torch.Tensor:
    """dX; `saved`: the weight, or with double quantisation that of the forward, packed."""
    gemms, recipe, double = ctx.gemms, ctx.recipe, ctx.recipe.double_quantization
    axes, groups = gemms.weight_axes[::-1], gemms.weight_groups[::-1]
    weight = ctx.filters.with_tensors(saved).dequantize(ctx.weight[1]) if double else saved[0]
    w = pack_operand(weight, required(recipe.dgrad_weight), axes, None, groups, rotation)
    assert g is not None
    return dispatch.dgrad(g, w, gemms, ctx.x_shape, dtype)


def _wgrad(
    g: PackedOperand | None, gradient: torch.Tensor, saved: list[torch.Tensor], rotation: torch.Tensor | None, ctx: Any
) -> torch.Tensor:
    """dW; `saved`: the activation as the module's table says."""
    gemms, recipe = ctx.gemms, ctx.recipe
    if ctx.packed is not None and not recipe.double_quantization:
        operand = ctx.packed.with_tensors(saved)
    else:
        x = ctx.packed.with_tensors(saved).dequantize(ctx.dtypes[0]) if recipe.double_quantization else saved[0]
        rows = gemms.wgrad_input(x, gradient.shape)
        operand = pack_operand(rows, required(recipe.wgrad_activation), (gemms.wgrad_axis,), rotation=rotation)
    assert g is not None
    return dispatch.wgrad(g, operand, gemms, ctx.weight[0], gradient.dtype)


def output_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype of torch's own layer: that of autocast, which leaves float64 alone, or of the input."""
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return x.dtype
