"""The three GEMMs of every layer in float64, from operands that are packed, unpacked and multiplied out here.

Convolutions are written as sums over taps of slices, with no convolution, no unfold and no autograd: `patches` cuts
what each output pixel sees of an image, `scatter` is its adjoint. A layer's `Gradients` are those of one batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.formats import (
    quantize_fp8,
    quantize_int8,
    quantize_ms_eden,
    quantize_mxfp4,
    quantize_mxfp8,
    quantize_nvfp4,
    random_hadamard,
)
from fp4deploy.qat import QuantSpec, Recipe
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.plan import eight_bits

Pair = tuple[int, int]
PLAIN = Recipe("plain")


@dataclass(frozen=True)
class Gradients:
    y: torch.Tensor
    dx: torch.Tensor
    dw: torch.Tensor
    db: torch.Tensor | None


def blocked(t: torch.Tensor, spec: QuantSpec | None, amax: torch.Tensor | None = None) -> torch.Tensor:
    """Quantise and dequantise [..., R, K] in float32 along the last axis; returned in float64."""
    if spec is None:
        return t.double()
    t = t.float()
    if spec.rounding == "ms_eden":
        return quantize_ms_eden(t.contiguous(), 0, 0).dequantize().double()
    if spec.hadamard:
        t = random_hadamard(t.contiguous())
    if spec.format == "mxfp8":
        return quantize_mxfp8(t.contiguous(), spec.scale_rule).dequantize().double()
    if spec.format == "mxfp4":
        return quantize_mxfp4(t.contiguous(), spec.scale_rule, spec.rounding).dequantize().double()
    a = t.abs().max() if amax is None else amax
    q = quantize_nvfp4(t.contiguous(), spec.block, a, four_over_six=spec.four_over_six, rounding=spec.rounding)
    return q.dequantize().double()


def saturated(t: torch.Tensor, spec: QuantSpec | None, amax: torch.Tensor | None) -> torch.Tensor:
    """Where |x * e| > 6 under a static scale, [..., K]; nowhere under a dynamic one."""
    if spec is None or spec.scale == "dynamic":
        return torch.zeros(t.shape, dtype=torch.bool)
    q = quantize_nvfp4(t.float().contiguous(), amax=amax, four_over_six=spec.four_over_six)
    e = 1 / (q.scales.float() * (1 / (torch.tensor(6.0 * q.e4m3_max) / q.amax)))
    return (t.float() * e.repeat_interleave(16, -1)[..., : t.shape[-1]]).abs() > 6


def taps(kernel: Pair) -> Iterator[Pair]:
    return ((i, j) for i in range(kernel[0]) for j in range(kernel[1]))


def window(tap: Pair, grid: Pair, stride: Pair, dilation: Pair) -> tuple[slice, slice]:
    starts = [t * d for t, d in zip(tap, dilation, strict=True)]
    rows, columns = (
        slice(start, start + s * (size - 1) + 1, s) for start, s, size in zip(starts, stride, grid, strict=True)
    )
    return rows, columns


def patches(image: torch.Tensor, kernel: Pair, grid: Pair, stride: Pair, dilation: Pair) -> torch.Tensor:
    """[..., H, W] -> [..., taps, pixels]."""
    cut = [image[(..., *window(tap, grid, stride, dilation))].flatten(-2) for tap in taps(kernel)]
    return torch.stack(cut, -2)


def scatter(values: torch.Tensor, size: Pair, kernel: Pair, grid: Pair, stride: Pair, dilation: Pair) -> torch.Tensor:
    """[..., taps, pixels] -> [..., H, W], the adjoint of `patches`."""
    image = torch.zeros(*values.shape[:-2], *size, dtype=values.dtype)
    for index, tap in enumerate(taps(kernel)):
        image[(..., *window(tap, grid, stride, dilation))] += values[..., index, :].unflatten(-1, grid)
    return image


def linear(layer: nn.Linear, recipe: Recipe, x: torch.Tensor, g: torch.Tensor, amax: torch.Tensor | None) -> Gradients:
    weight, tokens, rows = layer.weight.detach(), x.flatten(0, -2), g.flatten(0, -2)
    xq, wq = blocked(tokens, recipe.activation, amax), blocked(weight, recipe.weight)
    reused = recipe.double_quantization
    w_back = wq.float() if reused else weight
    x_back = xq.float() if reused else tokens
    w_plain, x_plain = (weight.double(), tokens.double()) if recipe.original_operands else (wq, xq)
    w2 = w_plain if recipe.dgrad_weight is None else blocked(w_back.T, recipe.dgrad_weight).T
    x2 = x_plain.T if recipe.wgrad_activation is None else blocked(x_back.T, recipe.wgrad_activation)
    dx = blocked(rows, recipe.dgrad_gradient) @ w2
    dx = dx.masked_fill(saturated(tokens, recipe.activation, amax), 0)
    y = xq @ wq.T
    y = y if layer.bias is None else y + layer.bias.detach().double()
    dw = blocked(rows.T, recipe.wgrad_gradient) @ x2.T
    return Gradients(y.view(g.shape), dx.view(x.shape), dw, rows.double().sum(0))


def convolution(
    layer: nn.Conv2d | nn.ConvTranspose2d,
    recipe: Recipe,
    x: torch.Tensor,
    g: torch.Tensor,
    amax: torch.Tensor | None,
) -> Gradients:
    """[N, C, H, W] and [N, O, H', W']; a convolution's padding is already in `x`, a transposed one's added to `g`."""
    transposed, groups = isinstance(layer, nn.ConvTranspose2d), layer.groups
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    if transposed:
        vertical, horizontal = layer.padding
        g = F.pad(g, (horizontal, horizontal, vertical, vertical))
    large, small = (g, x) if transposed else (x, g)
    size, grid = tuple(large.shape[2:]), tuple(small.shape[2:])
    geometry = (kernel, grid, stride, dilation)

    def channels(t: torch.Tensor) -> torch.Tensor:  # [N, g, H, W, C / g]
        return t.unflatten(1, (groups, -1)).movedim(2, -1)

    pointwise = {*kernel, *stride} == {1} and layer.padding in ("same", "valid", (0, 0)) and size == grid

    def over_pixels(t: torch.Tensor, spec: QuantSpec | None) -> torch.Tensor:
        """[..., H', W'] -> [..., pixels], quantised along rows; of a pointwise convolution along all pixels."""
        return blocked(t.flatten(-2), spec) if pointwise else blocked(t, spec).flatten(-2)

    def patches_over_pixels(t: torch.Tensor, spec: QuantSpec | None) -> torch.Tensor:
        """[..., H, W] -> [..., taps, pixels]: each column of the filter has blocks of its own, along rows."""
        if pointwise:
            return over_pixels(t, spec).unsqueeze(-2)
        wide = blocked(
            torch.stack([t[..., window((0, at), grid, stride, dilation)[1]] for at in range(kernel[1])]), spec
        )
        cut = [wide[at][..., window((row, 0), grid, stride, dilation)[0], :].flatten(-2) for row, at in taps(kernel)]
        return torch.stack(cut, -2)

    # [g, taps, out, in], whichever axis holds the groups.
    weight = layer.weight.detach().flatten(2).unflatten(0, (groups, -1))
    order = (0, 3, 2, 1) if transposed else (0, 3, 1, 2)
    weight = weight.permute(order)
    xq, wq = blocked(channels(x), recipe.activation, amax), blocked(weight, recipe.weight)
    w_back = wq.float() if recipe.double_quantization else weight
    x_values = xq.movedim(-1, 2).flatten(1, 2).float()
    reused = recipe.wgrad_activation is None and not recipe.original_operands
    x_back = x_values if recipe.double_quantization or reused else x
    w_plain = weight.double() if recipe.original_operands else wq
    w2 = w_plain if recipe.dgrad_weight is None else blocked(w_back.mT, recipe.dgrad_weight).mT
    gq = blocked(channels(g), recipe.dgrad_gradient).movedim(-1, 2)
    if transposed:
        product = torch.einsum("gtoc,nghwc->ngothw", wq, xq).flatten(-2)
        y = scatter(product.flatten(1, 2), size, *geometry)
        y = y[:, :, vertical : size[0] - vertical, horizontal : size[1] - horizontal]
        dx = torch.einsum("gtoc,ngotp->ngcp", w2, patches(gq, *geometry)).flatten(1, 2).unflatten(-1, grid)
        dw = torch.einsum(
            "ngcp,ngotp->gcot",
            over_pixels(x_back.unflatten(1, (groups, -1)), recipe.wgrad_activation),
            patches_over_pixels(g.unflatten(1, (groups, -1)), recipe.wgrad_gradient),
        )
    else:
        y = torch.einsum("gtoc,ngctp->ngop", wq, patches(xq.movedim(-1, 2), *geometry)).flatten(1, 2)
        y = y.unflatten(-1, grid)
        product = torch.einsum("gtoc,ngop->ngctp", w2, gq.flatten(-2))
        dx = scatter(product.flatten(1, 2), size, *geometry)
        dw = torch.einsum(
            "ngop,ngctp->goct",
            over_pixels(g.unflatten(1, (groups, -1)), recipe.wgrad_gradient),
            patches_over_pixels(x_back.unflatten(1, (groups, -1)), recipe.wgrad_activation),
        )
    mask = saturated(channels(x), recipe.activation, amax).movedim(-1, 2).flatten(1, 2)
    db = g.double().sum((0, 2, 3))
    if layer.bias is not None:
        y = y + layer.bias.detach().double().view(-1, 1, 1)
    return Gradients(y, dx.masked_fill(mask, 0), dw.reshape(layer.weight.shape), db)


def padded(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """The image that a convolution without padding would see, by the layer's documentation."""
    if layer.padding == "valid":
        return x
    if layer.padding == "same":
        total = [d * (k - 1) for k, d in zip(layer.kernel_size, layer.dilation, strict=True)]
        (top, bottom), (left, right) = ((t // 2, t - t // 2) for t in total)
    else:
        (top, left), (bottom, right) = layer.padding, layer.padding
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, (left, right, top, bottom), mode)


# of what eight bits hold; beyond these numbers of scales it is clipped, half a step after the largest
QUANTIZERS: dict[str, Any] = {"fp8": (quantize_fp8, -464, 464), "int8": (quantize_int8, -128.5, 127.5)}


def reference(layer: nn.Module, recipe: Recipe, x: torch.Tensor, g: torch.Tensor) -> Gradients:
    """Y, dX, dW and db of a quantised layer for its input and the gradient of its output."""
    amax = getattr(layer, "input_amax", None)
    amax = None if amax is None else amax.float()
    x, g = x.detach(), g.detach()
    if isinstance(layer, QuantizedLayer) and eight_bits(layer.recipe):
        return in_eight_bits(layer, x, g, amax)
    if isinstance(layer, nn.Linear):
        return linear(layer, recipe, x, g, amax)
    single = x.ndim == 3
    if single:
        x, g = x[None], g[None]
    if isinstance(layer, nn.ConvTranspose2d):
        found = convolution(layer, recipe, x, g, amax)
        dx = found.dx
    else:
        source = x.double().requires_grad_()
        image = padded(layer, source)
        found = convolution(layer, recipe, image.detach(), g, amax)
        (dx,) = torch.autograd.grad(image, source, found.dx)
    y, dx = (t[0] if single else t for t in (found.y, dx))
    return Gradients(y, dx, found.dw, found.db)


def in_eight_bits(layer: QuantizedLayer, x: torch.Tensor, g: torch.Tensor, amax: torch.Tensor | None) -> Gradients:
    """Of a plain layer with both operands in FP8 or INT8; nothing passes where the input is clipped."""
    plain: Any = copy.deepcopy(layer)
    quantize, low, high = QUANTIZERS[layer.recipe.activation.format]
    plain.recipe = PLAIN
    weight = layer.weight.detach()
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    plain.weight.data = quantize(weight.float(), axis).dequantize(torch.float64)
    quantized = quantize(x.float(), amax=amax)
    found = reference(plain, PLAIN, quantized.dequantize(torch.float64), g)
    steps = x.float() / quantized.scale
    inside = (low <= steps) & (steps <= high)
    return Gradients(found.y, found.dx * inside, found.dw, found.db)


def one_step(model: nn.Module, x: torch.Tensor) -> tuple[Gradients, torch.Tensor]:
    """What a Sequential of one layer gives for `x`, and the gradient of the output it was given."""
    y = model(x)
    upstream = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype)
    y.backward(upstream)
    layer = model[0]  # type: ignore[index]
    assert x.grad is not None
    return Gradients(
        y.detach(), x.grad, layer.weight.grad, layer.bias.grad if layer.bias is not None else None
    ), upstream


def check(found: Gradients, expected: Gradients, tolerance: float) -> None:
    for name in ("y", "dx", "dw", "db"):
        left, right = getattr(found, name), getattr(expected, name)
        if left is not None:
            assert left.shape == right.shape, name
            error = (left.double() - right).norm() / right.norm()
            assert error <= tolerance, f"{name} is off by {error:.2e}"
