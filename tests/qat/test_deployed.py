"""What is deployed is what a file gives back, and rounding it again changes nothing."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats.scales import deployed_amax
from fp4deploy.qat import calibrate, prepare, quantized_layers
from fp4deploy.qat.load import deployed
from fp4deploy.rest import RESTS


def test_an_amax_is_that_of_its_scale_and_stays() -> None:
    torch.manual_seed(0)
    model = prepare(nn.Sequential(*(nn.Conv2d(16, 16, 1) for _ in range(40))), include="*").eval()
    calibrate(model, torch.randn(2, 16, 3, 3))
    own = torch.stack([layer.input_amax for layer in quantized_layers(model).values()])  # type: ignore[misc]
    assert (deployed_amax(own) != own).any()
    for rest in RESTS.values():
        once = deployed(model, rest)
        found = torch.stack([layer.input_amax for layer in quantized_layers(once).values()])  # type: ignore[misc]
        assert torch.equal(found, deployed_amax(own))
        twice = deployed(once, rest)
        assert all(
            torch.equal(one, other)
            for one, other in zip(once.state_dict().values(), twice.state_dict().values(), strict=True)
        )


def test_a_tensor_that_is_expanded_is_rounded_once() -> None:
    layer = nn.Conv2d(3, 4, 1)
    layer.bias = nn.Parameter(torch.full((1,), 0.1).expand(4))
    layer.register_buffer("mean", torch.full((1,), 0.3).expand(1, 3, 1, 1))
    found = deployed(nn.Sequential(layer), RESTS["bf16"])[0]
    assert torch.equal(found.bias, torch.full((4,), 0.1).bfloat16().float())  # type: ignore[arg-type]
    assert torch.equal(found.mean, torch.full((1, 3, 1, 1), 0.3).bfloat16().float())  # type: ignore[arg-type]
    assert layer.bias[0] == torch.tensor(0.1)  # type: ignore[index]  of the caller


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_parameters_are_finite_and_buffers_may_mask(rest: str, value: float) -> None:
    """Of layers in FP4 and of those that stay as they are: what is NaN is no network."""
    for name in ("0.weight", "0.bias", "1.weight", "1.bias"):
        model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 2, 1))
        model.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        assert deployed(model, RESTS[rest]).mask.tolist() == [0.0, -math.inf]  # type: ignore[union-attr, operator]
        with torch.no_grad():
            model.get_parameter(name).view(-1)[0] = value
        with pytest.raises(InputError, match=f"{name} holds NaN or Inf"):
            deployed(model, RESTS[rest])
