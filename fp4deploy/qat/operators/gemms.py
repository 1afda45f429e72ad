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
                      dW = G^T widen(X)              output pixels         G -1                 widen(X) -1
    ConvTranspose2d   Y  = X transposed-conv W       input channels        X 1                  W 0 (IOHW)
                      dX = G * W                     output channels       G 1                  W 1
                      dW = X^T widen(G)              input pixels          widen(G) -1          X -1

Forward and dgrad of a convolution are implicit GEMMs: the contraction runs over channels and taps, and a block holds 16
channels of one tap. The wgrad is a GEMM over pixels, image by image and row by row; a block holds 16 pixels of one row
of a map, the last of a row padded with zeros. A tap shifts one of the operands against the other. By rows it moves
whole blocks. By columns it would make blocks straddle those of the other operand, which no tensor core can multiply:
so that operand is quantised once for each column of the filter, shifted before its blocks are cut (`ConvGemms.widen`).
The price is the memory of as many copies. A pointwise convolution has one tap, and its blocks run along all pixels of
an image.

Conv1d, Conv3d and ConvTranspose3d are the same with one and with three spatial axes: X [N, C, L] and [N, C, D, H, W],
blocks of the wgrad along the last.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.gemm.convolution import fastest
from fp4deploy.plugins.gemm.reference import CONVOLUTIONS, TRANSPOSED
from fp4deploy.plugins.quantize.dispatch import mask_gradient

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
    def widens_input(self) -> bool:
        """The wgrad reads X shifted."""
        return False

    @property
    def widens_gradient(self) -> bool:
        """The wgrad reads G shifted."""
        return False

    def wgrad_gradient(self, gradient: torch.Tensor, x_shape: Sequence[int]) -> torch.Tensor:
        """G [tokens, O]."""
        return gradient.flatten(0, -2)

    def wgrad_input(self, x: torch.Tensor, gradient_shape: Sequence[int]) -> torch.Tensor:
        """X [tokens, C]."""
        return x.flatten(0, -2)

    def wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW [O, C], from the (quantised) operands of `wgrad_gradient` and `wgrad_input`."""
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
            return TRANSPOSED[len(self.kernel)](x, weight, bias, *places)
        return CONVOLUTIONS[len(self.kernel)](x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def dgrad(self, gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dX like `x` [N, C, H, W], from G [N, O, H', W'] and W."""
        return self.backward(gradient, x.to(gradient.dtype), weight, (True, False, False))[0]

    def plain_wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from G and X as they are."""
        return self.backward(gradient, x.to(gradient.dtype), weight.to(gradient.dtype), (False, True, False))[1]

    def multiply(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """`forward` by the fastest kernel (`plugins.gemm.convolution.fastest`), without a gradient."""
        place, by_torch = self._place, partial(self.forward, x, weight, bias)
        if place is None or (self.transposed and (bias is not None or any(self.output_padding))):
            return by_torch()
        if self.transposed:
            return fastest.convolve_transposed(x, weight, place, by_torch)
        return fastest.convolve(x, weight, bias, place, by_torch)

    @property
    def _place(self) -> fastest.Place | None:
        """None of other than two axes."""
        if len(self.kernel) != 2:
            return None
        stride, padding, dilation = ((a, b) for a, b in self.steps[1:])
        return fastest.Place(stride, padding, dilation, self.groups)

    def backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, output_mask: tuple[bool, bool, bool]
    ) -> Any:
        """(dX, dW, db), those of the mask, each by the fastest kernel; None for the others."""
        place = self._place
        if place is None or not fastest.may_have_kernel(x, weight, place):  # one call is less for the host than two
            return self._backward(gradient, x, weight, output_mask)
        dx_by_torch, dw_by_torch = (
            lambda mask=mask: self._backward(gradient, x, weight, mask)[mask.index(True)]
            for mask in ((True, False, False), (False, True, False))
        )
        dx = dw = None
        if output_mask[0] and self.transposed:
            dx = fastest.convolve(gradient, weight, None, place, dx_by_torch)
        elif output_mask[0]:
            dx = fastest.convolve_transposed(gradient, weight, place, dx_by_torch)
        if output_mask[1]:
            operands = (x, gradient) if self.transposed else (gradient, x)
            dw = fastest.wgrad(*operands, weight, place, dw_by_torch)
        return dx, dw, self.bias_gradient(gradient) if output_mask[2] else None

    def _backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, output_mask: tuple[bool, bool, bool]
    ) -> Any:
        """As torch computes them."""
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

    @property
    def pixelwise(self) -> bool:
        """One tap at each pixel: pixels are rows of one matrix, in any order."""
        more = self.transposed and any(self.output_padding)
        return {*self.kernel, *self.stride} == {1} and not any(self.padding) and not more

    @property
    def widens_input(self) -> bool:
        """The wgrad reads X shifted by the taps of a filter: a convolution's, where there is more than one tap."""
        return not (self.transposed or self.pixelwise)

    @property
    def widens_gradient(self) -> bool:
        """The wgrad reads G shifted: that of a transposed convolution."""
        return self.transposed and not self.pixelwise

    def wgrad_gradient(self, gradient: torch.Tensor, x_shape: Sequence[int]) -> torch.Tensor:
        """G [N, O, ..., W']; of a transposed convolution widened; [N, O, pixels] of a pointwise one.

        Axes at the end on which neither map has a second position are left out: blocks run along the last other one.
        """
        gemms, gradient = self._without_ends(gradient, x_shape)
        if gemms.pixelwise:
            return gradient.flatten(2)
        return gemms.widen(gradient, x_shape[gradient.ndim - 1]) if gemms.transposed else gradient

    def wgrad_input(self, x: torch.Tensor, gradient_shape: Sequence[int]) -> torch.Tensor:
        """X [N, C, ..., W]; of a convolution widened; [N, C, pixels] of a pointwise one; axes as of G."""
        gemms, x = self._without_ends(x, gradient_shape)
        if gemms.pixelwise:
            return x.flatten(2)
        return x if gemms.transposed else gemms.widen(x, gradient_shape[x.ndim - 1])

    def _without_ends(self, x: torch.Tensor, other: Sequence[int]) -> tuple[ConvGemms, torch.Tensor]:
        gemms = self
        while len(gemms.kernel) > 1 and x.shape[-1] == 1 and gemms.kernel[-1] == 1 and not gemms.padding[-1]:
            if other[x.ndim - 1] != 1:
                break
            gemms, x = gemms.first(len(gemms.kernel) - 1), x[..., 0]
        return gemms, x

    def first(self, axes: int) -> ConvGemms:
        """This convolution on its first spatial axes."""
        kernel, stride, padding, dilation = (sizes[:axes] for sizes in self.steps)
        return replace(self, kernel=kernel, stride=stride, padding=padding, dilation=dilation)

    def widen(self, x: torch.Tensor, width: int) -> torch.Tensor:
        """X once for each column of the filter, shifted to where that column reads it.

        Args:
            x: [N, C, ..., W], the operand with the larger height and width.
            width: W' of the other operand.

        Returns:
            [N, columns * C, ..., W'], within each group the columns outermost. Element w' of column k is
            x[..., w' * stride - padding + k * dilation], 0 outside.
        """
        (columns, stride, padding, dilation), groups = (at[-1] for at in self.steps), self.groups
        last = (width - 1) * stride + (columns - 1) * dilation + 1 - padding  # that a column reads, and one
        padded = F.pad(x, (padding, max(0, last - x.shape[-1]))).unflatten(1, (groups, x.shape[1] // groups))
        windows = [padded[..., tap_window(at, stride, dilation, width)] for at in range(columns)]
        return torch.stack(windows, 2).flatten(1, 3)

    def wgrad(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from the (quantised) operands of `wgrad_gradient` and `wgrad_input`.

        A filter of `columns` columns on C channels is one of a single column on the columns * C of `widen`.
        """
        narrow, wide = (x, gradient) if self.transposed else (gradient, x)
        if self.pixelwise:
            narrow, wide = (t.unflatten(1, (self.groups, t.shape[1] // self.groups)) for t in (narrow, wide))
            return torch.einsum("ngrp,ngup->gru", narrow, wide).reshape(weight.shape)
        if narrow.ndim - 2 < len(self.kernel):
            first = self.first(narrow.ndim - 2)
            return first.wgrad(gradient, x, weight.flatten(narrow.ndim - 1)).reshape(weight.shape)
        columns, channels = self.kernel[-1], weight.shape[1]
        stride, padding, dilation = ((*at[:-1], last) for at, last in zip(self.steps[1:], (1, 0, 1), strict=True))
        steps = zip(wide.shape[2:], (*self.kernel[:-1], 1), stride, padding, dilation, strict=True)
        # an output padding of a stride or more adds rows that no tap reads: there the other operand is 0
        more = [output_size(*axis) - size for axis, size in zip(steps, narrow.shape[2:], strict=True)]
        narrow = F.pad(narrow, [edge for extra in reversed(more) for edge in (0, extra)]) if any(more) else narrow
        like = narrow.new_empty((weight.shape[0], columns * channels, *self.kernel[:-1], 1))
        options = (stride, padding, dilation, False, [0] * len(self.kernel), self.groups, (False, True, False))
        dw: torch.Tensor = torch.ops.aten.convolution_backward(narrow, wide, like, None, *options)[1]
        return dw.unflatten(1, (columns, channels)).movedim(1, -1).reshape(weight.shape)

    @property
    def steps(self) -> tuple[Sizes, Sizes, Sizes, Sizes]:
        """Kernel, stride, padding and dilation."""
        return self.kernel, self.stride, self.padding, self.dilation

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """db [O]."""
        return gradient.sum((0, *range(2, gradient.ndim)))


def tap_window(tap: int, stride: int, dilation: int, extent: int) -> slice:
    """Where a tap reads a padded axis, for `extent` outputs."""
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
