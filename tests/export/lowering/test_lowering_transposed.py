"""Transposed convolutions as GEMMs compute what they computed, from the same codes and scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from numpy.typing import NDArray
from onnx.reference import ReferenceEvaluator
from torch import nn

import fp4deploy as fd
from fp4deploy.export.lowering.conv_transpose import phases
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.lowering.pattern import find_fp4_layers
from tests.export.lowering.engine_graphs import widened
from tests.samples import sample

CHANNELS, OUTPUTS = 24, 20
GEOMETRIES: list[tuple[Any, int, Any, Any, tuple[int, int]]] = [  # kernel, stride, padding, output padding, image
    (4, 2, 1, 0, (6, 4)),
    (3, 2, 1, 1, (6, 5)),
    (3, 2, 1, 0, (1, 1)),
    (2, 2, 0, 1, (5, 4)),
    (5, 3, 2, 1, (4, 5)),
    ((3, 5), 2, (0, 1), (1, 0), (4, 5)),
    (4, 4, 0, 0, (3, 4)),
    (6, 2, 2, 0, (4, 4)),
    (3, 4, 0, 0, (3, 3)),
    (2, 3, 0, 0, (4, 4)),
]


class Up(nn.Module):
    """A transposed convolution, called as often as asked, between two layers that stay in FP16."""

    def __init__(self, up: nn.ConvTranspose2d, calls: int = 1) -> None:
        super().__init__()
        self.first, self.up, self.last = nn.Conv2d(3, CHANNELS, 1), up, nn.Conv2d(up.out_channels, 4, 1)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(self.calls):
            x = self.up(x)
        return self.last(x)


def exported(up: nn.ConvTranspose2d, size: tuple[int, int], calls: int = 1) -> tuple[onnx.ModelProto, torch.Tensor]:
    model, images = Up(up, calls), torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(1)).half().float()
    fd.prepare(model)
    fd.calibrate(model, images)
    return fd.export_graph(model.eval(), (3, *size)), images


def evaluated(graph: onnx.ModelProto, images: torch.Tensor) -> NDArray[np.float32]:
    (result,) = ReferenceEvaluator(widened(graph)).run(None, {"image": images.numpy()})
    return np.asarray(result)


def compare(graph: onnx.ModelProto, images: torch.Tensor, gemms: int) -> None:
    result = lower(graph, "gemm")
    lowered = result.model
    lowered.functions.extend(graph.functions)
    onnx.checker.check_model(lowered, full_check=True)
    operators = [node.op_type for node in lowered.graph.node]
    assert (operators.count("MatMul"), operators.count("ConvTranspose")) == (gemms, 0)
    (row,) = [layer for layer in result.layers if layer.name == "up"]
    assert (row.form, row.compute, row.weights) == ("gemm", "FP4", "FP4")
    expected = evaluated(graph, images)
    np.testing.assert_allclose(evaluated(lowered, images), expected, rtol=0, atol=3e-6 * np.abs(expected).max())


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "extra", "size"),
    [pytest.param(*case.values[0], marks=case.marks) for case in sample(GEOMETRIES, every=2)],
)
def test_every_geometry(kernel: Any, stride: int, padding: Any, extra: Any, size: tuple[int, int]) -> None:
    torch.manual_seed(0)
    compare(*exported(nn.ConvTranspose2d(CHANNELS, OUTPUTS, kernel, stride, padding, extra), size), gemms=1)


@pytest.mark.filterwarnings("ignore:.*encountered in divide:RuntimeWarning")
def test_a_layer_that_is_called_twice() -> None:
    torch.manual_seed(0)
    compare(*exported(nn.ConvTranspose2d(CHANNELS, CHANNELS, 4, 2, 1), (3, 4), calls=2), gemms=2)


def test_codes_are_those_of_the_file_in_another_order() -> None:
    torch.manual_seed(0)
    graph, _ = exported(nn.ConvTranspose2d(CHANNELS, OUTPUTS, 4, 2, 1), (3, 4))
    lowered = lower(graph, "gemm").model
    for suffix in (".codes", ".scales"):
        (before,), (after,) = (
            [t for t in g.graph.initializer if t.name == f"up.weight{suffix}"] for g in (graph, lowered)
        )
        assert sorted(before.raw_data) == sorted(after.raw_data)
        assert before.raw_data != after.raw_data
        assert (before.dims[0], after.dims[0]) == (OUTPUTS, 4 * OUTPUTS)


@pytest.mark.parametrize(
    "up",
    [
        nn.ConvTranspose2d(32, 32, 4, (2, 1), 1),
        nn.ConvTranspose2d(32, 32, 3, 1, 1),
        nn.ConvTranspose2d(32, 32, 3, 2, 1, dilation=2),
    ],
)
def test_other_forms_stay_convolutions(up: nn.ConvTranspose2d) -> None:
    model, image = nn.Sequential(nn.Conv2d(3, 32, 1), up, nn.Conv2d(32, 4, 1)), torch.rand(1, 3, 4, 4)
    fd.prepare(model)
    fd.calibrate(model, image)
    graph = fd.export_graph(model.eval(), (3, 4, 4))
    (layer,) = find_fp4_layers(ir.from_proto(graph))
    assert phases(layer) is None
    (row,) = [each for each in lower(graph, "gemm").layers if each.name == "1"]
    assert (row.form, row.compute, row.weights) == ("qdq", "FP16", "FP4")


def test_auto_leaves_the_choice_to_gemm() -> None:
    torch.manual_seed(0)
    graph, _ = exported(nn.ConvTranspose2d(CHANNELS, OUTPUTS, 4, 2, 1), (3, 4))
    (row,) = [each for each in lower(graph, "auto").layers if each.name == "up"]
    assert (row.form, row.compute) == ("qdq", "FP16")
    assert "--conv gemm makes it FP4 im2col" in row.reason
