"""Small outputs: what last bits of float32 decide passes the gates, and no fault does beside it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper, numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError
from fp4deploy.export import to_portable
from fp4deploy.export.to_packed import pack_model
from fp4deploy.export.verify.last_bits import NOISE, movements, noise, settled
from fp4deploy.export.verify.nodes import compare_nodes
from fp4deploy.export.verify.outputs import require_agreement
from fp4deploy.export.verify.packed import verify_packed
from fp4deploy.models.meaning import known_outputs
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.qat import deployed
from fp4deploy.rest import FP32
from tests.export.exported_models import initializer

IMAGES = torch.randn(2, 3, 12, 8, generator=torch.Generator().manual_seed(7)).half().float()
Fault = Callable[[onnx.ModelProto], None]


class Ties(nn.Module):
    """[2, 3, 12, 8] -> 192 pixels of 40 classes, of which the first two are equal: last bits decide where they lead."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(4, 32), nn.Conv2d(32, 40, 1)
        with torch.no_grad():
            self.head.weight.mul_(4)
            self.head.bias[0] += 0.2
            self.head.weight[1], self.head.bias[1] = self.head.weight[0], self.head.bias[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.norm(self.body(F.relu(self.stem(x))))))


class Labels(Ties):
    """[2, 40]: one of the two equal classes leads in both samples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x).mean((2, 3))
        return y + 5 * F.one_hot(torch.tensor([0, 1]), 40).sum(0).to(y)


class Normalised(Ties):
    """Pixels of an image without contrast are equal, and divided by nothing but last bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.stem(x)[..., 1:-1, 1:-1]
        y = (y - y.mean((2, 3), keepdim=True)) / (y.var((2, 3), keepdim=True, unbiased=False) + 1e-12).sqrt()
        return self.head(F.relu(self.body(y)).mean((2, 3), keepdim=True))


@cache
def network(kind: type[Ties], quantized: bool) -> nn.Module:
    torch.manual_seed(0)
    model = kind().eval()
    if quantized:
        fd.calibrate(fd.prepare(model, include="body"), IMAGES)
    return deployed(model)


@cache
def graph_of(kind: type[Ties], quantized: bool) -> bytes:
    return to_portable(fd.export_graph(network(kind, quantized), IMAGES)).SerializeToString()


def constant(name: str, change: Callable[[np.ndarray], np.ndarray]) -> Fault:
    """Another value of a constant."""

    def edit(graph: onnx.ModelProto) -> None:
        tensor = initializer(graph, name)
        array = numpy_helper.to_array(tensor)
        tensor.CopyFrom(numpy_helper.from_array(change(array.copy()).astype(array.dtype), name))

    return edit


def at(index: object, change: Callable[[np.ndarray], object]) -> Callable[[np.ndarray], np.ndarray]:
    def changed(array: np.ndarray) -> np.ndarray:
        array[index] = change(array[index])
        return array

    return changed


def added(index: tuple[object, ...], amount: float) -> Fault:
    """A number on some of the outputs."""

    def edit(graph: onnx.ModelProto) -> None:
        values = np.zeros((2, 40, 12, 8), np.float32)
        values[index] = amount
        graph.graph.initializer.append(numpy_helper.from_array(values, "wrong"))
        next(node for node in graph.graph.node if "logits" in node.output).output[0] = "right"
        graph.graph.node.append(helper.make_node("Add", ["right", "wrong"], ["logits"]))

    return edit


def without(kind: str) -> Fault:
    """The first operator of a kind is left out."""

    def edit(graph: onnx.ModelProto) -> None:
        node = next(each for each in graph.graph.node if each.op_type == kind)
        for reader in graph.graph.node:
            reader.input[:] = [node.input[0] if name == node.output[0] else name for name in reader.input]
        graph.graph.node.remove(node)

    return edit


def shifted_borders(graph: onnx.ModelProto) -> None:
    """The first convolution pads two rows above and none below."""
    node = next(each for each in graph.graph.node if each.op_type == "Conv")
    next(each for each in node.attribute if each.name == "pads").ints[:] = [2, 1, 0, 1]


FAULTS: dict[str, Fault] = {
    "the bias of a class": constant("head.bias", at(5, lambda x: x + 0.5)),
    "the bias of a class that is a tie": constant("head.bias", at(1, lambda x: x + 1e-3)),
    "one weight of a class": constant("head.weight", at((7, 3), lambda x: x + 0.5)),
    "one pixel": added((1, slice(20), 3, 4), 5.0),
    "one value of one pixel": added((0, 39, 11, 7), 0.5),
    "one class of one sample": added((1, 12), 0.4),
    "rows at the border": shifted_borders,
    "one channel of the first layer": constant("stem.weight", at(4, lambda x: 1.2 * x)),
    "the scale of a channel of the norm": constant("norm.weight", at(3, lambda x: 1.1 * x)),
    "an activation that is missing": without("Relu"),
    "weights of a channel": constant("body.weight", at(9, lambda x: -x)),
    "codes of a block": constant("body.weight.dequantized.int8", at((9, 4), lambda x: -x)),
}


def with_last_bits(kind: type[Ties], quantized: bool) -> onnx.ModelProto:
    """A right file that computes with other last bits: of its weights, and of one of the two equal classes."""
    graph = onnx.load_from_string(graph_of(kind, quantized))
    random = np.random.default_rng(0)
    constant("stem.weight", lambda x: x * (1 + 1e-7 * random.standard_normal(x.shape)))(graph)
    constant("head.bias", at(1, lambda x: x + 2e-7))(graph)
    return graph


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", [Ties, Labels])
def test_what_last_bits_decide_passes_and_is_counted(kind: type[Ties], quantized: bool) -> None:
    model = network(kind, quantized)
    found = fd.verify(model, with_last_bits(kind, quantized), IMAGES)
    outputs = found.layerwise.outputs if found.layerwise else found.outputs
    assert found.passed
    assert found.share < 0.999
    assert 0 < outputs[0].undecided < 10
    assert f"({outputs[0].undecided} where last bits of float32 decide)" in found.sentence()


@pytest.mark.parametrize("quantized", [False, True])
def test_equal_pixels_that_are_normalised_pass(quantized: bool) -> None:
    assert not fd.verify(network(Normalised, quantized), with_last_bits(Normalised, quantized), IMAGES).flat


@pytest.mark.parametrize("quantized", [False, True])
def test_a_tie_of_labels_is_not_decided_by_a_fault(quantized: bool) -> None:
    graph = with_last_bits(Labels, quantized)
    constant("head.bias", at(1, lambda x: x + 1e-3))(graph)
    with pytest.raises(GateError, match="disagree"):
        require_agreement(fd.verify(network(Labels, quantized), graph, IMAGES), "network")


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_beside_them_is_refused(name: str) -> None:
    quantized = name != "weights of a channel"
    graph = with_last_bits(Ties, quantized)
    FAULTS[name](graph)
    with pytest.raises(GateError, match="disagree"):
        require_agreement(fd.verify(network(Ties, quantized), graph, IMAGES), "network")


def test_a_number_that_is_lost_is_seen_on_images_without_contrast() -> None:
    graph = with_last_bits(Normalised, quantized=True)
    lost = next(
        each.name for each in graph.graph.initializer if numpy_helper.to_array(each).ravel()[0] == np.float32(1e-12)
    )
    constant(lost, np.zeros_like)(graph)
    with pytest.raises(GateError, match="NaN or Inf"):
        require_agreement(fd.verify(network(Normalised, quantized=True), graph, IMAGES), "network")


@pytest.mark.parametrize(("amount", "passes"), [(2e-7, True), (1e-3, False)])
def test_ties_of_a_packed_network(amount: float, passes: bool) -> None:
    """The file holds FP16; so it is torch whose second class is another one."""
    model = copy.deepcopy(network(Ties, quantized=True))
    file = packed_file(Path("ties.fp4"), None, *pack_model(model, IMAGES))
    with torch.no_grad():
        model.head.bias[1] += amount  # type: ignore[union-attr, index]
    found = verify_packed(model, file, [IMAGES])
    assert found.share < 0.999
    assert found.passed is passes


class Edge(nn.Module):
    """[1, 3, 12, 8] -> values of a convolution in FP4, of whose input one element is multiplied by `factor`."""

    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0
        self.stem, self.body = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1)
        self.register_buffer("place", torch.zeros(1, 16, 12, 8))
        self.place[0, 5, 0, 0] = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.stem(x) * (1 + (self.factor - 1) * self.place))


@cache
def edge(kind: type[Edge] = Edge, everywhere: bool = False) -> tuple[Edge, torch.Tensor, float, float]:
    """The network, its image, and neighbouring factors between which the element's code changes.

    everywhere: in every pixel, of a small image of one colour.
    """
    torch.manual_seed(0)
    model, images = kind().eval(), IMAGES[:1]
    if everywhere:
        model.place, images = torch.zeros(1, 16, 2, 3), IMAGES[:1, :, :1, :1].repeat(1, 1, 2, 3)
        model.place[0, 5] = 1.0
    fd.calibrate(fd.prepare(model, include=["body", "tail"] if kind is TwoEdges else "body"), images)
    model = deployed(model, FP32)

    def output(factor: float) -> torch.Tensor:
        model.factor = factor
        with torch.no_grad():
            return model(images)[0, :, 0, 0]

    low, high = 0.5, 1.0
    start = output(low)
    while high - low > 1e-7:
        middle = (low + high) / 2
        low, high = (middle, high) if torch.equal(output(middle), start) else (low, middle)
    return model, images, low, high


@pytest.mark.parametrize(
    ("beyond", "everywhere", "passes"), [(0.0, False, True), (1e-4, False, False), (0.0, True, False)]
)
def test_an_element_at_a_rounding_boundary_of_a_packed_network(beyond: float, everywhere: bool, passes: bool) -> None:
    """Its pixel differs in every channel: by the file's last bits, or since a number of the file is another one.

    Where every pixel does, no last bits are taken for the cause.
    """
    model, images, low, high = edge(everywhere=everywhere)
    model.factor = low
    file = packed_file(Path("edge.fp4"), None, *pack_model(model, images, rest=FP32))
    model.factor = high + beyond
    with torch.no_grad():
        assert set(compare_nodes(model, PackedNetwork(file), images).wrong) == {"body"}
    found = verify_packed(model, file, [images])
    assert found.passed is passes
    assert [node for node, _ in found.wrong_nodes] == ([] if passes else ["body"])


class TwoEdges(Edge):
    """`Edge`, and a layer in FP4 behind it; the element in front of that and of the output is multiplied by `then`."""

    def __init__(self) -> None:
        super().__init__()
        self.then = [1.0, 1.0]
        self.body, self.tail = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before, behind = (1 + (factor - 1) * self.place for factor in self.then)
        return self.tail(super().forward(x) * before) * behind


@pytest.mark.parametrize(("place", "passes"), [(None, True), (0, False), (1, False)])
def test_noise_does_not_pass_from_a_layer_to_the_next(place: int | None, passes: bool) -> None:
    """Of an element at a boundary its layer alone may differ: not what the next layer, or the output, has there."""
    model, images, low, high = edge(TwoEdges)
    model = copy.deepcopy(model)
    model.factor = low
    file = packed_file(Path("edges.fp4"), None, *pack_model(model, images, rest=FP32))
    model.factor = high
    if place is not None:
        model.then[place] = (1.25, 10.0)[place]
    found = verify_packed(model, file, [images])
    assert found.passed is passes
    assert [node for node, _ in found.wrong_nodes] == ([] if place != 0 else ["tail"])


def test_a_tie_of_whole_numbers_is_rounded_as_the_format_says() -> None:
    """Runtimes compute whole numbers, and the format's formulas, alike: 5 between 4 and 6 is 4."""
    stem, body = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 1)
    images = torch.ones(1, 3, 12, 8)
    images[..., 2:5] = 0
    with torch.no_grad():
        stem.weight.zero_()[5, 0] = 1
        cast(torch.Tensor, stem.bias).fill_(6.0)[5] = 5.0
    model = nn.Sequential(OrderedDict(stem=stem, body=body)).eval()
    fd.calibrate(fd.prepare(model, include="body"), images)
    cast(torch.Tensor, body.input_amax).fill_(1344.0)
    model = deployed(model, FP32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter("stem.bias")[5] += 5e-6
    file = packed_file(Path("ties.fp4"), None, *pack_model(other, images, rest=FP32))
    found = verify_packed(model, file, [images])
    assert [node for node, _ in found.wrong_nodes] == ["stem"]
    assert not found.passed


class Deep(nn.Module):
    """[1, 3, 32, 32] -> pixels of classes behind 16 layers in FP4, which amplify last bits."""

    align = False

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 10, 1)
        self.body = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(16))
        self.norm = nn.GroupNorm(4, 32, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.stem(x))
        for layer in self.body:
            y = F.relu(self.norm(layer(y))) + 0.5 * y
        return F.interpolate(self.head(y), scale_factor=2.0, mode="bilinear", align_corners=self.align)


@cache
def deep() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(1)
    model, images = Deep().eval(), torch.randn(1, 3, 32, 32).half().float()
    fd.calibrate(fd.prepare(model, include="body*"), images)
    return deployed(model), images


def test_fp4_does_not_amplify_noise_until_it_explains_a_fault() -> None:
    model, images = copy.deepcopy(deep()[0]), deep()[1]
    file = packed_file(Path("deep.fp4"), None, *pack_model(model, images))
    model.align = True  # type: ignore[assignment]
    found = verify_packed(model, file, [images], known_outputs(said="classes"))
    assert not found.passed
    assert "with reference inputs still" in found.place


def test_a_quantiser_that_is_missing_is_no_last_bit() -> None:
    model, images = deep()
    graph = to_portable(fd.export_graph(model, images))
    nodes = {node.name: node for node in graph.graph.node}
    nodes["body.15"].input[0] = nodes["body.15.input.flat"].input[0]
    with pytest.raises(GateError, match=r"cannot be compared layer by layer.*: body\.15"):
        require_agreement(fd.verify(model, graph, images, outputs="classes"), "network")


def test_noise_has_the_size_of_last_bits() -> None:
    x = torch.rand(100_000) + 0.25
    with noise(nn.Identity(), 0) as own:
        moved = own.on(x)
    assert (moved / x - 1).std().item() == pytest.approx(NOISE, rel=0.05)


def test_noise_leaves_views_and_whole_numbers() -> None:
    x = torch.arange(1.0, 7.0) / 3
    with noise(nn.Identity(), 0):
        y = x.clone().view(2, 3)
        row = y[0]
        row.zero_()  # of y, too
        whole, counted = torch.floor(x), torch.arange(3) + 1
    assert not y[0].any()
    assert 0 < (y[1] - x[3:]).abs().max() < 3e-6
    assert torch.equal(whole, x.floor())
    assert torch.equal(counted, torch.tensor([1, 2, 3]))


def test_what_moves_too_much_explains_nothing() -> None:
    def sign(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.sign(x - x.mean()) + 1, x + 0.1, torch.sqrt(x - x.mean())]  # NaN below the mean

    x = torch.full((1, 8), 0.3)
    expected = sign(x)
    moves = movements(nn.Identity(), sign, x, expected, lambda moved: [1.0, 0.0, 0.0])
    assert not moves[0].any()
    assert 0 < moves[1].max() < 1e-5
    assert 0 < moves[2].max() < 1e-2
    assert torch.isnan(settled(expected[1], torch.full((1, 8), torch.nan), moves[1])).all()
    assert torch.equal(settled(expected[1], expected[1] + 1e-7, moves[1]), expected[1])
