"""Multiply-accumulates against counts by hand and against torch's own counter."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fp4deploy.graph import capture, macs_of
from fp4deploy.graph.costs import macs_by_layer
from fp4deploy.models import build_unet


def test_a_unet_against_torch() -> None:
    model, x = build_unet(5, 0.125).eval(), torch.zeros(1, 3, 32, 48)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert 2 * sum(macs_of(capture(model, x)).values()) == counter.get_total_flops()


def test_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3, padding=1, groups=2), nn.Conv2d(8, 8, 1), nn.ConvTranspose2d(8, 4, 2, stride=2)
    )
    graph = capture(model, torch.zeros(1, 4, 6, 10), dynamic_size=True)
    assert macs_by_layer(graph) == {"0": 8 * 60 * 2 * 9, "1": 8 * 60 * 8, "2": 8 * 60 * 4 * 4}
    assert macs_by_layer(graph, graph.sizes((7, 4, 12, 10)))["1"] == 8 * 120 * 8


def test_linear_matmul_and_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(16, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.project(x).chunk(3, -1)
            return nn.functional.scaled_dot_product_attention(q, k, v) + torch.softmax(q @ k.mT, -1) @ v

    counts = sorted(macs_of(capture(Attention(), torch.zeros(1, 5, 16))).values())
    assert counts == [5 * 5 * 16, 5 * 5 * 16, 5 * 5 * 16 * 2, 5 * 16 * 48]


def test_products_of_parameters_are_not_counted() -> None:
    class Constant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries, self.image = nn.Parameter(torch.randn(6, 16)), nn.Parameter(torch.randn(1, 16, 2, 2))
            self.project, self.up = nn.Linear(16, 16), nn.ConvTranspose2d(16, 16, 2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.project(self.queries) @ x + self.up(self.image).mean()

    graph = capture(Constant(), torch.zeros(1, 16, 5), kept=("project", "up"))
    assert [node.layer for node in graph.nodes if node.op in ("linear", "conv_transpose")] == ["project", "up"]
    assert list(macs_of(graph).values()) == [6 * 5 * 16]
    assert not {"linear", "conv_transpose"} & {node.op for node in capture(Constant(), torch.zeros(1, 16, 5)).nodes}
