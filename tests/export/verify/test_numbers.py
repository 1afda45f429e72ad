"""The torch side of a comparison computes with the FP16 numbers that a file holds, and quantises by its own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.export.verify import tensors
from fp4deploy.export.verify.numbers import rest_numbers
from fp4deploy.qat import deployed
from fp4deploy.rest import BF16, FP16
from tests.samples import sample

SCALE = 32**-0.5  # 0.17676 in FP16


class Scaled(nn.Module):
    """A number that FP16 rounds, on both sides of an operator, before a layer in FP4."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x) * SCALE)
        x *= 0.3
        return self.last(torch.softmax((0.1 - x) / 0.0007, 1))


OPERANDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # of ONNX's operators: BF16 in a file of BF16
    "clamp": lambda x: x.clamp(min=0.123, max=1.777),
    "clamp_min": lambda x: x.clamp_min(0.123),
    "clip": lambda x: torch.clip(x, max=0.123),
    "masked_fill": lambda x: x.masked_fill(x < 0, -3.333),
    "where": lambda x: torch.where(x < 0, x, 1.237),
    "pow": lambda x: x.abs().pow(2.237) + (x.abs() + 1) ** 0.333 + 1.237**x,
    "remainder": lambda x: x % 1.237,
    "hardtanh": lambda x: F.hardtanh(x, -0.777, 0.777),
    "softplus": lambda x: F.softplus(x, beta=1.237),
    "softshrink": lambda x: F.softshrink(x, 0.1237),
    "lerp": lambda x: torch.lerp(x, x.roll(1, 1), 0.237),
    "addcmul": lambda x: torch.addcmul(x, x, x, value=0.237) + torch.addcdiv(x, x, x * x + 1, value=0.237),
    "alpha": lambda x: torch.add(x, x.roll(1, 1), alpha=0.237),
    "pad": lambda x: F.pad(x, (1, 1), value=1.237),
    "arithmetic": lambda x: (1.237 - x) / 0.1237,
    "an attribute": lambda x: F.leaky_relu(x, 0.1237) + F.elu(x, 1.237),  # FP32 in the file, too
}


class Operands(nn.Module):
    """A map through every function, each an output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.first(x)
        return {name: self.last(function(x)) for name, function in OPERANDS.items()}


def test_every_kind_of_number_is_the_files() -> None:
    torch.manual_seed(0)
    model, x = deployed(Operands().eval(), BF16), torch.randn(1, 3, 9, 9).half().float()
    found = fd.verify(model, fd.export_graph(model, x, rest="bf16"), [x])
    assert found.passed
    assert (
        found.largest < 5e-6
    )  # of float32, by processor; a number that is not rounded moves its output by 1e-5 and more


def prepared() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, images = fd.prepare(Scaled()), torch.rand(2, 3, 8, 8).half().float()
    fd.calibrate(model, images)
    return model.eval(), images


def test_numbers_of_the_code_are_rounded_and_those_of_a_quantiser_are_not() -> None:
    model, images = prepared()
    with torch.inference_mode(), rest_numbers(model, FP16):
        found = model(images)
    rounded = Scaled().eval()
    fd.prepare(rounded)
    rounded.load_state_dict(model.state_dict())
    first, middle, last = rounded.first, rounded.middle, rounded.last
    with torch.inference_mode():
        x = middle(first(images) * FP16.rounded(SCALE)) * FP16.rounded(0.3)
        expected = last(torch.softmax((FP16.rounded(0.1) - x) / FP16.rounded(0.0007), 1))
        assert torch.equal(found, expected)
        assert not torch.equal(model(images), expected)


def test_a_file_is_compared_with_the_numbers_that_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = prepared()
    graph = fd.export_graph(model, (3, 8, 8))
    close = fd.verify(model, graph, images).largest
    monkeypatch.setattr(tensors, "rest_numbers", lambda *_: nullcontext())
    apart = fd.verify(model, graph, images).largest
    assert close < 1e-5
    assert apart > 5 * close, (apart, close)


class Wide(nn.Module):
    """Norms as Gemma's, whose weight is FP32 in the file since the code says so, and one that is FP16 there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.other = (nn.Parameter(torch.full((16,), 1.3e-3)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x.float() * (1.0 + self.weight.float()), x * (1.0 + self.other.float()).type_as(x)])


def test_what_is_computed_of_parameters_is_rounded_where_the_file_has_it_in_fp16() -> None:
    model, x = Wide().eval(), torch.ones(2, 16)
    with torch.inference_mode(), rest_numbers(model, FP16):
        found = model(x)
    assert found[:, 0, 0].tolist() == [pytest.approx(1.0013, abs=1e-6), 1 + 2**-10]
    held = [each for each in fd.export_graph(model, (16,)).graph.initializer if [*each.dims] == [16]]
    assert {each.data_type: float(numpy_helper.to_array(each)[0]) for each in held} == {
        1: pytest.approx(float(found[0, 0, 0]), abs=1e-6),
        10: 1 + 2**-10,
    }


class Made(nn.Module):
    """Tensors of numbers: of the network's type, and of FP32 since the code names none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        full = torch.full((2,), 0.1, dtype=x.dtype)
        narrow = [x.new_tensor(0.1), torch.tensor([0.1, 0.1], dtype=x.dtype), torch.tensor(0.1), full]
        return torch.stack([x * each for each in (*narrow, x.new_full((2,), 0.1), torch.tensor([0.1, 0.1]))])


def test_tensors_of_numbers_are_as_wide_as_the_file_has_them() -> None:
    x = torch.ones(2, 2)
    with torch.inference_mode(), rest_numbers(Made(), FP16):
        found = Made()(x)
    assert found[:, 0, 0].tolist() == [FP16.rounded(0.1)] * 5 + [x.new_tensor(0.1).item()]
    assert fd.verify(Made().eval(), fd.export_graph(Made().eval(), (2,)), x).largest == 0


@pytest.mark.parametrize("of_tensor", [torch.as_tensor, torch.asarray])
def test_a_tensor_of_a_tensor_is_as_wide_as_that(of_tensor: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 2)
    with torch.inference_mode(), rest_numbers(nn.Identity(), FP16):
        found = of_tensor(x) * 0.1
    assert found.unique().item() == FP16.rounded(0.1)


class Angles(nn.Module):
    """Of time steps, which diffusers computes in FP32 whatever the network is in; and others in the network's type."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        frequency = torch.exp(-9.21034 * torch.arange(4, dtype=torch.float32) / 4)
        own = torch.arange(4, dtype=x.dtype) * 0.1
        return torch.cat([torch.sin(500 * x[:, :1].float() * frequency).to(x.dtype), x[:, :4] * own], 1)


def test_numbers_are_rounded_where_the_code_does_not_ask_for_fp32() -> None:
    x = torch.ones(2, 16)
    with torch.inference_mode(), rest_numbers(Angles(), FP16):
        found = Angles()(x)[0]
    exact = torch.sin(500 * torch.exp(-9.21034 * torch.arange(4.0) / 4))
    assert torch.equal(found, torch.cat([exact, (torch.arange(4) * 0.1).half().float()]))  # a constant of the file


class Grid(nn.Module):
    """Places of an image, of a type that the code does not name, or names; and an image sampled there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.head = kind, nn.Conv2d(16, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if self.kind == "linspace":
            line = torch.linspace(-1, 1, 12)
        elif self.kind == "whole":
            line = torch.arange(12) / 11 * 2 - 1
        else:
            line = torch.linspace(-1, 1, 12, dtype=x.dtype, device=x.device)
        grid = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).expand(x.shape[0], -1, -1, -1)
        return self.head(F.grid_sample(y, grid + 0.1 * y[:, :2].permute(0, 2, 3, 1), align_corners=True))


@pytest.mark.parametrize(("kind", "rest"), sample(["linspace", "whole", "of a tensor"], ["fp16", "bf16"], every=2))
def test_places_are_as_wide_as_the_file_has_them(tmp_path: Path, kind: str, rest: str) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 16, 12, 12)
    model = fd.prepare(Grid(kind).eval(), include=["*"])
    fd.calibrate(model, images)
    assert fd.export_onnx(model, images, tmp_path / "net.onnx", rest=rest).verification.passed


def test_a_layer_that_raises_leaves_no_trace() -> None:
    model, images = prepared()
    runnable = deployed(model)
    with pytest.raises(RuntimeError), rest_numbers(runnable, FP16):
        runnable.middle(images)
    assert torch.isfinite(runnable(images)).all()
    assert not runnable.middle._forward_pre_hooks


@pytest.mark.parametrize(("number", "kept"), [(1e9, 1e9), (0.5, 0.5), (32**-0.5, 0.1767578125), (-1e-9, -1e-9)])
def test_rounding(number: float, kept: float) -> None:
    assert FP16.rounded(number) == kept
