"""Conv1d, Conv3d, ConvTranspose3d: the GEMMs of two axes with one and with three, in training and in the files."""

from __future__ import annotations

import copy
from functools import cache

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.export.verify.exported import verify
from fp4deploy.qat import calibrate, layer_plan, prepare, restore
from fp4deploy.qat.operators.gemms import ConvGemms
from tests.export.exported_models import images, prepared

CASES = {  # name -> (layer, the same as a Conv2d, shape of the input, axis that the Conv2d has besides)
    "conv1d": (
        lambda: nn.Conv1d(32, 24, 3, stride=2, padding=1),
        lambda: nn.Conv2d(32, 24, (1, 3), (1, 2), (0, 1)),
        (2, 32, 21),
        2,
    ),
    "conv1d same, groups": (
        lambda: nn.Conv1d(48, 18, 4, padding="same", dilation=2, groups=3),
        lambda: nn.Conv2d(48, 18, (1, 4), padding="same", dilation=(1, 2), groups=3),
        (2, 48, 13),
        2,
    ),
    "conv1d reflect, unbatched": (
        lambda: nn.Conv1d(17, 16, 3, padding=1, padding_mode="reflect"),
        lambda: nn.Conv2d(17, 16, (1, 3), padding=(0, 1), padding_mode="reflect"),
        (17, 7),
        1,
    ),
    "conv3d of one column": (
        lambda: nn.Conv3d(32, 16, (3, 2, 1), (2, 1, 1), (1, 0, 0), (1, 2, 1)),
        lambda: nn.Conv2d(32, 16, (3, 2), (2, 1), (1, 0), (1, 2)),
        (2, 32, 5, 6, 1),
        None,
    ),
    "transposed conv3d of one column": (
        lambda: nn.ConvTranspose3d(32, 24, (2, 3, 1), (2, 2, 1), (0, 1, 0), (0, 1, 0)),
        lambda: nn.ConvTranspose2d(32, 24, (2, 3), (2, 2), (0, 1), (0, 1)),
        (2, 32, 4, 5, 1),
        None,
    ),
    "transposed conv3d, groups, dilation": (
        lambda: nn.ConvTranspose3d(32, 16, (3, 2, 1), (1, 2, 1), (1, 0, 0), groups=2, dilation=(2, 1, 1)),
        lambda: nn.ConvTranspose2d(32, 16, (3, 2), (1, 2), (1, 0), groups=2, dilation=(2, 1)),
        (2, 32, 4, 5, 1),
        None,
    ),
}


def step(layer: nn.Module, x: torch.Tensor, recipe: str) -> list[torch.Tensor]:
    """Output and gradients of a quantised layer."""
    x = x.clone().requires_grad_()
    prepare(layer, recipe, include="0")
    torch.manual_seed(7)  # of stochastic rounding
    y = layer(x)
    y.backward(torch.linspace(-1, 1, y.numel()).sin().view(y.shape))
    assert x.grad is not None
    found = [y.detach(), x.grad, layer[0].weight.grad, layer[0].bias.grad]
    restore(layer)
    return found


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_4o6_qat", "nvfp4_train", "mx_baseline", "tetrajet"])
@pytest.mark.parametrize("name", CASES)
def test_as_the_convolution_with_two_axes(name: str, recipe: str) -> None:
    build, build_2d, shape, axis = CASES[name]
    torch.manual_seed(0)
    layer, flat = nn.Sequential(build()), nn.Sequential(build_2d())
    flat[0].weight.data = layer[0].weight.detach().reshape(flat[0].weight.shape).clone()
    flat[0].bias.data = layer[0].bias.detach().clone()
    x = torch.randn(shape)
    found = step(layer, x, recipe)
    expected = step(flat, x.unsqueeze(axis) if axis is not None else x.squeeze(-1), recipe)
    for got, wanted in zip(found, expected, strict=True):
        assert got.abs().max() > 0
        assert torch.allclose(got, wanted.reshape(got.shape), rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("padding", [(4, 2), "same"])
def test_padding_that_was_changed_after_construction(padding: tuple[int, int] | str) -> None:
    """As libraries do that replace strides by dilation; torch's own copy of the padding stays the old one."""
    torch.manual_seed(0)
    fresh = nn.Conv2d(16, 16, 3, padding=padding, dilation=(4, 2))
    changed = nn.Conv2d(16, 16, 3, stride=2, padding=1)
    changed.load_state_dict(fresh.state_dict())
    changed.stride, changed.dilation, changed.padding = (1, 1), (4, 2), padding
    x = torch.randn(2, 16, 7, 9)
    for layer in (fresh, changed):
        model = prepare(nn.Sequential(layer), include=["0"]).eval()
        calibrate(model, x)
    assert torch.equal(changed(x), fresh(x))
    assert changed(x).shape == x.shape


def test_three_axes_quantise_along_channels() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Conv3d(20, 12, (1, 2, 3), (2, 1, 1), (0, 1, 1), (1, 2, 1))), torch.randn(2, 20, 4, 5, 6)
    prepare(layer, "nvfp4_qat", include="0")
    calibrate(layer, x)
    layer.eval()
    conv = layer[0]
    xq, wq = conv.quantized_input(x), conv.quantized_weight()
    assert xq.shape == x.shape
    as_rows = nn.Sequential(nn.Conv2d(20, 12, 1))
    prepare(as_rows, "nvfp4_qat", include="0")
    as_rows[0].input_amax.copy_(conv.input_amax)
    as_rows.eval()
    assert torch.equal(as_rows[0].quantized_input(x.flatten(3)).view(x.shape), xq)
    assert torch.equal(layer(x), F.conv3d(xq, wq, conv.bias, conv.stride, conv.padding, conv.dilation))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("stride", [(1, 1, 1), (2, 1, 2)])
def test_widening_gives_the_weight_gradient_of_three_axes(stride: tuple[int, int, int], transposed: bool) -> None:
    gemms = ConvGemms((2, 3, 2), stride, (1, 1, 0), (1, 1, 2), 2, transposed, (0, 0, 0))
    torch.manual_seed(0)
    x, shape = torch.randn(2, 6, 5, 6, 7), (6, 4, 2, 3, 2) if transposed else (8, 3, 2, 3, 2)
    weight = torch.randn(shape, requires_grad=True)
    y = gemms.forward(x, weight, None)
    gradient = torch.randn(y.shape)
    y.backward(gradient)
    found = gemms.wgrad(gemms.wgrad_gradient(gradient, x.shape), gemms.wgrad_input(x, gradient.shape), weight)
    assert torch.allclose(found, weight.grad, rtol=1e-4, atol=1e-4)


class Signal(nn.Module):
    """A network over sequences [N, 3, L]."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv, norm = (nn.Conv1d, nn.BatchNorm1d) if dims == 1 else (nn.Conv3d, nn.BatchNorm3d)
        self.stem = conv(3, 24, 3, padding=1)
        self.norm = norm(24)
        self.body = conv(24, 32, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(32, 32, 2, 2) if dims == 3 else nn.Identity()
        self.point = conv(32, 16, 1, bias=False)
        self.head = conv(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deep = self.up(torch.relu(self.body(torch.relu(self.norm(self.stem(x))))))
        return self.head(torch.relu(self.point(deep)))


SHAPES = {1: (3, 32), 3: (3, 4, 6, 8)}


@cache
def exported(dims: int) -> tuple[nn.Module, onnx.ModelProto]:
    torch.manual_seed(0)
    model = prepared(Signal(dims), "nvfp4_qat", SHAPES[dims])
    return model, export_graph(model, SHAPES[dims])


@pytest.mark.parametrize("dims", [1, 3])
def test_the_files_compute_what_torch_computes(dims: int) -> None:
    model, canonical = exported(dims)
    precisions = ["FP16", "FP16", *["FP4"] * (dims if dims == 3 else 2), "FP16"]
    assert [plan.precision for plan in layer_plan(model)] == precisions
    assert [layer.precision for layer in layers_of(canonical)] == precisions
    agreement = verify(model, canonical, images(4, SHAPES[dims]))
    assert agreement.passed, agreement
    planned = {layer.name: layer for layer in lower(canonical, "auto").layers}
    assert (planned["body"].kind, planned["body"].form) == (f"Conv{dims}d", "qdq")
    assert planned["body"].compute == "FP16"
    assert "no FP4 convolution" in planned["body"].reason
    if dims == 3:
        assert (planned["up"].kind, planned["up"].form, planned["up"].compute) == ("ConvTranspose3d", "qdq", "FP16")


def test_what_stays_in_fp16_says_why() -> None:
    class LayerNorm2d(nn.LayerNorm):
        """As torchvision and timm have it."""

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3),
        nn.Conv2d(32, 32, 3, padding=1, groups=32),
        LayerNorm2d(32),
        nn.BatchNorm3d(32),
        nn.Conv2d(32, 32, (3, 1), (2, 1), padding=(1, 0)),
        nn.Conv2d(32, 32, 3, padding="same", padding_mode="reflect"),
        nn.Conv1d(32, 32, 3),
        nn.Conv2d(32, 4, 1),
    )
    plans = {plan.name: plan for plan in layer_plan(copy.deepcopy(model))}
    assert [plans[str(index)].precision for index in range(8)] == [
        *("FP16", "FP16", "FP16", "FP16", "FP4", "FP4", "FP4", "FP16")
    ]
    assert "depthwise: 32 groups of one input channel" in plans["1"].reason
    assert "normalisation" in plans["2"].reason
    assert "normalisation" in plans["3"].reason
