"""What a captured graph says of a module: operators, layers, attributes, sizes; and what cannot be captured."""

from __future__ import annotations

import copy
import math
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.graph import export_graph
from fp4deploy.export.to_packed import pack_model
from fp4deploy.graph import Graph, UnsettledSizes, capture, evaluate
from fp4deploy.graph.growth import MAX_OPERATORS
from fp4deploy.models import build_unet
from fp4deploy.packed import PackedNetwork, packed_file
from fp4deploy.qat import prepare, restore


class Mixture(nn.Module):
    """Layers in place, a shared layer, a gate, attention, sizes taken from other tensors, two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.act = nn.ReLU(inplace=True)
        self.shared = nn.Conv2d(16, 16, (3, 5), padding="same", groups=2)
        self.position = nn.Parameter(torch.zeros(1, 1, 16))
        self.tokens = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.act(self.norm(self.first(x)))
        y = self.shared(y) + y
        y += self.shared(y)
        y = y * torch.sigmoid(F.adaptive_avg_pool2d(y, 1))
        b, c, h, w = y.shape
        t = self.tokens(y.flatten(2).transpose(1, 2) + self.position)
        q, k = self.mix(t).chunk(2, dim=-1)
        t = self.drop(F.scaled_dot_product_attention(q, k, t))
        y = t.transpose(1, 2).reshape(b, c, h, w)
        out = F.interpolate(self.up(y), size=x.shape[-2:], mode="bilinear")
        return {"out": torch.cat([out, x], 1), "small": F.hardswish(y)[:, :4]}


@pytest.fixture(scope="module")
def fixed() -> Graph:
    return capture(Mixture(), torch.zeros(1, 3, 16, 24))


@pytest.fixture(scope="module")
def dynamic() -> Graph:
    return capture(Mixture(), torch.zeros(1, 3, 16, 24), dynamic_size=True)


def nodes(graph: Graph, op: str) -> list[Any]:
    return [node for node in graph.nodes if node.op == op]


def test_operators_in_order(fixed: Graph) -> None:
    assert [node.op for node in fixed.nodes] == [
        "conv", "batch_norm", "relu", "conv", "add", "conv", "add", "adaptive_avg_pool", "sigmoid", "mul", "reshape",
        "permute", "add", "layer_norm", "linear", "slice", "slice", "attention", "permute", "reshape", "conv_transpose",
        "resize", "concat", "hardswish", "slice",
    ]  # fmt: skip


def test_a_node_names_its_layer_and_parameters(fixed: Graph) -> None:
    first = fixed.nodes[0]
    assert (first.layer, dict(first.parameters)) == ("first", {"weight": "first.weight"})
    assert dict(fixed.nodes[1].parameters) == {
        name: f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    }
    assert first.attributes == {
        "stride": (2, 2), "padding": (1, 1), "dilation": (1, 1), "groups": 1, "weight_shape": (16, 3, 3, 3),
    }  # fmt: skip
    assert "test_capture.py, line" in first.where
    assert nodes(fixed, "add")[2].parameters == {"other": "position"}


def test_a_layer_called_twice_is_two_nodes(fixed: Graph) -> None:
    calls = dict(fixed.layers())["shared"]
    assert [node.op for node in calls] == ["conv", "conv"]
    assert {node.attributes["padding"] for node in calls} == {(1, 2)}


def test_calls_in_place_read_the_changed_value(fixed: Graph) -> None:
    relu, (plain, accumulated, _) = nodes(fixed, "relu")[0], nodes(fixed, "add")
    assert relu.inputs == {"input": fixed.nodes[1].name}
    assert plain.inputs["other"] == relu.name
    assert nodes(fixed, "mul")[0].inputs["input"] == accumulated.name


def test_outputs_keep_their_names(fixed: Graph) -> None:
    assert [name for name, _ in fixed.outputs] == ["out", "small"]
    shapes = [fixed.values[value].shape for _, value in fixed.outputs]
    assert shapes == [(("x.0",), 11, 16, 24), (("x.0",), 4, 8, 12)]
    assert (fixed.inputs, fixed.example) == (("x",), {"x.0": 2, "x.1": 3, "x.2": 16, "x.3": 24})


@pytest.mark.parametrize("height", [16, 22, 64])
def test_sizes_follow_the_input(dynamic: Graph, height: int) -> None:
    sizes = dynamic.sizes((5, 3, height, 32))
    resize = nodes(dynamic, "resize")[0]
    assert [evaluate(size, sizes) for size in resize.attributes["size"]] == [height, 32]
    reshaped = nodes(dynamic, "reshape")[0].attributes["shape"]
    assert [evaluate(size, sizes) for size in reshaped] == [5, 16, height // 2 * 16]


def test_every_shape_is_that_of_torch(dynamic: Graph) -> None:
    model, seen = Mixture().eval(), dict[str, tuple[int, ...]]()

    def keep(name: str) -> Any:
        return lambda _layer, _inputs, output: seen.update({name: tuple(output.shape)})

    for name, layer in model.named_children():
        layer.register_forward_hook(keep(name))
    model(torch.zeros(3, 3, 20, 36))
    sizes = dynamic.sizes((3, 3, 20, 36))
    for layer, calls in dynamic.layers():
        if layer in seen:
            assert tuple(evaluate(size, sizes) for size in dynamic.values[calls[0].name].shape) == seen[layer]


def test_an_uneven_same_padding_is_a_pad_before_the_convolution() -> None:
    graph = capture(nn.Conv2d(2, 4, (2, 3), padding="same"), torch.zeros(2, 2, 8, 8))
    assert [node.op for node in graph.nodes] == ["pad", "conv"]
    assert graph.nodes[0].attributes["pad"] == (1, 1, 0, 1)
    assert graph.values[graph.nodes[0].name].shape == (("input.0",), 2, 9, 10)
    assert graph.values[graph.nodes[1].name].shape == (("input.0",), 4, 8, 8)


def test_the_unet() -> None:
    model = build_unet(5, 0.125)
    graph = capture(model, torch.zeros(1, 3, 32, 32))
    assert {layer for layer, _ in graph.layers()} == {
        name for name, module in model.named_modules() if list(module.parameters(recurse=False))
    }
    assert [name for name, _ in graph.outputs] == [""]


def test_several_inputs_and_a_tuple() -> None:
    class Two(nn.Module):
        def forward(self, image: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return image * mask, 1 - mask

    graph = capture(Two(), {"image": torch.zeros(1, 3, 8, 8), "mask": torch.zeros(1, 1, 8, 8)})
    assert graph.inputs == ("image", "mask")
    assert [name for name, _ in graph.outputs] == ["0", "1"]
    assert [(node.op, node.attributes.get("number")) for node in graph.nodes] == [
        ("mul", None),
        ("mul", -1),
        ("add", 1),
    ]


def test_an_unknown_operation_keeps_its_name() -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.i0(x).sum(1) + torch.sort(x, 1)[1].sum(1)

    nodes = capture(Odd(), torch.zeros(2, 3)).nodes
    assert nodes[0].op == "aten.i0"
    (positions,) = (node for node in nodes if node.op == "aten.sort")
    assert positions.attributes["result"] == 1


def test_what_depends_on_no_input_is_a_constant() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weight = (self.weight - self.weight.mean()) / self.weight.std()
            return nn.functional.conv2d(x, weight, self.bias) * torch.tensor(0.5)

    layer = Standardised(3, 8, 3)
    (conv, half) = capture(layer, torch.zeros(2, 3, 8, 8)).nodes
    graph = capture(layer, torch.zeros(2, 3, 8, 8))
    expected = (layer.weight - layer.weight.mean()) / layer.weight.std()
    assert torch.equal(graph.constants[conv.parameters["weight"]], expected)
    assert float(graph.constants[half.parameters["other"]]) == 0.5


def test_unknown_operations_are_decomposed() -> None:
    class Mixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.glu(torch.stack([x, x], 1).flatten(1, 2), 1)

    ops = {node.op for node in capture(Mixed(), torch.zeros(2, 4, 8, 8)).nodes}
    assert ops <= {"reshape", "concat", "slice", "sigmoid", "mul"}


class Branch(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x
        return -x


class Count(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x.sum().item())]


@pytest.mark.parametrize("model", [Branch(), Count()])
def test_control_flow_by_values_is_named_with_its_line(
    model: nn.Module, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(InputError, match=r"decides by values .*\(test_capture\.py, line \d+\).*torch\.where"):
        capture(model, torch.zeros(2, 3))
    assert capfd.readouterr() == ("", ""), "the error alone, without torch's listing of the graph"
    assert not [record for record in caplog.records if record.levelname != "DEBUG"]


def test_a_batch_that_is_a_constant_is_named() -> None:
    class Fixed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(len(x), 1)

    with pytest.raises(InputError, match=r"Fixed takes the size of an axis \(batch\) for a constant.*x\.shape"):
        capture(Fixed(), torch.zeros(2, 3))


@pytest.mark.parametrize("dynamic_size", [False, True])
def test_a_prepared_network_is_refused_and_captured_once_it_is_plain(dynamic_size: bool) -> None:
    """Traced with its quantisers it has thousands of nodes; the sizes of FPN's were not known after minutes."""
    model = prepare(nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 1)), include=["2"])
    with pytest.raises(InputError, match=r"Sequential has fake-quantised layers \(1; the first: 2\).*restore"):
        capture(model, torch.zeros(1, 3, 8, 8), dynamic_size)
    plain = capture(restore(copy.deepcopy(model)), torch.zeros(1, 3, 8, 8), dynamic_size)
    assert [node.op for node in plain.nodes] == ["conv", "relu", "conv"]
    with pytest.raises(InputError, match="the first: itself"):
        capture(model[2], torch.zeros(1, 16, 8, 8), dynamic_size)


def test_a_failure_of_the_code_is_named_with_its_line() -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.zeros(7)

    with pytest.raises(InputError, match=r"cannot capture Wrong \(test_capture\.py, line \d+\)"):
        capture(Wrong(), torch.zeros(2, 3))


@pytest.mark.parametrize("example", [(), torch.zeros(()), torch.zeros(0, 3), [1, 2]])
def test_wrong_examples(example: Any) -> None:
    with pytest.raises(InputError, match="example_inputs is a tensor"):
        capture(nn.ReLU(), example)


def test_an_output_that_is_no_tensor() -> None:
    class Number(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x.relu(), 3

    with pytest.raises(InputError, match="output 1 is no tensor"):
        capture(Number(), torch.zeros(2, 3))


def test_the_module_is_not_changed() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    capture(model, torch.ones(1, 3, 8, 8))
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_an_error_of_the_machine_is_not_the_networks(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch.export, "export", full)
    with pytest.raises(OSError, match="No space left"):
        capture(nn.Conv2d(3, 4, 1), torch.zeros(1, 3, 8, 8))


class PaddedByItsSize(nn.Module):
    """Pads before each stride so that nothing is cut off, as networks converted from TensorFlow do."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, 2) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            height, width = (max((math.ceil(size / 2) - 1) * 2 + 3 - size, 0) for size in x.shape[-2:])
            x = layer(F.pad(x, [width // 2, width - width // 2, height // 2, height - height // 2]))
        return x


@pytest.mark.parametrize(("layers", "most"), [(1, 4), pytest.param(3, MAX_OPERATORS, marks=pytest.mark.nightly)])
def test_sizes_that_grow_from_layer_to_layer_are_refused(
    layers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer more takes threefold."""
    monkeypatch.setattr("fp4deploy.graph.growth.MAX_OPERATORS", most)
    model, x = PaddedByItsSize(layers), torch.zeros(1, 3, 64, 64)
    place = r"\(test_capture.py, line \d+\)"
    with pytest.warns(
        UserWarning,
        match=f"PaddedByItsSize computes sizes {place} that follow.* takes inputs of the example's size alone",
    ):
        graph, _ = pack_model(model, x)
    assert graph.inputs[0].free == [0]
    with pytest.raises(UnsettledSizes, match="PaddedByItsSize computes sizes .* without --dynamic-size"):
        export_graph(model, (3, 64, 64), dynamic_size=True)


class RoundedInTwoWays(nn.Module):
    """A stride-2 convolution rounds up, a pooling down; behind both, floor(h / 2 / 2) is compared with floor(h / 4)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 5, 3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.cat([self.first(x), nn.functional.max_pool2d(x, 2)], 1)
        return self.second(x) + nn.functional.max_pool2d(x, 2)


def test_sizes_that_torch_cannot_decide_on() -> None:
    """Refused by name with an open size instead of by sympy's message; with a fixed size it is exported."""
    model = RoundedInTwoWays().eval()
    with pytest.raises(UnsettledSizes, match="RoundedInTwoWays joins tensors.* rounded down.* without --dynamic-size"):
        export_graph(model, (3, 64, 64), dynamic_size=True)
    assert export_graph(model, (3, 64, 64)).graph


class WithRegions(nn.Module):
    """Autocast switched off for some layers, calls in place among them, and a part without channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Conv2d(3, 32, 3), nn.Conv2d(32, 32, 1), nn.Conv2d(64, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            y = self.inner(x).relu_()
            with torch.enable_grad():
                y = y * 2
        return self.last(torch.cat([x.new_zeros(x.shape[0], 0, *x.shape[2:]), x, y], 1))  # type: ignore[no-any-return]


def test_regions_with_modes_of_their_own_and_empty_parts(tmp_path: Path) -> None:
    model, x = WithRegions().eval(), torch.randn(2, 3, 8, 8)
    graph = capture(model, x)
    assert [node.layer for node in graph.nodes if node.op == "conv"] == ["first", "inner", "last"]
    (concat,) = (node for node in graph.nodes if node.op == "concat")
    assert len(concat.inputs) == 2
    assert export_graph(model, (3, 8, 8)).graph
    packed = PackedNetwork(packed_file(tmp_path / "net.fp4", None, *pack_model(model, x)))
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), model(x), rtol=1e-2, atol=1e-2)


class Experts(nn.Module):
    """As those of transformers: the configuration names how chosen experts multiply."""

    def __init__(self) -> None:
        super().__init__()
        self.has_gate, self.config = False, types.SimpleNamespace(_experts_implementation="eager")
        self.num_experts, self.up = 3, nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0].ge(0).long()
        if self.config._experts_implementation == "batched_mm":
            return (self.up[chosen] @ x[..., None])[..., 0]
        out = torch.zeros_like(x)
        for each in chosen.unique().tolist():
            out[chosen == each] = x[chosen == each] @ self.up[each].T
        return out


def test_experts_chosen_in_a_loop_are_captured_as_one_product(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 16), Experts(), nn.Linear(16, 16)).eval(), torch.randn(5, 16)
    prepare(model, "nvfp4_qat+dynamic", include=["1"])
    with torch.no_grad():
        expected = model(x)
    network = PackedNetwork(packed_file(tmp_path / "experts.fp4", None, *pack_model(model, x)), "cpu")
    torch.testing.assert_close(network(x), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
    assert export_graph(model, x, dynamic_size=False).graph.node
    assert model[1].config._experts_implementation == "eager"
