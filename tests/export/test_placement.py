"""Where Q/DQ nodes stand in the canonical graph: one pair before each quantised layer, after everything else."""

from __future__ import annotations

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.qat import calibrate, prepare

QUANTIZE = "TRT_FP4DynamicQuantize"
AROUND = ("Reshape", "Pad", "Cast", "Identity")


class Paths(nn.Module):
    """A skip, a residual, pooling, a transposed convolution, and one activation that two layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.inner = nn.Conv2d(16, 16, 3, padding=1)
        self.after_residual = nn.Conv2d(16, 32, 3, padding=1)
        self.after_pool = nn.Conv2d(32, 32, 3, padding=1)
        self.beside = nn.Conv2d(32, 32, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.after_skip = nn.Conv2d(48, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(image))
        skip = torch.relu(self.after_residual(x + self.inner(x)))
        pooled = F.max_pool2d(skip, 2)
        deep = self.after_pool(pooled) + self.beside(pooled)
        x = torch.cat([skip, self.up(deep)], 1)
        return self.last(torch.relu(self.after_skip(x)))


@pytest.fixture(scope="module")
def model() -> onnx.ModelProto:
    torch.manual_seed(0)
    model = prepare(Paths().eval())
    calibrate(model, torch.randn(1, 3, 16, 16))
    return export_graph(model, (3, 16, 16))


@pytest.fixture(scope="module")
def graph(model: onnx.ModelProto) -> onnx.GraphProto:
    return model.graph


def quantised_inputs(graph: onnx.GraphProto) -> dict[str, onnx.NodeProto]:
    """Layer -> the node whose output its quantiser reads, reshapes passed over."""
    made = {output: node for node in graph.node for output in node.output}
    found = {}
    for node in graph.node:
        if node.op_type == QUANTIZE:
            above = made[node.input[0]]
            while above.op_type in AROUND:
                above = made[above.input[0]]
            found[node.name.split(".input")[0].split(".quantize")[0]] = above
    return found


@pytest.mark.parametrize(
    ("layer", "producer"),
    [
        ("inner", "Relu"),
        ("after_residual", "Add"),  # the sum is made in FP16, its addends are not quantised
        ("after_pool", "MaxPool"),  # pooled first: a quarter of the elements is quantised
        ("beside", "MaxPool"),  # the same activation, quantised again with this layer's own scale
        ("up", "Add"),
        ("after_skip", "Concat"),  # joined in FP16 first: one global scale for skip and upsampled half
    ],
)
def test_what_is_quantised(graph: onnx.GraphProto, layer: str, producer: str) -> None:
    assert quantised_inputs(graph)[layer].op_type == producer


def test_the_ledger_shows_it(model: onnx.ModelProto) -> None:
    shown = {layer.name: layer.input for layer in lower(model).layers}
    assert shown == {
        "first": "", "inner": "Relu", "after_residual": "Add", "after_pool": "MaxPool", "beside": "MaxPool",
        "up": "Add", "after_skip": "Concat", "last": ""
    }  # fmt: skip


def test_every_quantised_layer_has_its_own_quantiser_and_scale(graph: onnx.GraphProto) -> None:
    scales = [node.input[1] for node in graph.node if node.op_type == QUANTIZE]
    assert len(scales) == len(set(scales)) == 6


def test_outputs_are_not_quantised(graph: onnx.GraphProto) -> None:
    """Between a convolution and the next reader's quantiser there is no Q/DQ node, in particular not after `up`."""
    readers = [node for node in graph.node if node.op_type in ("Relu", "MaxPool", "Concat")]
    made = {output: node.op_type for node in graph.node for output in node.output}
    kinds = {made.get(name, "") for node in readers for name in node.input}
    assert "DequantizeLinear" not in kinds
    assert QUANTIZE not in kinds
