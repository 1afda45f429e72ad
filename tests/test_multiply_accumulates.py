"""Every count of multiply-accumulates is torch's own: of unequal channels, groups, strides, transposed, of a batch."""

from __future__ import annotations

import math
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import fp4deploy as fd
from fp4deploy.bench.layers import step_operations
from fp4deploy.export.lowering.plan import count_macs
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.graph.costs import work_of_layers
from fp4deploy.packed import PackedNetwork, read_packed
from fp4deploy.packed.graph import Layer
from fp4deploy.packed.memory import input_shapes
from fp4deploy.packed.shapes import shapes_of, weight_shape
from fp4deploy.timing.network import _product

SIZE, BATCH = (12, 20), 2


class Network(nn.Module):
    """One layer of each kind, none as wide as another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.grouped = nn.Conv2d(3, 32, (3, 5), (2, 1), 1), nn.Conv2d(32, 48, 3, padding=1, groups=2)
        self.up, self.wide = nn.ConvTranspose2d(48, 16, 2, 2), nn.ConvTranspose2d(16, 32, 3, 2, 1)
        self.flat, self.last = nn.Linear(32, 24), nn.Conv2d(24, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.up(self.grouped(self.first(x).relu()).relu()))
        return self.last(self.flat(x.movedim(1, -1)).movedim(-1, 1))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    prepared = fd.prepare(Network(), include=["up", "wide", "flat"])
    fd.calibrate(prepared, image())
    return prepared.eval()


def image(batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, 3, *SIZE, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def counted() -> dict[str, int]:
    """By torch, of one image."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        Network()(image(1))
    found = counter.get_flop_counts()
    return {name.removeprefix("Network."): sum(each.values()) // 2 for name, each in found.items() if "." in name}


def test_of_layers_in_torch(model: nn.Module, counted: dict[str, int]) -> None:
    layers = dict(model.named_children())
    assert {name: each.macs for name, each in work_of_layers(model, layers, image(1)).items()} == counted


def test_of_a_file_for_one_image(model: nn.Module, counted: dict[str, int]) -> None:
    assert count_macs(ir.from_proto(export_graph(model, (3, *SIZE), batch=BATCH))) == counted


def test_of_a_packed_network_and_of_its_time(model: nn.Module, counted: dict[str, int], tmp_path: Path) -> None:
    fd.pack(model, tmp_path / "own.fp4", example_inputs=image(), verify=False)
    network = PackedNetwork(read_packed(tmp_path / "own.fp4"))
    shapes = shapes_of(network.graph, input_shapes(network.graph, SIZE, BATCH))
    layers = {node.layer: node for node in network.graph.nodes if isinstance(node, Layer)}
    assert {name: step_operations(network, node, shapes) for name, node in layers.items()} == {
        name: 2 * BATCH * macs for name, macs in counted.items()
    }
    for name, node in layers.items():
        source = shapes[node.inputs[0]]
        weight = weight_shape(network.graph, node, source[-1 if name == "flat" else 1])
        product = _product(node, source, shapes[node.outputs[0].name], weight)
        assert math.prod(product) == pytest.approx(BATCH * counted[name]), name
