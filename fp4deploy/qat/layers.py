"""Fake-quantised Conv2d, ConvTranspose2d and Linear.

Each is the torch layer with its own parameters and names, plus one buffer, `input_amax`: the tracked amax of its input,
from which the engine's static global scale is made. `prepare` turns a layer into its quantised class in place, so that
hooks, parameters and references to the module survive.

Blocks run along the input channels, the axis that the product contracts:

    layer             input axis   weight axes (1-D)   weight axes (2-D)
    Conv2d            1 of NCHW    1 of OIHW           (0, 1)
    ConvTranspose2d   1 of NCHW    0 of IOHW           (0, 1)
    Linear            last         1 of OI             (0, 1)

With groups, the input channels of one group must be a multiple of 16, so that no block crosses a group.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.qat.recipes import Recipe
from fp4deploy.qat.ste import fake_quantize


class QuantizedLayer(nn.Module):
    """What the three layers share: the recipe, amax tracking and the two quantisers."""

    recipe: Recipe
    input_amax: torch.Tensor
    observing: bool
    input_axis = 1
    weight_axis = 1
    weight: torch.Tensor

    def attach(self, recipe: Recipe) -> None:
        """Give a layer whose class was just changed its quantiser state."""
        self.recipe = recipe
        self.observing = False
        self.register_buffer("input_amax", torch.zeros((), dtype=torch.float32, device=self.weight.device))

    def quantized_input(self, x: torch.Tensor) -> torch.Tensor:
        """Fake-quantise the input; in training the tracked amax follows it first.

        A layer that never saw data has no scale: in evaluation its output is NaN rather than silently zero.
        """
        spec = self.recipe.activation
        if self.observing or self.training:
            self._track(x)
        if spec is None or self.observing:
            return x
        if spec.scale == "dynamic":
            return fake_quantize(x, (self.input_axis,))
        return fake_quantize(x, (self.input_axis,), torch.where(self.input_amax > 0, self.input_amax, float("nan")))

    def quantized_weight(self) -> torch.Tensor:
        """Fake-quantise the weight with its own amax."""
        spec = self.recipe.weight
        if spec is None or self.observing:
            return self.weight
        return fake_quantize(self.weight, (0, 1) if spec.block == "2d" else (self.weight_axis,))

    @torch.no_grad()
    def _track(self, x: torch.Tensor) -> None:
        magnitude = x.detach().abs().to(torch.float32)
        current = torch.where(torch.isfinite(magnitude), magnitude, 0.0).amax()
        decay = 1.0 if self.observing else self.recipe.amax_decay
        self.input_amax.copy_(torch.maximum(current, self.input_amax * decay))


class QuantConv2d(QuantizedLayer, nn.Conv2d):
    """Conv2d with NVFP4 weights and activations: [N, C, H, W] -> [N, O, H', W']."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(self.quantized_input(x), self.quantized_weight(), self.bias)


class QuantConvTranspose2d(QuantizedLayer, nn.ConvTranspose2d):
    """ConvTranspose2d with NVFP4 weights and activations: [N, C, H, W] -> [N, O, H', W']."""

    weight_axis = 0

    def forward(self, x: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        spatial = 2
        padding = self._output_padding(
            x,
            output_size,
            cast(Any, self.stride),
            cast(Any, self.padding),
            cast(Any, self.kernel_size),
            spatial,
            cast(Any, self.dilation),
        )
        return F.conv_transpose2d(
            self.quantized_input(x),
            self.quantized_weight(),
            self.bias,
            cast(Any, self.stride),
            cast(Any, self.padding),
            cast(Any, padding),
            self.groups,
            cast(Any, self.dilation),
        )


class QuantLinear(QuantizedLayer, nn.Linear):
    """Linear with NVFP4 weights and activations: [..., C] -> [..., O]."""

    input_axis = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.quantized_input(x), self.quantized_weight(), self.bias)


QUANTIZED: dict[type[nn.Module], type[QuantizedLayer]] = {
    nn.Conv2d: QuantConv2d,
    nn.ConvTranspose2d: QuantConvTranspose2d,
    nn.Linear: QuantLinear,
}
