"""What is computed from parameters alone becomes a constant, rounded once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.graph.folding import fold_parameters


class Computes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.register_buffer("gain", torch.rand(8))
        self.position = nn.Parameter(torch.randn(1, 8, 2, 2))

    def forward(self, x: torch.Tensor) -> Any:
        gain = (self.gain * 1.7).exp()
        weight = F.batch_norm(self.weight.reshape(1, 8, -1), None, None, weight=gain, training=True, eps=1e-6)
        y = F.conv2d(x, weight.reshape_as(self.weight)) + self.bias.view(1, 8, 1, 1)
        noise = torch.rand(8, 1, 1) + torch.rand_like(self.bias).view(8, 1, 1)
        return y + F.interpolate(self.position, (6, 6)), y * noise, y + torch.arange(6).exp()


def exported(model: nn.Module, dtype: torch.dtype) -> torch.export.ExportedProgram:
    x = torch.zeros(2, 3, 8, 8, dtype=dtype)
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("N", min=1)},), strict=False)


def called(program: torch.export.ExportedProgram) -> list[str]:
    return [str(node.target).split(".")[1] for node in program.graph.nodes if node.op == "call_function"]


def test_a_value_made_of_parameters_is_computed_once_in_full_precision() -> None:
    torch.manual_seed(0)
    model = Computes().half()
    program = exported(model, torch.float16)
    fold_parameters(program)
    program.validate()
    weight = program.constants["computed.reshape_as"]
    wide = {
        name: each.float() for name, each in {**dict(model.named_parameters()), **dict(model.named_buffers())}.items()
    }
    gain = (wide["gain"] * 1.7).exp()
    full = F.batch_norm(wide["weight"].reshape(1, 8, -1), None, None, weight=gain, training=True, eps=1e-6)
    assert torch.equal(weight, full.reshape(8, 3, 3, 3).half())
    assert list(program.constants) == ["computed.reshape_as"]


def test_the_rest_stays_and_the_program_computes_the_same() -> None:
    torch.manual_seed(0)
    model = Computes()
    program, x = exported(model, torch.float32), torch.randn(3, 3, 8, 8)
    fold_parameters(program)
    left = called(program)
    assert "batch_norm" not in left
    assert {"conv2d", "view", "rand", "rand_like", "arange"} <= set(left)  # a view, a random number, no parameter
    assert any("upsample" in each for each in left)  # larger than what it is made of
    torch.manual_seed(1)
    found = program.module()(x)
    torch.manual_seed(1)
    for one, other in zip(found, model(x), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


class Standardises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        std, mean = torch.std_mean(self.weight, (1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / std)


def test_one_of_several_results_is_folded_too() -> None:
    model = Standardises()
    program, x = exported(model, torch.float32), torch.randn(3, 3, 8, 8)
    fold_parameters(program)
    assert called(program) == ["conv2d"]
    torch.testing.assert_close(program.module()(x), model(x))
