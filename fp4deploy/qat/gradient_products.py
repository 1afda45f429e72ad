"""The three products of a layer in one differentiable function, each with its own quantised operands.

The forward quantises X and W along the input channels. The backward quantises afresh along other axes: G and W along
the output channels, G and X along the tokens or pixels (`products` has the table). So neither gradient can reuse the
forward's blocks, and autograd's own backward, which would, is replaced.

Bias gradients are sums, not products, and stay in high precision. Under autocast the backward products run in the
precision of the output, as autograd's would.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.plugins.quantize.dispatch import mask_gradient
from fp4deploy.qat.products import ConvProduct, LinearProduct
from fp4deploy.qat.quantizers import quantize_operand
from fp4deploy.qat.recipes import Recipe

Product = LinearProduct | ConvProduct


class _QuantizedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        product: Product,
        recipe: Recipe,
        amax: torch.Tensor | None,
    ) -> torch.Tensor:
        xq, inside = quantize_operand(x, recipe.activation, (product.input_axis,), amax, (product.groups,))
        wq, _ = quantize_operand(weight, recipe.weight, product.weight_axes, None, product.weight_groups)
        ctx.product, ctx.recipe, ctx.strides = product, recipe, xq.stride()
        again = recipe.double_quantization
        ctx.save_for_backward(
            xq if again or recipe.wgrad_activation is None else x,
            wq if again or recipe.dgrad_weight is None else weight,
            inside,
        )
        ctx.dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return product.forward(xq, wq, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = gradients
        x, weight, inside = ctx.saved_tensors
        product, (x_dtype, weight_dtype, bias_dtype) = ctx.product, ctx.dtypes
        dx = dw = db = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient(gradient, weight, x, product, ctx.recipe).to(x_dtype)
            dx = dx if inside is None else mask_gradient(dx, inside, ctx.strides, product.input_axis)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(gradient, x, weight, product, ctx.recipe).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            db = product.bias_gradient(gradient).to(bias_dtype)
        return dx, dw, db, None, None, None


def quantized_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    product: Product,
    recipe: Recipe,
    amax: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y of a layer, its forward and backward products quantised by `recipe`.

    Args:
        x: [..., C] for a linear product; [N, C, H, W] or [C, H, W] for a convolution.
        weight, bias: the layer's own; bias may be None.
        amax: static global amax of `x`, float32 [], where the recipe's activation is static.
    """
    single = x.ndim == (3 if isinstance(product, ConvProduct) else 1)
    y: torch.Tensor = _QuantizedProduct.apply(x[None] if single else x, weight, bias, product, recipe, amax)
    return y[0] if single else y


def _input_gradient(
    gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor, product: Product, recipe: Recipe
) -> torch.Tensor:
    g, _ = quantize_operand(gradient, recipe.dgrad_gradient, (product.input_axis,), None, (product.groups,))
    axes, groups = product.weight_axes[::-1], product.weight_groups[::-1]
    w, _ = quantize_operand(weight, recipe.dgrad_weight, axes, None, groups)
    return product.input_gradient(g, w.to(g.dtype), x)


def _weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, product: Product, recipe: Recipe
) -> torch.Tensor:
    if not (recipe.wgrad_gradient or recipe.wgrad_activation):
        return product.plain_weight_gradient(gradient, x, weight)
    axes = (product.wgrad_axis,)
    g, x = product.wgrad_operands(gradient, x)
    g, _ = quantize_operand(g, recipe.wgrad_gradient, axes)
    x, _ = quantize_operand(x, recipe.wgrad_activation, axes)
    return product.weight_gradient(g.to(gradient.dtype), x.to(gradient.dtype), weight)
