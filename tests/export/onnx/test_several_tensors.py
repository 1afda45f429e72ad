"""Networks with several inputs and outputs: calibrated, exported, verified, packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnxruntime as ort
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import InputError

Tensors = dict[str, torch.Tensor]


class TwoSources(nn.Module):
    """Colours and depth in, classes and edges out."""

    def __init__(self) -> None:
        super().__init__()
        self.colour, self.depth = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(1, 16, 3, padding=1)
        self.body = nn.Conv2d(32, 32, 3, padding=1)
        self.classes, self.edges = nn.Conv2d(32, 4, 1), nn.Conv2d(32, 1, 1)

    def forward(self, image: torch.Tensor, distance: torch.Tensor) -> Any:
        x = torch.cat([self.colour(image), self.depth(distance)], 1)
        x = torch.relu(self.body(torch.relu(x)))
        return {"out": self.classes(x), "edges": self.edges(x)}


class Pair(TwoSources):
    def forward(self, image: torch.Tensor, distance: torch.Tensor) -> Any:
        return tuple(super().forward(image, distance).values())


def inputs(seed: int = 0, size: tuple[int, int] = (16, 24)) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(2, c, *size, generator=generator) for name, c in (("image", 3), ("distance", 1))}


def prepared(kind: type[nn.Module] = TwoSources) -> nn.Module:
    torch.manual_seed(0)
    model = fd.prepare(kind().eval(), include="body")
    fd.calibrate(model, [(tuple(inputs(1).values()), torch.zeros(2))])
    return model


def test_a_batch_may_be_a_dict_or_a_tuple_of_several_inputs() -> None:
    one, other = prepared(), prepared()
    fd.calibrate(other, inputs(1))
    assert one.body.input_amax > 0
    assert torch.equal(one.body.input_amax, other.body.input_amax)


@pytest.mark.parametrize("named", [True, False])
def test_names_of_inputs_and_outputs(named: bool, tmp_path: Path) -> None:
    model, given = prepared(), inputs()
    example: Any = given if named else tuple(given.values())
    result = fd.export_onnx(model, example, tmp_path / "model.onnx", portable=True)
    assert result.verification is not None
    assert result.verification.passed
    assert result.portable_path is not None
    session = ort.InferenceSession(result.portable_path)
    assert [value.name for value in session.get_inputs()] == ["image", "distance"]
    assert [value.name for value in session.get_outputs()] == ["out", "edges"]
    expected = model(**given)
    for name, value in zip(("out", "edges"), session.run(None, {k: x.numpy() for k, x in given.items()}), strict=True):
        assert torch.allclose(torch.from_numpy(value), expected[name], atol=0.02), name


def test_outputs_of_a_tuple_are_numbered() -> None:
    graph = fd.export_graph(prepared(Pair), tuple(inputs().values()))
    assert [value.name for value in graph.graph.output] == ["output_0", "output_1"]
    assert fd.verify(prepared(Pair), graph, tuple(inputs(2).values())).passed


def test_open_sizes_of_two_inputs_have_one_name() -> None:
    graph = fd.export_graph(prepared(), inputs(), dynamic_size=True)
    sizes = [[axis.dim_param for axis in value.type.tensor_type.shape.dim[2:]] for value in graph.graph.input]
    assert sizes == [["H", "W"], ["H", "W"]]
    assert fd.verify(prepared(), graph, inputs(3, (20, 28))).passed


def test_an_engine_of_several_inputs(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx", reason="TensorRT-RTX is not installed (pip install tensorrt-rtx)")
    graph = fd.export_graph(prepared(), inputs(), dynamic_size=True)
    onnx.save(graph, tmp_path / "model.onnx")
    built = fd.build_engine(tmp_path / "model.onnx", tmp_path / "model.plan", conv="gemm", size=(16, 24))
    assert built.ledger.totals().fell_back == 0


def test_an_error_in_the_second_output_is_found() -> None:
    """A file of another network agrees in `out` alone."""
    model, other = prepared(), prepared()
    with torch.no_grad():
        other.edges.weight.mul_(-1)
    found = fd.verify(model, fd.export_graph(other, inputs()), inputs(2))
    assert not found.passed
    assert found.layerwise is not None


def test_a_missing_input_is_named() -> None:
    graph = fd.export_graph(prepared(), inputs())
    with pytest.raises(InputError, match="The file reads image, distance"):
        fd.verify(prepared(), graph, inputs()["image"])


def test_one_channel_is_compared_by_its_values() -> None:
    """The class of a single channel is always 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 1, 1)).eval()
    wrong = nn.Sequential(nn.Conv2d(3, 16, 3), nn.Conv2d(16, 1, 1)).eval()
    graph = fd.export_graph(model, (3, 8, 8))
    images = torch.randn(2, 3, 8, 8)
    assert fd.verify(model, graph, images).passed
    assert not fd.verify(wrong, graph, images).passed


def test_several_inputs_are_packed(tmp_path: Path) -> None:
    result = fd.pack(prepared(), tmp_path / "model.fp4", example_inputs=inputs())
    assert result.verification is not None
    assert [each.name for each in result.file.graph.outputs] == ["out", "edges"]
    runtime = fd.open_runtime(tmp_path / "model.fp4")
    assert [port.described for port in runtime.inputs] == [
        "image float32 [N, 3, 16, 24]", "distance float32 [N, 1, 16, 24]"
    ]  # fmt: skip
    with pytest.raises(InputError, match="'image' takes float32"):
        runtime(*inputs(2, (20, 28)).values())
