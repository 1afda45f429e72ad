"""Numbers of a network's code that FP16 does not hold: FP32 in the files, compared on images without contrast."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError
from fp4deploy.export.onnx import exporter
from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.decomposed import to_portable
from fp4deploy.export.onnx.session import verifying_session
from fp4deploy.export.verify.flat import flat_inputs
from fp4deploy.export.verify.tensors import call
from fp4deploy.models.card import ModelCard
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.packed.writer import Writer
from fp4deploy.qat import deployed
from fp4deploy.rest import rest_of
from tests.samples import sample

FP16, FP32, INT64 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.INT64


class Network(nn.Module):
    """Two convolutions without bias, the second in FP4, what a class does with them, and an output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.inner = nn.Conv2d(16, 32, 3, padding=1, bias=False)
        self.last = nn.Conv2d(32, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.between(self.inner(self.first(image))))
        return y

    def between(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Normalised(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return F.normalize(x.relu(), dim=1)


class Summed(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu() / (x.relu().sum(1, keepdim=True) + 1e-8)


class Clamped(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.pow(2).sum(1, keepdim=True).clamp(min=1e-9).sqrt()


class Added(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addcmul(x, x.tanh(), x.relu() / (x.relu().sum(1, keepdim=True) + 1e-8), value=0.5)


class Cosine(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * F.cosine_similarity(x, x.flip(1), dim=1)[:, None] * 0.3


class Masked(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = x.flatten(2)
        scores = y.transpose(1, 2) @ y * 0.1
        scores = scores.masked_fill(scores <= scores.amax((1, 2), keepdim=True), -1e9)
        return (y @ scores.softmax(-1)).view_as(x)


class Chosen(Network):
    """A number that is a tensor of the code."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.where(x <= x.amax(1, keepdim=True), torch.tensor(-1e9), x).softmax(1)


class Made(Network):
    """Of the type of an activation, in each way that torch has."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = x.abs() * 0
        y = torch.maximum(y, x.new_tensor(1e-10)) + torch.maximum(y, torch.tensor(1e-10, dtype=x.dtype))
        y = y + torch.as_tensor(1e-10, dtype=x.dtype) + torch.tensor(1e-10).to(x) + torch.tensor(1e-10).type_as(x)
        return x.tanh() * 1e-10 / y


class Filled(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.abs() / torch.maximum(x.abs(), torch.full_like(x, 1e-8))


class Logarithm(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x.relu() * 1e-5 + 1e-10).log()


class Large(Network):
    def between(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 1e6).clamp(min=10).log()


class Held(Network):
    """Numbers that are buffers."""

    epsilon: torch.Tensor
    least: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("epsilon", torch.tensor(1e-10))
        self.register_buffer("least", torch.tensor(-1e9))

    def between(self, x: torch.Tensor) -> torch.Tensor:
        y = x.relu() / (x.relu().sum(1, keepdim=True) + self.epsilon)
        return torch.where(y > 0, y, self.least).softmax(1)


NETWORKS = (Normalised, Summed, Clamped, Added, Cosine, Masked, Made, Chosen, Filled, Held, Large, Logarithm)


@cache
def network(kind: type[Network]) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, image = fd.prepare(kind().eval()), torch.randn(2, 3, 8, 8)
    fd.calibrate(model, image)
    return model.eval(), {"random": image, "black": torch.zeros(2, 3, 8, 8), "white": torch.ones(2, 3, 8, 8)}


@cache
def exported(kind: type[Network]) -> onnx.ModelProto:
    return fd.export_graph(network(kind)[0], (3, 8, 8))


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[type[Network]], PackedFile]:
    """The packed network of a kind, compared with torch."""

    @cache
    def pack(kind: type[Network]) -> PackedFile:
        model, images = network(kind)
        return fd.pack(model, tmp_path_factory.mktemp("own") / "own.fp4", example_inputs=images["random"]).file

    return pack


@pytest.mark.parametrize("kind", sample(NETWORKS, every=6))
def test_files_give_what_torch_gives(kind: type[Network], packed: Callable[[type[Network]], PackedFile]) -> None:
    model, images = network(kind)
    session, network_of_file = verifying_session(to_portable(exported(kind))), PackedNetwork(packed(kind))
    for name, image in images.items():
        with torch.no_grad():
            expected = deployed(model)(image)
        found = torch.from_numpy(session.run(None, {"image": image.numpy()})[0])
        assert expected.isfinite().all()
        assert (found - expected).norm() <= 1e-3 * expected.norm(), name
        assert (network_of_file(image) - expected).norm() <= 1e-3 * expected.norm(), name
    assert fd.verify(model, exported(kind), images["random"]).passed


@pytest.mark.parametrize("kind", sample(NETWORKS, every=3))
def test_layers_stay_fp16_among_operators_in_fp32(kind: type[Network]) -> None:
    graph = onnx.shape_inference.infer_shapes(exported(kind))
    values = [*graph.graph.value_info, *graph.graph.input, *graph.graph.output]
    types = {value.name: value.type.tensor_type.elem_type for value in values}
    layers = [node for node in graph.graph.node if node.op_type in GEMM_OPS]
    assert len(layers) >= 3
    assert {types[node.output[0]] for node in layers} == {FP16}
    wide = {node.op_type for node in graph.graph.node if types.get(node.output[0]) == FP32}
    assert wide - {"DequantizeLinear"} > {"Cast"}
    assert types["logits"] == FP16


@pytest.mark.parametrize("kind", sample(NETWORKS, every=3))
def test_packed_networks_in_fp16_are_finite_and_close(
    kind: type[Network], packed: Callable[[type[Network]], PackedFile]
) -> None:
    """What a GPU computes, compiled or node by node: activations in FP16 but for those that need FP32."""
    model, images = network(kind)
    writer = Writer(packed(kind), torch.device("cpu"), torch.float16)
    for name, image in images.items():
        with torch.no_grad():
            expected = deployed(model)(image)
            (found,) = writer.outputs(writer.tensors(), [image])
        assert found.dtype == torch.float16
        assert (found.float() - expected).norm() <= 0.1 * expected.norm(), name


def test_what_nothing_needs_in_fp32_stays_fp16() -> None:
    class Scaled(Network):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 0.3 + 0.001).clamp(min=0.01).softmax(1)

    graph = onnx.shape_inference.infer_shapes(fd.export_graph(network(Scaled)[0], (3, 8, 8)))
    types = {value.name: value.type.tensor_type.elem_type for value in graph.graph.value_info}
    found = [types[node.output[0]] for node in graph.graph.node if node.op_type in ("Mul", "Add", "Softmax")]
    assert found == [FP16] * 3


@pytest.mark.parametrize("kind", [Normalised, Summed])
def test_a_file_without_such_numbers_is_refused(
    kind: type[Network], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = network(kind)
    monkeypatch.setattr(exporter, "keep_wide", lambda *_: None)
    with pytest.raises(GateError, match="image the file gives NaN or Inf where torch gives finite numbers"):
        fd.export_onnx(model, images["random"], tmp_path / "own.onnx")
    assert not [*tmp_path.iterdir()]


def test_black_and_white_are_those_of_the_card() -> None:
    card = ModelCard("fp16", 0.25, ("a", "b"), 4, 4, (0.5, 0.4, 0.2), (0.25, 0.2, 0.1), True)
    image = torch.rand(2, 3, 4, 4)
    found = dict(flat_inputs(image, card))
    assert [tuple(x.shape) for x in found.values()] == [(1, 3, 4, 4)] * 3  # type: ignore[union-attr]
    assert torch.equal(found["a black"][0, :, 1, 2], torch.tensor([-2.0, -2.0, -2.0]))  # type: ignore[call-overload]
    assert torch.allclose(found["a white"][0, :, 1, 2], torch.tensor([2.0, 3.0, 8.0]))  # type: ignore[call-overload]
    assert torch.allclose(found["a constant"][0, :, 3, 0], image[0].mean((1, 2)))  # type: ignore[call-overload]


class Sized(nn.Module):
    """Numbers that are sizes, and computed of sizes: at 300 x 400 beyond FP16, and below its normal numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, w = x.shape[2:]
        y = x.flatten(2).softmax(-1).view_as(x) * (h * w) + x / (h * w)
        return torch.cat([y, x * (h * w) ** -0.5, h / (x.abs() + 1), w - x, x * (1 / (h * w))], 1)


@pytest.mark.parametrize("rest", ["fp16", "bf16", pytest.param("fp32", marks=pytest.mark.variants)])
def test_sizes_of_open_axes_are_numbers(rest: str) -> None:
    model = Sized().eval()
    graph = fd.export_graph(model, (1, 8, 8), dynamic_size=True, rest=rest)
    inferred = onnx.shape_inference.infer_shapes(graph).graph
    types = {each.name: each.type.tensor_type.elem_type for each in inferred.value_info}
    assert {types[node.output[0]] for node in inferred.node if node.op_type in ("Mul", "Div", "Sub")} <= {FP32, INT64}
    session = verifying_session(to_portable(graph))
    for size, close in (((20, 36), 1e-6), ((300, 400), 2**-11)):  # 1 / 120000 keeps all digits in torch
        x = torch.randn(1, 1, *size).half().bfloat16().float()
        assert fd.verify(model, graph, x).passed
        (found,) = session.run(None, {"image": x.numpy()})
        (expected,) = call(model, x, rest_of(rest))
        for one, other in zip(expected[0], torch.from_numpy(found)[0], strict=True):
            assert (one - other).norm() <= close * one.norm()
