"""Subclasses with a forward of their own: quantised where that is one product with a weight made of parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.ptq.matrix import fp4_layers
from fp4deploy.qat import calibrate, deployed, prepare, quantized_layers, restore
from fp4deploy.qat.computed import masters, why_not_plain
from fp4deploy.qat.fusion.fuse import mark_fusible


class Standardised(nn.Conv2d):
    """A weight-standardised convolution with a gain."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.gain = nn.Parameter(torch.linspace(0.5, 2, self.out_channels).view(-1, 1, 1, 1))

    def standardised(self) -> torch.Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        return (self.weight - mean) * torch.rsqrt(variance + 1e-6) * self.gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        geometry = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.standardised(), self.bias, *geometry)  # type: ignore[arg-type]


class InConvForward(nn.Conv2d):
    def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return super()._conv_forward(x, 2 * weight, bias)


class Inherited(nn.Linear):
    pass


class HalvedTransposed(nn.ConvTranspose2d):
    def forward(self, x: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        settings: Any = self.stride, self.padding, self.output_padding, self.groups, self.dilation
        return F.conv_transpose2d(x, self.weight / 2, self.bias, *settings)


class Doubled(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class SamePadding(nn.Conv2d):
    """As TensorFlow's: none for some sizes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sides = zip(x.shape[2:], self.kernel_size, self.stride, strict=True)
        pads = [max((-(-size // stride) - 1) * stride + kernel - size, 0) for size, kernel, stride in sides]
        x = F.pad(x, [0, pads[1], 0, pads[0]]) if any(pads) else x
        return F.conv2d(x, self.weight, self.bias, self.stride)


class Dynamic(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight * x.mean(), self.bias)


class Adapted(nn.Linear):
    """Low-rank adaptation: three products."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias) + F.linear(F.linear(x, self.weight[:4]), self.weight[:, :4])


class OtherStride(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight, self.bias)


class BiasTwice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, 2 * self.bias)


class Two(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return F.linear(x, self.weight, self.bias)


class Unused(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


TAKEN = {
    "standardised": lambda: (Standardised(32, 32, 3, padding=1, stride=2), (2, 32, 9, 8)),
    "_conv_forward": lambda: (InConvForward(32, 32, 3, padding="same"), (2, 32, 8, 8)),
    "groups": lambda: (Standardised(64, 32, (3, 1), groups=2, dilation=2, bias=False), (2, 64, 9, 8)),
    "inherited": lambda: (Inherited(32, 16), (4, 32)),
    "transposed": lambda: (HalvedTransposed(32, 16, 3, stride=2, output_padding=1), (2, 32, 5, 5)),
    "weight_norm": lambda: (weight_norm(nn.Linear(32, 16)), (4, 32)),
    "spectral_norm": lambda: (spectral_norm(nn.Conv2d(32, 16, 3)), (2, 32, 5, 5)),
}
LEFT = {
    "changes its input or its result": lambda: Doubled(32, 32, 1),
    "fails when it is tried alone": lambda: Two(32, 32),
    "computes its weight from its input": lambda: Dynamic(32, 32, 1),
    "computes 3 products": lambda: Adapted(32, 32),
    "computes no products": lambda: Unused(32, 32),
    "has another stride": lambda: OtherStride(32, 32, 3, stride=2),
    "has another bias": lambda: BiasTwice(32, 32),
}


def plain(layer: Any) -> nn.Module:
    """A layer of torch with the weight that another one multiplies with."""
    kind: Any = next(each for each in (nn.Conv2d, nn.ConvTranspose2d, nn.Linear) if isinstance(layer, each))
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    names = ("in_features", "out_features") if kind is nn.Linear else names
    names += ("output_padding",) if kind is nn.ConvTranspose2d else ()
    made = kind(**{name: getattr(layer, name) for name in names}, bias=layer.bias is not None)
    weight = layer.weight
    if isinstance(layer, Standardised):
        weight = layer.standardised()
    elif isinstance(layer, InConvForward):
        weight = 2 * weight
    elif isinstance(layer, HalvedTransposed):
        weight = weight / 2
    with torch.no_grad():
        made.weight.copy_(weight)
        if layer.bias is not None:
            made.bias.copy_(layer.bias)
    return made


@pytest.mark.parametrize("name", TAKEN)
def test_the_computed_weight_is_quantised(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = TAKEN[name]()
    layer.eval()
    x = torch.randn(shape)
    other, kind, before = plain(layer), type(layer), layer(x)
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    for each in (layer, other):
        prepare(each, include="*")
        calibrate(each, x)
    assert torch.equal(layer(x), other(x))
    assert not torch.equal(layer(x), before)
    assert torch.equal(copy.deepcopy(layer)(x), other(x))
    assert isinstance(layer, kind)
    assert set(layer.state_dict()) == {*state, "input_amax"}
    layer(x).sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in layer.parameters())
    restore(layer)
    assert type(layer) is kind
    assert torch.equal(layer(x), before)


@pytest.mark.parametrize("reason", LEFT)
def test_another_forward_stays_and_says_why(reason: str) -> None:
    assert reason in str(why_not_plain(LEFT[reason]()))


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 1), (3, 2), (4, 4), (7, 2)])
def test_padding_that_depends_on_the_size_is_found(kernel: int, stride: int) -> None:
    assert why_not_plain(SamePadding(32, 32, kernel, stride))
    assert why_not_plain(SamePadding(32, 32, 1, stride)) is None


def test_gradients_go_straight_through_the_quantiser_to_what_the_weight_is_made_of() -> None:
    torch.manual_seed(0)
    layer: Any = Standardised(16, 16, 1)
    x, factors = torch.randn(2, 16, 4, 4), torch.randn(16, 16, 1, 1)
    weight = layer.standardised()
    expected = torch.autograd.grad((weight * factors).sum(), [layer.weight, layer.gain])
    prepare(layer, include="*")
    calibrate(layer, x)
    quantized = quantize_nvfp4(weight.detach()[:, :, 0, 0], block="1d").dequantize(torch.float32)
    assert torch.equal(layer.quantized_weight()[:, :, 0, 0], quantized)
    (layer.quantized_weight() * factors).sum().backward()
    found = dict(layer.named_parameters())
    for name, gradient in zip(("weight", "gain"), expected, strict=True):
        assert torch.allclose(found[name].grad, gradient, atol=1e-5)


def test_only_the_bias_is_rounded_for_deployment() -> None:
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Conv2d(3, 16, 1), Standardised(16, 16, 1), nn.Conv2d(16, 4, 1)))
    calibrate(model, torch.randn(2, 3, 4, 4))
    assert masters(model) >= {"1.weight", "1.gain"}
    shipped = dict(deployed(model).named_parameters())
    rounded = {name for name, each in model.named_parameters() if torch.equal(shipped[name], each.half().float())}
    assert rounded == {"0.weight", "0.bias", "1.bias", "2.weight", "2.bias"}


def test_methods_that_change_weights_leave_computed_ones() -> None:
    model = prepare(nn.Sequential(Standardised(16, 16, 1), nn.Conv2d(16, 16, 1)), include="*")
    assert list(quantized_layers(model)) == ["0", "1"]
    assert list(fp4_layers(model)) == ["1"]


def test_a_compiler_captures_it_as_one_graph() -> None:
    torch.manual_seed(0)
    model = prepare(nn.Sequential(nn.Conv2d(3, 16, 1), Standardised(16, 16, 1), nn.Conv2d(16, 4, 1)))
    x = torch.randn(2, 3, 4, 4)
    calibrate(model, x)
    expected = model(x)
    mark_fusible(model)
    assert torch.allclose(torch.compile(model, backend="eager", fullgraph=True)(x), expected, atol=1e-5)


def test_attention_keeps_its_projections() -> None:
    assert "MultiheadAttention" in str(why_not_plain(nn.MultiheadAttention(32, 4).out_proj))
