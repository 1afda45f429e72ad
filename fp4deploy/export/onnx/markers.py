"""Modules that leave markers in a trace where their quantised operands are, and ONNX's own normalisations."""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import CONVOLUTIONS, Constants, EightBitConstants
from fp4deploy.export.onnx.qdq import ACTIVATION_MARKER, MARKER_DOMAIN, WEIGHT_MARKER
from fp4deploy.graph.copies import for_capture
from fp4deploy.qat.computed import rest_tensors, torch_class
from fp4deploy.qat.experts import QuantExperts
from fp4deploy.qat.layers import TRANSPOSED, QuantLinear
from fp4deploy.rest import Rest


def traceable(
    model: nn.Module,
    constants: dict[str, Constants],
    refused: dict[str, InputError],
    rest: Rest,
) -> nn.Module:
    """A copy in `rest` on the CPU whose quantised layers leave markers, or raise what is `refused`."""
    for name, tensor in rest_tensors(model, rest):
        rest.require(name, tensor)
    traceable = for_capture(model)
    numbers = {name: x.detach() for name, x in traceable.state_dict().items() if rest.is_wide_number(x)}
    held = traceable.to(rest.dtype).state_dict(keep_vars=True)
    for name, number in numbers.items():
        held[name].data = number
    for name, module in traceable.named_modules():
        forward: Callable[..., torch.Tensor] | None = None
        if name in constants:
            forward = _marking_forward(name, constants[name], module, rest.dtype)
        elif name in refused:
            forward = _refusing_forward(refused[name])
        elif isinstance(module, QuantExperts):
            forward = _marking_experts(name, {own: constants[f"{name}.{own}"] for own in module.names}, rest.dtype)
        elif _computes(module, nn.GroupNorm) and module.affine:
            forward = _group_norm
        elif _computes(module, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d) and module.running_mean is None:
            forward = _instance_norm
        if forward is not None:
            module.forward = types.MethodType(forward, module)
    return traceable


def _computes(module: nn.Module, *kinds: type[nn.Module]) -> bool:
    """Whether the module is of one of these classes with the forward of the class, not one of its own."""
    return isinstance(module, kinds) and type(module).forward in [kind.forward for kind in kinds]


def _marking_forward(name: str, layer: Constants, module: nn.Module, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The layer's forward with two markers in place of its quantised operands."""
    shape = layer.shape if isinstance(layer, EightBitConstants) else tuple(layer.shape[axis] for axis in layer.order)
    channels = int(cast(Any, module.in_features if isinstance(module, nn.Linear) else module.in_channels))

    def operands(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.to(dtype)  # of code that computes in FP32
        padded: tuple[Any, ...] = tuple(x.shape)
        if not isinstance(layer, EightBitConstants):
            axis = layer.channel_axis % x.ndim
            torch._check(x.shape[axis] == channels)  # as the product that the markers stand for does
            padded = (*x.shape[:axis], layer.channels, *x.shape[axis + 1 :])
        activation = _marker(ACTIVATION_MARKER, [x], name, padded, dtype)
        return activation, _marker(WEIGHT_MARKER, [], name, shape, dtype)

    def convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        kind: Any = torch_class(self)  # a subclass may compute its weight there
        product: torch.Tensor = kind._conv_forward(self, x, weight, self.bias)
        return product

    def transposed_convolution(self: Any, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        product: torch.Tensor = replace(self.gemms(), output_padding=self.output_padding).forward(x, weight, self.bias)
        return product

    def linear(self: QuantLinear, x: torch.Tensor) -> torch.Tensor:
        x, weight = operands(x)
        product = torch.matmul(x, weight)
        return product if self.bias is None else product + self.bias

    if isinstance(module, CONVOLUTIONS):
        return convolution
    return transposed_convolution if isinstance(module, TRANSPOSED) else linear


def _marking_experts(name: str, weights: dict[str, Constants], dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    """The experts' forward on a marker for each of their weights."""

    def forward(self: QuantExperts, *inputs: object, **named: object) -> Any:
        shapes = {own: tuple(each.shape[axis] for axis in each.order) for own, each in weights.items()}  # type: ignore[union-attr]
        self.hold({own: _marker(WEIGHT_MARKER, [], f"{name}.{own}", shape, dtype) for own, shape in shapes.items()})
        return QuantExperts.forward(self, *inputs, **named)

    return forward


def _refusing_forward(error: InputError) -> Callable[..., torch.Tensor]:
    def refuse(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        raise error

    return refuse


def _marker(
    kind: str, inputs: list[torch.Tensor], layer: str, shape: tuple[Any, ...], dtype: torch.dtype
) -> torch.Tensor:
    operator = f"{MARKER_DOMAIN}::{kind}"
    return torch.onnx.ops.symbolic(operator, inputs, {"layer": layer}, dtype=dtype, shape=shape, version=1)


def _group_norm(self: nn.GroupNorm, x: torch.Tensor) -> torch.Tensor:
    attributes = cast(Any, {"num_groups": self.num_groups, "epsilon": self.eps})
    inputs = [x, self.weight.to(x.dtype), self.bias.to(x.dtype)]
    return torch.onnx.ops.symbolic("GroupNormalization", inputs, attributes, dtype=x.dtype, shape=x.shape)


def _instance_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = (self.weight, self.bias) if self.affine else (x.new_ones(x.shape[1]), x.new_zeros(x.shape[1]))
    inputs = [x, weight.to(x.dtype), bias.to(x.dtype)]
    return torch.onnx.ops.symbolic("InstanceNormalization", inputs, {"epsilon": self.eps}, dtype=x.dtype, shape=x.shape)
