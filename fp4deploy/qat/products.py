"""The three products of Linear, Conv2d and ConvTranspose2d, and the contraction axis of every operand.

    layer             product                        contracts             axis of the first    of the second
    Linear            Y  = X W^T                     input features        X -1                 W 1
                      dX = G W                       output features       G -1                 W 0
                      dW = G^T X                     tokens                G 0                  X 0
    Conv2d            Y  = X * W                     input channels        X 1 (NCHW)           W 1 (OIHW)
                      dX = G transposed-conv W       output channels       G 1                  W 0
                      dW = G^T unfold(X)             output pixels         G -1                 unfold(X) -1
    ConvTranspose2d   Y  = X transposed-conv W       input channels        X 1                  W 0 (IOHW)
                      dX = G * W                     output channels       G 1                  W 1
                      dW = X^T unfold(G)             input pixels          unfold(G) -1         X -1

The weight gradient of a convolution is a matrix product over pixels. One of its operands is the unfolded image, one row
for each channel and tap; blocks are 16 pixels of that row in row-major order within an image. They are made after
unfolding: a tap shifts the image, and blocks cut before the shift would straddle the blocks of the other operand, which
no tensor core can multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Pair = tuple[int, int]


@dataclass(frozen=True)
class LinearProduct:
    """Y [..., O] = X [..., C] W [O, C]^T."""

    groups: int = 1
    input_axis: int = -1
    weight_axes: Pair = (0, 1)
    weight_groups: Pair = (1, 1)
    wgrad_axis: int = 0

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dX like `x`, from G [..., O] and W [O, C]."""
        return gradient @ weight

    def plain_weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW [O, C], from G and X as they are."""
        return gradient.flatten(0, -2).T @ x.flatten(0, -2).to(gradient.dtype)

    def wgrad_operands(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """G [tokens, O] and X [tokens, C]."""
        return gradient.flatten(0, -2), x.flatten(0, -2)

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gradient.T @ x

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.flatten(0, -2).sum(0)


@dataclass(frozen=True)
class ConvProduct:
    """Conv2d, or with `transposed` ConvTranspose2d: Y [N, O, H', W'] from X [N, C, H, W]; padding is with zeros."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    transposed: bool = False
    output_padding: Pair = (0, 0)
    input_axis: int = -3
    wgrad_axis: int = -1

    @property
    def weight_axes(self) -> Pair:
        """(output channels, input channels) of the weight."""
        return (1, 0) if self.transposed else (0, 1)

    @property
    def weight_groups(self) -> Pair:
        """Groups along each of `weight_axes`: a weight holds all groups along its first axis."""
        return (1, self.groups) if self.transposed else (self.groups, 1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.transposed:
            return F.conv_transpose2d(
                x, weight, bias, self.stride, self.padding, self.output_padding, self.groups, self.dilation
            )
        return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def input_gradient(self, gradient: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dX like `x` [N, C, H, W], from G [N, O, H', W'] and W."""
        return self._backward(gradient, x.to(gradient.dtype), weight, (True, False, False))[0]

    def plain_weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from G and X as they are."""
        return self._backward(gradient, x.to(gradient.dtype), weight.to(gradient.dtype), (False, True, False))[1]

    def _backward(
        self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, wanted: tuple[bool, bool, bool]
    ) -> Any:
        return torch.ops.aten.convolution_backward(
            gradient,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.transposed,
            self.output_padding,
            self.groups,
            wanted,
        )

    def wgrad_operands(self, gradient: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """G and X as [N, rows, pixels], float32; the one with the larger image unfolded."""
        if self.transposed:
            return self._unfold(gradient, x), x.to(torch.float32).flatten(2)
        return gradient.to(torch.float32).flatten(2), self._unfold(x, gradient)

    def weight_gradient(self, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dW like `weight`, from the (quantised) operands of `wgrad_operands`."""
        rows, unfolded = (x, gradient) if self.transposed else (gradient, x)
        rows = rows.unflatten(1, (self.groups, rows.shape[1] // self.groups))
        unfolded = unfolded.unflatten(1, (self.groups, unfolded.shape[1] // self.groups))
        return torch.einsum("ngrp,ngup->gru", rows, unfolded).reshape(weight.shape)

    def bias_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sum((0, 2, 3))

    def _unfold(self, image: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """[N, channels * taps, pixels]: what each output pixel sees of the image, as far as `pixels` reaches."""
        kernel = self.kernel
        unfolded = F.unfold(image.to(torch.float32), kernel, self.dilation, self.padding, self.stride)
        spans = (
            size + 2 * pad - dilation * (taps - 1) - 1
            for size, pad, dilation, taps in zip(image.shape[2:], self.padding, self.dilation, kernel, strict=True)
        )
        grid = tuple(span // stride + 1 for span, stride in zip(spans, self.stride, strict=True))
        height, width = pixels.shape[2:]
        return unfolded.unflatten(-1, grid)[..., :height, :width].flatten(-2)
