"""The rest of a network in FP16, BF16 and FP32: what files hold, that they agree with torch, what FP16 refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export.engine.build import build_engine
from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.export.lowering.lower import lower
from fp4deploy.export.onnx.canonical import is_canonical, rest_of_file
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.to_packed import pack, pack_model
from fp4deploy.packed import PackedFile, PackedNetwork, packed_file, read_packed
from fp4deploy.packed.memory import activation_bytes
from fp4deploy.packed.writer import Writer
from fp4deploy.qat import deployed
from fp4deploy.rest import BF16, FP16, FP32, RESTS, Rest

TYPES = {"fp16": "FLOAT16", "bf16": "BFLOAT16", "fp32": "FLOAT"}
ENDS = {"fp16": "FLOAT16", "bf16": "FLOAT", "fp32": "FLOAT"}
X = torch.randn(2, 16, 8, 8, generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    """Position attention as of MAnet's decoder, whose scores are scaled behind the product: they reach 1e6."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.centre, self.bottom = (nn.Conv2d(16, 16, 1) for _ in range(3))
        self.out = nn.Conv2d(16, 4, 3, padding=1)
        with torch.no_grad():
            for layer in (self.top, self.centre):
                layer.weight.mul_(500.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, c, h, w = x.shape
        top, centre = self.top(x).flatten(2), self.centre(x).flatten(2).transpose(1, 2)
        weights = torch.softmax(centre @ top * 1e-6, -1)
        read = (weights @ self.bottom(x).flatten(2).transpose(1, 2)).transpose(1, 2).reshape(n, c, h, w)
        return self.out(read + x)


class Positions(nn.Module):
    """Counts columns, whose numbers BF16 does not hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        columns = torch.arange(y.shape[-1], dtype=y.dtype, device=y.device)
        return y + (columns - 300.0).abs() / 300.0 + y.argmax(-1, keepdim=True).to(y.dtype) / 300.0


def attention(quantised: bool) -> Attention:
    torch.manual_seed(0)
    model = Attention().eval()
    if quantised:
        fd.prepare(model, include=["bottom", "centre"])
        with pytest.warns(UserWarning, match="65504"):
            fd.calibrate(model, X)
    return model


def packed(model: nn.Module, x: torch.Tensor, rest: Rest) -> PackedFile:
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(model, rest), x, rest=rest))


def types_of(graph: onnx.ModelProto) -> set[str]:
    return {onnx.TensorProto.DataType.Name(each.data_type) for each in graph.graph.initializer}


def ends_of(graph: onnx.ModelProto) -> set[str]:
    values = (*graph.graph.input, *graph.graph.output)
    return {onnx.TensorProto.DataType.Name(each.type.tensor_type.elem_type) for each in values}


@pytest.mark.parametrize("quantised", [pytest.param(False, marks=pytest.mark.variants), True])
def test_what_fp16_refuses_names_the_product_and_the_way_out(quantised: bool, tmp_path: Path) -> None:
    model = attention(quantised)
    for write in (
        lambda: fd.export_onnx(model, X, tmp_path / "a.onnx"),
        lambda: pack(model, tmp_path / "a.fp4", example_inputs=X),
    ):
        with pytest.raises(GateError, match=r"Attention \(.*mm\) reaches [\d.e+]+, and FP16's .*65504.*--rest bf16"):
            write()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("rest", "quantised"), [(BF16, True), pytest.param(FP32, False, marks=pytest.mark.variants)])
def test_what_leaves_fp16_is_right_in_another_rest(rest: Rest, quantised: bool, tmp_path: Path) -> None:
    model = attention(quantised)
    result = fd.export_onnx(model, X, tmp_path / "a.onnx", rest=rest.name, portable=True)
    assert result.verification is not None
    assert result.verification.passed
    graph = onnx.load(result.path)
    assert rest_of_file(graph) is rest
    assert TYPES[rest.name] in types_of(graph)
    assert "FLOAT16" not in types_of(graph)
    assert ends_of(graph) == {"FLOAT"}
    file = pack(model, tmp_path / "a.fp4", example_inputs=X, rest=rest.name).file
    assert read_packed(file.path).graph.rest == rest.name
    with torch.inference_mode():
        expected = PackedNetwork(file)(X)
        found = PackedNetwork(file, dtype=rest.dtype)(X)
        overflowing = PackedNetwork(packed(model, X, FP16), dtype=torch.float16)(X)
    assert isinstance(expected, torch.Tensor)
    assert found.dtype == rest.dtype  # type: ignore[union-attr]
    limit = 1e-5 if rest is FP32 else 0.25 if quantised else 0.02
    assert float((found.float() - expected).abs().max() / expected.abs().max()) < limit  # type: ignore[union-attr]
    assert not overflowing.isfinite().all()  # type: ignore[union-attr]


@pytest.mark.parametrize("rest", RESTS.values(), ids=RESTS)
def test_weights_and_buffers_are_those_of_the_rest(rest: Rest) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 1)).eval()
    model[1].running_mean.uniform_()  # type: ignore[union-attr, operator]
    rounded = deployed(model, rest)
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(rounded.state_dict()[name], value.to(rest.dtype).float())
    x = torch.randn(1, 3, 8, 8)
    graph = fd.export_graph(model, x, rest=rest.name)
    assert ends_of(graph) == {ENDS[rest.name]}
    assert types_of(graph) >= {TYPES[rest.name]}
    assert is_canonical(graph)
    assert fd.verify(model, graph, x).passed
    file = packed(model, x, rest)
    weights = {str(file.tensors[f"{name}.weight"].dtype) for name in ("0", "3")}
    assert weights == {str(rest.dtype)}
    assert {getattr(node, "precision", rest.name) for node in file.graph.nodes} == {rest.name}
    assert activation_bytes(file.graph, 8, 8) == rest.bytes / 2 * activation_bytes(packed(model, x, FP16).graph, 8, 8)


def test_files_of_fp16_are_as_before(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Conv2d(3, 4, 1)), torch.randn(1, 3, 8, 8)
    assert "rest" not in packed(model, x, FP16).graph.to_json()
    assert all(entry.key != "fp4deploy.rest" for entry in fd.export_graph(model, x).metadata_props)
    file = pack(model, tmp_path / "a.fp4", example_inputs=x, rest="bf16").file
    assert file.graph.format() == 7


def test_an_unknown_rest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'tf32'. Valid: fp16, bf16, fp32"):
        fd.export_onnx(nn.Conv2d(3, 4, 1), X[:, :3], tmp_path / "a.onnx", rest="tf32")


@pytest.mark.parametrize("rest", [FP16, BF16], ids=lambda rest: rest.name)
def test_a_compiled_network_multiplies_exact_operands(rest: Rest) -> None:
    """Codes times block scales are exact in both, so that what differs is the rounding of sums alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, bias=False), nn.Conv2d(32, 16, 1, bias=False)).eval()
    fd.prepare(model, include=["0", "1"])
    fd.calibrate(model, X)
    file = packed(model, X, rest)
    writer = Writer(file, torch.device("cpu"), rest.dtype)
    for name, weight in writer.weights.items():
        whole = PackedNetwork(file)._decoded_weight(_layer(file, name), torch.float32)
        order = weight.values.float() * weight.unit
        assert torch.allclose(order.flatten().sort().values, whole.flatten().sort().values, rtol=1e-6, atol=0)
    with torch.inference_mode():
        (y,) = writer.outputs(writer.tensors(), [X])
    assert y.dtype == rest.dtype
    assert y.isfinite().all()


def _layer(file: PackedFile, name: str) -> Any:
    return next(node for node in file.graph.nodes if getattr(node, "layer", None) == name)


def test_positions_stay_fp32_in_bf16() -> None:
    x = torch.randn(1, 3, 2, 600)
    model = Positions().eval()
    with torch.inference_mode():
        expected = deployed(model, BF16)(x)
        found = PackedNetwork(packed(model, x, BF16), dtype=torch.bfloat16)(x)
    assert (found.float() - expected).abs().max() < 0.05  # type: ignore[union-attr]
    graph = fd.export_graph(model, x, rest="bf16")
    assert fd.verify(model, graph, x).passed
    numbers = [each for each in graph.graph.node if each.op_type == "Range"]
    kinds = {value.name: value.type.tensor_type.elem_type for value in graph.graph.value_info}
    assert all(kinds[node.output[0]] != onnx.TensorProto.BFLOAT16 for node in numbers)


class Einsum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("nchw,ndhw->ncd", self.conv(x), x)


def test_operators_that_onnx_lacks_in_bf16_stand_between_casts() -> None:
    graph = fd.export_graph(Einsum(), X, rest="bf16")
    at = next(index for index, node in enumerate(graph.graph.node) if node.op_type == "Einsum")
    before, after = graph.graph.node[at - 1], graph.graph.node[at + 1]
    assert (before.op_type, after.op_type) == ("Cast", "Cast")
    assert fd.verify(Einsum(), fd.export_graph(Einsum(), X), X) is not None
    session = onnxruntime.InferenceSession(to_portable(graph).SerializeToString())
    assert np.isfinite(session.run(None, {session.get_inputs()[0].name: X.numpy()})[0]).all()


@pytest.fixture
def quantised() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 32, 1), nn.Conv2d(32, 4, 1)).eval()
    fd.prepare(model, include=["0", "2"])
    fd.calibrate(model, X)
    return model


@pytest.mark.parametrize("rest", [BF16, FP32], ids=lambda rest: rest.name)
def test_lowered_layers_have_the_type_of_the_rest(quantised: nn.Module, rest: Rest) -> None:
    graph = fd.export_graph(quantised, X, rest=rest.name)
    for conv in ("auto", "qdq", "gemm", "fp8", "plugin"):
        lowered = lower(graph, conv, "tensorrt")
        assert not {"FLOAT16"} & types_of(lowered.model)
        planned = {layer.name: layer for layer in lowered.layers}
        assert planned["3"].compute == rest.label
        assert planned["0"].compute == ("FP4" if conv == "gemm" else rest.label)
        assert ("plugins read and write FP16" in planned["0"].reason) == (conv == "plugin")
        for name in ("0", "2"):
            found = forecast(quantised.get_submodule(name), conv, rest)
            assert (found.compute, found.weights) == (planned[name].compute, planned[name].weights)


@pytest.mark.rtx
def test_an_engine_of_a_bf16_rest(quantised: nn.Module, tmp_path: Path) -> None:
    path = fd.export_onnx(quantised, X, tmp_path / "a.onnx", rest="bf16").path
    built = build_engine(path, tmp_path / "a.plan", arch="sm120").ledger
    actual = {row.layer: row.actual for row in built.layers}
    assert actual == {"0": "BF16", "2": "FP4", "3": "BF16"}
    assert not built.fallbacks()


def test_kernels_of_plain_layers_are_for_16_bits(quantised: nn.Module) -> None:
    """The C library plays other kernels in FP32: `tests.native`."""
    file = packed(quantised, X, FP32)
    with pytest.raises(InputError, match="networks whose rest is FP16 or BF16"):
        PackedNetwork(file, plain="kernel")
