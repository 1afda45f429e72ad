"""The largest magnitudes of what is deployed in FP16: recorded, named with their place, and refused beyond 65504."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.onnx.canonical import LAYERS_KEY, rest_of_file
from fp4deploy.packed import PackedNetwork
from fp4deploy.packed.check import check_graph
from fp4deploy.packed.file import read_packed
from fp4deploy.packed.writer import Writer
from fp4deploy.qat import deployed
from fp4deploy.qat.ranges import Ranges, automatic_rest
from fp4deploy.rest import BF16, FP16, FP32, Rest, rest_of


class Attention(nn.Module):
    """Scores of positions without a scale, as in MAnet: they grow with the square of the features."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.query, self.key = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.query(x).flatten(2), self.key(x).flatten(2)
        scores = torch.matmul(q.transpose(1, 2) * self.gain, k * self.gain).softmax(-1)
        return torch.matmul(x.flatten(2), scores).view_as(x)


class Network(nn.Module):
    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 32, 3, padding=1)
        self.attention, self.last = Attention(gain), nn.Conv2d(32, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.attention(self.inner(self.first(image)).relu()))
        return y


def network(gain: float) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return fd.prepare(Network(gain).eval()), torch.randn(2, 3, 8, 8)


def test_every_result_is_recorded_with_its_place() -> None:
    model, images = network(1.0)
    fd.calibrate(model, images)
    model = deployed(model)
    seen: dict[str, torch.Tensor] = {}
    for name in ("first", "inner", "attention.query", "last"):
        model.get_submodule(name).register_forward_hook(lambda _, __, y, name=name: seen.update({name: y}))
    with torch.no_grad(), Ranges(model, FP16) as ranges:
        model(images)
    for name, y in seen.items():
        assert ranges.largest[name] == float(y.abs().max())
    assert {"Network (relu)", "attention (bmm)", "attention (_softmax)", "first.weight", "last.bias"} < {
        *ranges.largest
    }
    assert "inner.weight" not in ranges.largest  # in FP4
    assert ranges.largest["first.weight"] == float(model.first.weight.abs().max())  # type: ignore[union-attr, operator]
    assert ranges.beyond() == ""


def test_the_largest_of_several_forwards_counts() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False))
    with torch.no_grad(), Ranges(model, FP16) as ranges:
        nn.init.eye_(model[0].weight)  # type: ignore[arg-type]
        for size in (3.0, 7.0, 5.0):
            model(torch.full((1, 2), size))
    assert ranges.largest["0"] == 7.0


def test_what_stays_fp32_may_be_of_any_size() -> None:
    class Wide(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = (x * 1e4).masked_fill(x < 0, -1e9).softmax(-1)
            norm = (x * 1e4).pow(2).sum(-1, keepdim=True)
            return scores + (x / (norm + 1e-8).sqrt()) + F.normalize(x * 1e6, dim=-1)

    model = Wide()
    with Ranges(model, FP16) as ranges:
        model(torch.tensor([[1.0, -1.0, 2.0]]))
    assert ranges.beyond() == ""
    with Ranges(model, FP16) as ranges:
        (torch.tensor([[300.0, 2.0]]).pow(2) + 1.0).sqrt()
    assert ranges.beyond().startswith(
        "Wide (pow) reaches 90000, and FP16's largest number is 65504 (1 other place, too"
    )


def test_infinite_numbers_of_a_mask_are_no_magnitudes() -> None:
    model = nn.Identity()
    with Ranges(model, FP16) as ranges:
        torch.ones(2).masked_fill(torch.tensor([True, False]), float("-inf")).softmax(0)
    assert ranges.beyond() == ""


def test_calibration_warns_with_the_place_and_the_value() -> None:
    model, images = network(1e8)
    with pytest.warns(
        UserWarning, match=r"attention \(mul\) reaches [\d.e+]+, and FP16's largest number is 65504 .*bmm"
    ):
        fd.calibrate(model, images)
    quiet, images = network(1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fd.calibrate(quiet, images)


@pytest.mark.filterwarnings("ignore:attention")
def test_files_that_would_overflow_are_refused(tmp_path: Path) -> None:
    model, images = network(3000.0)
    fd.calibrate(model, images)
    said = r"Network: attention \((mul|bmm)\) reaches \S+, and FP16's largest number is 65504.* Nothing was written"
    with pytest.raises(GateError, match=said):
        fd.export_onnx(model, images, tmp_path / "own.onnx")
    with pytest.raises(GateError, match=said):
        fd.pack(model, tmp_path / "own.fp4", example_inputs=images)
    assert not [*tmp_path.iterdir()]
    assert not fd.verify(model, fd.export_graph(model, images), images).passed
    fd.export_onnx(model, images, tmp_path / "own.onnx", verify=False)


def test_the_file_says_how_large_results_are(tmp_path: Path) -> None:
    model, images = network(1.0)
    fd.calibrate(model, images)
    fd.export_onnx(model, images, tmp_path / "own.onnx", portable=True)
    with torch.no_grad():
        first = deployed(model).first(images)  # type: ignore[operator]
    for path in tmp_path.iterdir():
        (text,) = (each.value for each in onnx.load(path).metadata_props if each.key == LAYERS_KEY)
        found = {name: float(layer["largest"]) for name, layer in json.loads(text).items()}
        assert {*found} == {"first", "inner", "attention.query", "attention.key", "last"}
        assert found["first"] == pytest.approx(float(first.abs().max()), rel=1e-5)


@pytest.mark.parametrize("kind", ["weight", "buffer"])
def test_weights_and_buffers_beyond_it_are_named(kind: str, tmp_path: Path) -> None:
    model, images = network(1.0)
    fd.calibrate(model, images)
    if kind == "weight":
        nn.init.constant_(model.last.weight, -70000.0)  # type: ignore[arg-type, union-attr]
    else:
        model.attention.register_buffer("bias", torch.tensor([0.0, 70000.0]))  # type: ignore[operator, union-attr]
    place = "last.weight" if kind == "weight" else "attention.bias"
    for action in (
        lambda: fd.export_onnx(model, images, tmp_path / "own.onnx"),
        lambda: fd.pack(model, tmp_path / "own.fp4", example_inputs=images),
    ):
        with pytest.raises(InputError, match=f"{place} reaches 70000, and FP16's largest number is 65504"):
            action()


class Written(nn.Module):
    """Writes its result in parts to memory that holds the numbers of something freed just before."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(3, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        x = self.inner(image)
        with _disable_current_modes():
            torch.full(x.shape, 1e30)
        y = torch.empty_like(x)
        y[:, :1], y[:, 1:] = x[:, :1], x[:, 1:] * 2
        return y + x


def test_memory_that_nobody_wrote_yet_is_no_result() -> None:
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad(), Ranges(Written(), FP16) as ranges:
        Written()(x)
    assert not ranges.beyond()
    assert max(ranges.largest.values()) < 20
    assert "Written (add)" in ranges.largest


class Several(Network):
    """A layer whose result leaves the range, too."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image) + self.last(self.first(image) * 3e5) * 1e-6


@pytest.mark.parametrize(
    ("kind", "gain", "chosen"),
    [(Network, 1.0, FP16), (Network, 600.0, replace(FP16, wide=("attention",))), (Several, 1.0, BF16)],
)
def test_the_rest_is_chosen_by_what_is_seen(kind: type[Network], gain: float, chosen: Rest) -> None:
    torch.manual_seed(0)
    model, x = kind(gain).eval(), torch.randn(2, 3, 8, 8)
    assert automatic_rest(deployed(model, FP32), [x]) == chosen
    assert automatic_rest(model.bfloat16(), [x]) == chosen


def attention_in_fp32() -> tuple[nn.Module, torch.Tensor]:
    model, x = network(600.0)
    fd.calibrate(model, x, rest="fp32")
    return model.eval(), x


def test_a_packed_network_computes_a_module_in_fp32(tmp_path: Path) -> None:
    model, x = attention_in_fp32()
    with pytest.raises(GateError, match=r"attention \(\w+\) reaches .* --rest auto"):
        fd.pack(model, tmp_path / "own.fp4", example_inputs=x)
    result = fd.pack(model, tmp_path / "own.fp4", example_inputs=x, rest="auto")
    assert result.verification is not None
    file = read_packed(tmp_path / "own.fp4")
    assert file.graph.rest == "fp16"
    assert list(file.graph.wide) == ["attention"]
    assert rest_of(file.graph) == replace(FP16, wide=("attention",))
    expected = PackedNetwork(file)(x)
    assert isinstance(expected, torch.Tensor)
    writer = Writer(file, torch.device("cpu"), torch.float16)  # what a GPU computes, without a compiler
    (found,) = writer.outputs(writer.tensors(), [x])
    assert found.dtype == torch.float16
    assert (found - expected).norm() < 0.05 * expected.norm()
    without = replace(file, graph=file.graph.model_copy(update={"wide": {}}))
    (spoilt,) = Writer(without, torch.device("cpu"), torch.float16).outputs(writer.tensors(), [x])
    assert not spoilt.isfinite().all() or (spoilt - expected).norm() > 0.5 * expected.norm()
    with pytest.raises(InputError, match="'last' is said to be FP32, and no node but a layer writes it"):
        check_graph(file.graph.model_copy(update={"wide": {"": ["last"]}}))


def test_an_onnx_file_computes_a_module_in_fp32(tmp_path: Path) -> None:
    model, x = attention_in_fp32()
    fd.export_onnx(model, x, tmp_path / "own.onnx", rest="auto")
    graph = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "own.onnx"))
    assert rest_of_file(graph) == replace(FP16, wide=("attention",))
    values = {value.name: value.type.tensor_type.elem_type for value in (*graph.graph.value_info, *graph.graph.output)}
    types = {node.op_type: values[node.output[0]] for node in graph.graph.node if node.op_type in ("MatMul", "Softmax")}
    assert types == dict.fromkeys(("MatMul", "Softmax"), onnx.TensorProto.FLOAT)
    convolutions = {values[node.output[0]] for node in graph.graph.node if node.op_type == "Conv"}
    assert convolutions == {onnx.TensorProto.FLOAT16}
    layers = json.loads(next(each.value for each in graph.metadata_props if each.key == LAYERS_KEY))
    assert layers["attention"] == {
        **layers["attention"], "kind": "Attention", "precision": "FP32", "reason": "leaves FP16's range"
    }  # fmt: skip
    assert fd.verify(model, tmp_path / "own.onnx", x).passed
