"""Multiply-accumulates against counts by hand and against torch's own counter."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fp4deploy.graph.costs import MULTIPLYING, Work, work_of_layers
from fp4deploy.models import build_unet


def multiplying(model: nn.Module) -> dict[str, nn.Module]:
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, MULTIPLYING)}


def test_a_unet_against_torch() -> None:
    model, x = build_unet(5, 0.125).eval(), torch.zeros(1, 3, 32, 48)
    with FlopCounterMode(display=False) as counter:
        model(x)
    work = work_of_layers(model, multiplying(model), x)
    assert 2 * sum(each.macs for each in work.values()) == counter.get_total_flops()


def test_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, stride=2)
    )
    work = work_of_layers(model, multiplying(model), torch.zeros(1, 4, 6, 10))
    assert {name: each.macs for name, each in work.items()} == {
        "0": 8 * 60 * 2 * 9,
        "1": 8 * 60 * 8,
        "2": 8 * 60 * 4 * 4,
    }
    assert work["2"][:2] == (8 * 60, 4 * 240)


def test_a_layer_that_is_called_twice_or_never() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project, self.never = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.project(self.project(x))

    model = Twice()
    expected = {"project": Work(2 * 80, 2 * 80, 2 * 5 * 16 * 16), "never": Work()}
    assert work_of_layers(model, multiplying(model), torch.zeros(1, 5, 16)) == expected
