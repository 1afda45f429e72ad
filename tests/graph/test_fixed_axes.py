"""Sizes that a graph holds as numbers although their axes are open."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError
from fp4deploy.graph import capture
from tests.samples import sample


class Around(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 4, 1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.function(self.stem(x)))


FIXED = {
    "a window of the size": lambda x: x * F.avg_pool2d(x, x.shape[2:]),
    "a part of the size": lambda x: F.avg_pool2d(x, (x.shape[2] // 2, 2)),
    "so many pixels": lambda x: x + torch.arange(64.0).view(1, 1, 8, 8),
}
CALLS = {"a window of the size": "avg_pool2d", "a part of the size": "avg_pool2d", "so many pixels": "add"}


def partitioned(x: torch.Tensor) -> torch.Tensor:
    """Windows of 4 x 4, as in Swin: whole multiples fit."""
    n, c, h, w = x.shape
    windows = x.view(n, c, h // 4, 4, w // 4, 4).permute(0, 1, 2, 4, 3, 5)
    return (windows - windows.mean((4, 5), keepdim=True)).permute(0, 1, 2, 4, 3, 5).reshape(n, c, h, w)


FREE = {
    "windows": partitioned,
    "half and back": lambda x: x + F.interpolate(F.max_pool2d(x, 2), x.shape[2:]),
    "a mean": lambda x: x * x.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", FIXED)
def test_the_call_that_fixes_a_size_is_named(name: str) -> None:
    model, x = Around(FIXED[name]).eval(), torch.randn(2, 3, 8, 8)
    call = rf"for a constant at {CALLS[name]} in 'Around' \(test_fixed_axes.py, line \d+\).*without --dynamic-size"
    with pytest.raises(InputError, match=call):
        fd.export_graph(model, x, dynamic_size=True)


def test_the_layer_over_an_open_axis_is_named() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Linear(8, 8)).eval()
    with pytest.raises(InputError, match="for a constant at linear in '1' \\(.*, and it may change"):
        fd.export_graph(model, torch.randn(2, 3, 8, 8), dynamic_size=True)


@pytest.mark.parametrize("name", sample(FIXED, every=2))
def test_a_size_in_the_graph_is_no_open_axis(name: str) -> None:
    function = FIXED[name]
    model, x = Around(function).eval(), torch.randn(2, 3, 8, 8)
    with suppress(InputError):  # or torch closes the axes
        assert capture(model, x, dynamic_size=True).values["x"].shape[2:] == (8, 8)
    with pytest.raises(InputError, match="takes the size of an axis"):
        fd.export_graph(model, x, dynamic_size=True)
    capture(model, x)
    fd.export_graph(model, x)


@pytest.mark.parametrize("name", sample(FREE, every=2))
def test_divisibility_is_no_size(name: str) -> None:
    function = FREE[name]
    model, x = Around(function).eval(), torch.randn(2, 3, 8, 8).half().float()
    assert capture(model, x, dynamic_size=True).values["x"].shape[2:] == (("x.2",), ("x.3",))
    graph = fd.export_graph(model, x, dynamic_size=True)
    assert fd.verify(model, graph, torch.randn(1, 3, 12, 16)).passed
