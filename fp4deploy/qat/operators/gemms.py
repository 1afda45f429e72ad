"""The three GEMMs of Linear, of convolutions and transposed ones, and the contraction axis of every operand.

A layer multiplies three times in a training step: the forward, the input gradient (dgrad) and the weight gradient
(wgrad). FP4 tensor cores share one block scale among 16 elements of the axis that the GEMM contracts, and each of the
three contracts another axis, so every operand is quantised once for each GEMM that reads it:

    layer             GEMM                           contracts             axis of the first    of the second
    Linear            Y  = X W^T                     input features        X -1                 W 1
                      dX = G W                       output features       G -1                 W 0
                      dW = G^T X                     tokens                G 0                  X 0
    Conv2d            Y  = X * W                     input channels        X 1 (NCHW)           W 1 (OIHW)
                      dX = G transposed-conv W       output channels       G 1                  W 0
                      dW = G^T unfold(X)             output pixels         G -1                 unfold(X) -1
    ConvTranspose2d   Y  = X transposed-conv W       input channels        X 1                  W 0 (IOHW)
                      dX = G * W                     output channels       G 1                  W 1
                      dW = X^T unfold(G)             input pixels          unfold(G) -1         X -1

Forward and dgrad of a convolution are implicit GEMMs: the contraction runs over channels and taps, and a block holds 16
channels of one tap. The wgrad is a GEMM over pixels. One of its operands is the unfolded (im2col) activation, one row
for each channel and tap; a block holds 16 pixels of that row, in row-major order within one image. Blocks are cut after
unfolding: a tap shifts the activation, and blocks cut before the shift would straddle the blocks of the other operand,
which no tensor core can multiply. The price is the memory of the unfolded activation, KH * KW times the original.

Conv1d, Conv3d and ConvTranspose3d are the same with one and with three spatial axes: X [N, C, L] and [N, C, D, H, W],
blocks along C.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fp4deploy.plugins.quantize.dispatch import mask_gradient
from fp4deploy.plugins.quantize.unfolded import Unfolding

Pair = tuple[int, int]
Sizes = tuple[int, ...]  # one a spatial axis


@dataclass(frozen=True)
class LinearGemms:
    """Y [..., O] = X [..., C] W [O, C]^T, and its gradients.

    >>> gemms = LinearGemms()
    >>> gemms.forward(torch.ones(2, 16), torch.ones(4, 16), None).shape
    torch.Size([2, 4])
    """

    groups: int = 1
    input_axis: int = -1
    weight_axes: Pair = (0, 1)
    weight_groups: Pair = (1, 1)
    wgrad_axis: int = 0
    summed: ClassVar[str] = "tokens"  # what the wgrad contracts, for messages

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Y [..., O]."""
        return F.linear(x, weight, bias)

    def dgrad(self, gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dX like `x`, from G [..., O] and W [O, C]."""
        return gradient @ weight

    def plain_wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW [O, C], from G and X as they are."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2).to(gradient.dtype)

    @property
    def unfolds_input(self) -> bool:
        """The wgrad reads X unfolded."""
        return False

    @property
    def unfolds_gradient(self) -> bool:
        """The wgrad reads G unfolded."""
        return False

    def wgrad_operands(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """G [tokens, O] and X [tokens, C]."""
        return self.wgrad_gradient(gradient, x.shape), self.wgrad_input(x, gradient.shape)

    def wgrad_gradient(self, gradient: torch.Tensor, x_shape: Sequence[int]) -> torch.Tensor:
        """G [tokens, O]."""
        return gradient.flatten(0, -2)

    def wgrad_input(self, x: torch.Tensor, gradient_shape: Sequence[int]) -> torch.Tensor:
        """X [tokens, C]."""
        return x.flatten(0, -2)

    def wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW [O, C], from the (quantised) operands of `wgrad_operands`."""
        return gradient.T @ x

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """db [O]."""
        return gradient.flatten(0, -2).sum(0)


@dataclass(frozen=True)
class ConvGemms:
    """Conv2d, or with `transposed` ConvTranspose2d: Y [N, O, H', W'] from X [N, C, H, W], and its gradients.

    Padding is with zeros. With one or three sizes each it is a Conv1d or Conv3d, X [N, C, L] or [N, C, D, H, W].
    """

    kernel: Sizes
    stride: Sizes
    padding: Sizes
    dilation: Sizes
    groups: int
    transposed: bool = False
    output_padding: Sizes = (0, 0)
    wgrad_axis: int = -1
    summed: ClassVar[str] = "pixels"

    @property
    def input_axis(self) -> int:
        """The channels, from the end, so that an input without a batch axis has them too."""
        return -1 - len(self.kernel)

    @property
    def weight_axes(self) -> Pair:
        """(output channels, input channels) of the weight."""
        return (1, 0) if self.transposed else (0, 1)

    @property
    def weight_groups(self) -> Pair:
        """Groups along each of `weight_axes`: a weight holds all groups along its first axis."""
        return (1, self.groups) if self.transposed else (self.groups, 1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Y [N, O, H', W']."""
        if self.transposed:
            places = (self.stride, self.padding, self.output_padding, self.groups, self.dilation)
            return _TRANSPOSED[len(self.kernel)](x, weight, bias, *places)
        return _CONVOLUTIONS[len(self.kernel)](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def dgrad(self, gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dX like `x` [N, C, H, W], from G [N, O, H', W'] and W."""
        return self.backward(gradient, x.to(gradient.dtype), weight, (True, False, False))[0]

    def plain_wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from G and X as they are."""
        return self.backward(gradient, x.to(gradient.dtype), weight.to(gradient.dtype), (False, True, False))[1]

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, output_mask: tuple[bool, bool, bool]
    ) -> Any:
        """(dX, dW, db) as torch computes them, those of the mask; None for the others."""
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            [gradient.shape[1]] if output_mask[2] else None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding if self.transposed else [0] * len(self.kernel),
            self.groups,
            output_mask,
        )

    def wgrad_operands(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """G and X as [N, rows, pixels]; the one with the larger height and width unfolded."""
        return self.wgrad_gradient(gradient, x.shape), self.wgrad_input(x, gradient.shape)

    @property
    def unfolds_input(self) -> bool:
        """The wgrad reads X unfolded: a row for each channel and tap, where a convolution has more than one tap."""
        pixelwise = {*self.kernel, *self.stride} == {1} and not any(self.padding)
        return not (self.transposed or pixelwise)

    @property
    def unfolds_gradient(self) -> bool:
        """The wgrad reads G unfolded: that of a transposed convolution."""
        return self.transposed

    def unfolding(self, grid: Sequence[int]) -> Unfolding:
        """How the wgrad of a Conv2d or ConvTranspose2d reads its unfolded operand; `grid`: sizes of the other one."""
        steps: Any = (self.kernel, self.stride, self.padding, self.dilation, tuple(grid))
        return Unfolding(*steps)

    def wgrad_gradient(self, gradient: torch.Tensor, x_shape: Sequence[int]) -> torch.Tensor:
        """G [N, rows, pixels]; of a transposed convolution unfolded."""
        return self._unfold(gradient, tuple(x_shape[2:])) if self.unfolds_gradient else gradient.flatten(2)

    def wgrad_input(self, x: torch.Tensor, gradient_shape: Sequence[int]) -> torch.Tensor:
        """X [N, rows, pixels]; of a convolution unfolded."""
        return self._unfold(x, tuple(gradient_shape[2:])) if self.unfolds_input else x.flatten(2)

    def wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from the (quantised) operands of `wgrad_operands`."""
        rows, unfolded = (x, gradient) if self.transposed else (gradient, x)
        rows = rows.unflatten(1, (self.groups, rows.shape[1] // self.groups))
        unfolded = unfolded.unflatten(1, (self.groups, unfolded.shape[1] // self.groups))
        return torch.einsum("ngrp,ngup->gru", rows, unfolded).reshape(weight.shape)

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """db [O]."""
        return gradient.sum((0, *range(2, gradient.ndim)))

    def _unfold(self, activation: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        """im2col: [N, channels * taps, pixels], cropped to `sizes`, the height and width of the other operand."""
        kernel = self.kernel
        if len(kernel) != 2:
            return self._unfold_taps(activation, sizes)
        unfolded = F.unfold(activation, kernel, self.dilation, self.padding, self.stride)
        extents = (
            size + 2 * padding - dilation * (taps - 1) - 1
            for size, padding, dilation, taps in zip(
                activation.shape[2:], self.padding, self.dilation, kernel, strict=True
            )
        )
        grid = tuple(extent // stride + 1 for extent, stride in zip(extents, self.stride, strict=True))
        height, width = sizes
        return unfolded.unflatten(-1, grid)[..., :height, :width].flatten(-2)

    def _unfold_taps(self, activation: torch.Tensor, grid: tuple[int, ...]) -> torch.Tensor:
        """`_unfold` for any number of spatial axes: one strided slice a tap, taps innermost within a channel."""
        padded = F.pad(activation, [edge for size in reversed(self.padding) for edge in (size, size)])
        steps = list(zip(self.stride, self.dilation, grid, strict=True))
        windows = []
        for taps in itertools.product(*(range(size) for size in self.kernel)):
            index: Any = (..., *(_window(tap, *step) for tap, step in zip(taps, steps, strict=True)))
            windows.append(padded[index])
        return torch.stack(windows, 2).flatten(3).flatten(1, 2)


_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED: dict[int, Any] = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


def _window(tap: int, stride: int, dilation: int, extent: int) -> slice:
    start = tap * dilation
    return slice(start, start + (extent - 1) * stride + 1, stride)


def apply_to_batch(x: torch.Tensor, gemms: LinearGemms | ConvGemms, run: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Y of X with a batch axis, or without one: [C] of a linear layer, [C, H, W] of a convolution with its own axes."""
    single = x.ndim == (1 + len(gemms.kernel) if isinstance(gemms, ConvGemms) else 1)
    y: torch.Tensor = run(x[None] if single else x)
    return y[0] if single else y


def needed_gradients(
    ctx: Any,
    gradient: torch.Tensor,
    dgrad: Callable[[], torch.Tensor],
    wgrad: Callable[[], torch.Tensor],
    in_range: torch.Tensor | None = None,
) -> tuple[torch.Tensor | None, ...]:
    """dX, dW and db in the types of X, W and b, those that autograd asks for, and None for four more arguments.

    ctx: with `gemms`, `dtypes` and, for the in-range mask, `strides` of the quantised X.
    """
    x_dtype, weight_dtype, bias_dtype = ctx.dtypes
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = dgrad().to(x_dtype)
        dx = dx if in_range is None else mask_gradient(dx, in_range, ctx.strides, ctx.gemms.input_axis)
    if ctx.needs_input_grad[1]:
        dw = wgrad().to(weight_dtype)
    if ctx.needs_input_grad[2]:
        db = ctx.gemms.bias_gradient(gradient).to(bias_dtype)
    return dx, dw, db, None, None, None, None
