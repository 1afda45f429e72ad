"""Weights that a layer's own forward computes: packed where the layer is quantised, else rounded to FP16 once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.export.onnx.layers import layers_of
from fp4deploy.export.verify.nodes import compare_nodes
from fp4deploy.packed import PackedNetwork
from fp4deploy.qat import deployed


class Standardised(nn.Conv2d):
    def standardised(self) -> torch.Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        return F.batch_norm(flat, None, None, training=True, eps=1e-6).reshape_as(self.weight) * 0.3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.standardised(), self.bias, self.stride, self.padding)  # type: ignore[arg-type]


class Functional(nn.Module):
    """No subclass of a layer, and without a quantised class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 32, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, self.weight / self.weight.norm(dim=1, keepdim=True))


def network() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    blocks = [Standardised(32, 32, 3, padding=1), nn.SiLU(), Functional(), nn.SiLU()]
    model: Any = nn.Sequential(Standardised(3, 32, 3), *blocks, Standardised(32, 32, 1), nn.Conv2d(32, 5, 1))
    images = torch.rand(2, 3, 16, 16).half().float()
    fd.prepare(model)
    fd.calibrate(model, images)
    return model.eval(), images


def test_the_file_holds_the_weight_as_computed() -> None:
    model, _ = network()
    graph = fd.export_graph(model, (3, 16, 16))
    assert [(each.name, each.precision) for each in layers_of(graph)] == [
        ("0", "FP16"), ("1", "FP4"), ("3", "FP16"), ("5", "FP4"), ("6", "FP16"),
    ]  # fmt: skip
    assert not {"BatchNormalization", "ReduceMean", "ReduceL2"} & {node.op_type for node in graph.graph.node}
    node = next(each for each in graph.graph.node if each.name == "0")
    held = next(each for each in graph.graph.initializer if each.name == node.input[1])
    weight = deployed(model)[0].standardised().detach().half().numpy()  # type: ignore[index]
    assert np.array_equal(numpy_helper.to_array(held), weight)


def test_the_file_computes_what_torch_computes_where_every_bit_counts() -> None:
    model, images = network()
    graph = fd.export_graph(model, (3, 16, 16))
    found = fd.verify(model, graph, images)
    assert found.share == 1
    assert found.largest < 1e-4


def test_the_packed_network_holds_the_codes_of_the_weight_as_computed(tmp_path: Path) -> None:
    model, images = network()
    packed = fd.pack(model, tmp_path / "net.fp4", example_inputs=images)
    assert {"1.weight.codes", "5.weight.codes"} <= set(packed.file.tensors)
    with torch.inference_mode():
        errors = compare_nodes(deployed(model), PackedNetwork(packed.file), images).errors
    assert {"1", "5"} <= set(errors)
    assert max(errors.values()) < 1e-5
