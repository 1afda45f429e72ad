"""Every attribute of an operator reaches a packed network: modules whose attributes are no defaults, an output each."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.qat.load import deployed

Function = Callable[[torch.Tensor], torch.Tensor]


class Call(nn.Module):
    """A function of torch as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.forward = function


class Branches(nn.Module):
    """Each part on the same input, each result an output."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(part(x) for part in self.parts)


def norms() -> list[nn.Module]:
    """An eps as large as the variance, which is not that of the batch."""
    return [
        nn.BatchNorm2d(16, eps=0.05),
        nn.BatchNorm2d(16, eps=0.3, affine=False),
        nn.GroupNorm(4, 16, eps=0.3),
        nn.GroupNorm(2, 16, eps=0.3, affine=False),
        nn.LayerNorm((9, 11), eps=0.3),
        nn.LayerNorm(11, eps=0.2, bias=False),
        nn.InstanceNorm2d(16, eps=0.3, affine=True),
        nn.InstanceNorm2d(16, eps=0.3, affine=True, track_running_stats=True),
        nn.LocalResponseNorm(3, alpha=0.7, beta=0.4, k=1.5),
        Call(lambda x: F.normalize(x, p=2.0, dim=2, eps=3.0)),
    ]


def activations() -> list[nn.Module]:
    return [
        nn.LeakyReLU(0.3),
        nn.PReLU(16, init=0.4),
        nn.ELU(0.7),
        nn.CELU(0.6),
        nn.SELU(),
        nn.Hardtanh(-0.4, 0.8),
        nn.Softplus(2.0, 1.0),
        nn.GELU("tanh"),
        nn.GELU(),
        nn.Hardshrink(0.3),
        nn.Softshrink(0.2),
        nn.Threshold(0.1, 0.7),
        nn.Softmax(2),
        nn.LogSoftmax(1),
        nn.GLU(2 - 1),
        Call(lambda x: x.clamp(-0.3, 0.6)),
        Call(lambda x: torch.lerp(x, x.square(), 0.3)),
        Call(lambda x: torch.add(x, x.square(), alpha=0.3)),
        Call(lambda x: torch.sub(x, x.square(), alpha=0.3)),
        Call(lambda x: x.pow(3)),
    ]


def windows() -> list[nn.Module]:
    return [
        nn.MaxPool2d((3, 2), (2, 1), (1, 0)),
        nn.MaxPool2d(2, 3, 1, 2),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.AvgPool2d((2, 3), (2, 1), (1, 1)),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Upsample(scale_factor=2, mode="nearest"),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False),
        nn.ReflectionPad2d((1, 2, 3, 0)),
        nn.ReplicationPad2d((0, 2, 1, 3)),
        nn.ConstantPad2d((1, 0, 2, 3), 0.7),
        nn.Conv2d(16, 8, (3, 2), (2, 1), (1, 2), (1, 2)),
        nn.Conv2d(16, 8, 3, padding=1, groups=4, bias=False),
        nn.Conv2d(16, 16, 3, padding="same", dilation=2, groups=16),
        nn.Conv2d(16, 8, 3, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(16, 8, (3, 2), (2, 1), (1, 0), (1, 0), bias=False),
        nn.ConvTranspose2d(16, 8, 4, 2, 1, groups=2),
        nn.PixelShuffle(2),
        nn.PixelUnshuffle(1),
        nn.Flatten(1, 2),
        Call(lambda x: x.roll((1, -2), (2, 3))),
        Call(lambda x: x[:, 2:14:3, 1:, :-2]),
        Call(lambda x: x.cumsum(3)),
        Call(lambda x: x.std((2, 3), correction=0, keepdim=True)),
        Call(lambda x: x.var(1, correction=1)),
        Call(lambda x: x.topk(3, 1, largest=False)[0]),
        Call(lambda x: x.argmax(2).float()),
    ]


def network(parts: Sequence[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    model = Branches(parts)
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if value.is_floating_point():
            value.data.uniform_(0.02, 0.1) if name.endswith("running_var") else value.data.normal_(0, 0.5)
    return model.eval()


@pytest.mark.parametrize("kind", [norms, activations, windows], ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore")  # sizes of reflected edges
def test_every_attribute_counts(kind: Callable[[], list[nn.Module]], tmp_path: Path) -> None:
    parts = kind()
    model, x = network(parts), torch.randn(2, 16, 9, 11).half().float()
    with torch.no_grad():
        expected = deployed(model)(x)
    fd.pack(copy.deepcopy(model), tmp_path / "a.fp4", example_inputs=x, verify=False)
    packed: Any = PackedNetwork(read_packed(tmp_path / "a.fp4"))(x)
    for part, one, other in zip(parts, expected, packed, strict=True):
        error = float((other.float() - one).abs().max())
        assert error <= 4e-3 * float(one.abs().max()), f"{part} differs by {error}"


@pytest.mark.parametrize("scales", [(1.5, 1.0), (1.0, 1.5)])
def test_an_attribute_that_a_file_has_no_field_for_is_refused(scales: tuple[float, float], tmp_path: Path) -> None:
    model = network([Call(lambda x: torch._C._nn.elu(x, 0.7, *scales))])
    with pytest.raises(InputError, match="an ELU with scales, which has no packed form"):
        fd.pack(model, tmp_path / "a.fp4", example_inputs=torch.randn(2, 16, 9, 11), verify=False)
