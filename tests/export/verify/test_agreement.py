"""What outputs mean, and faults of every kind planted in networks of every kind of output: each gate sees each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

import fp4deploy as fd
from fp4deploy.errors import GateError, InputError
from fp4deploy.export import to_portable
from fp4deploy.export.to_packed import pack
from fp4deploy.export.verify.agreement import OutputAgreement, compare_outputs
from fp4deploy.export.verify.layerwise import compare_layerwise
from fp4deploy.export.verify.nodes import largest
from fp4deploy.export.verify.outputs import Agreement, require_agreement
from fp4deploy.export.verify.packed import PackedAgreement, require_packed, verify_packed
from fp4deploy.models.heads import InstanceHead
from fp4deploy.models.meaning import UNKNOWN, Classes, OutputMeanings, known_outputs
from fp4deploy.qat import deployed
from tests.export.exported_models import initializer, pixels_that_differ
from tests.samples import sample

Fault = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (output, what marks each sample, [N]) -> wrong output


class Tokens(nn.Module):
    """[N, T, C] -> classes of each token, [N, T, V]."""

    size: tuple[int, ...] = (16, 32)

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(32, 32), nn.Linear(32, 20)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.body(x)))


class Dense(nn.Module):
    """[N, 16, H, W] -> [N, classes, H, W]."""

    size: tuple[int, ...] = (16, 12, 8)
    channels = 5

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, self.channels, 1)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.relu(self.body(x)))


class Picture(Dense):
    """Three channels of values, in the shape of a map of three classes."""

    channels = 3


class Depth(Dense):
    """One channel of values."""

    channels = 1


class Vectors(Tokens):
    """[N, V]: one vector a sample, of which two samples have no range of their own."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).mean(1)


class Several(Dense):
    """A map of classes that is right, and after it a value and a picture that may not be."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.colour = nn.Conv2d(32, 1, 1), nn.Conv2d(32, 3, 1)

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.relu(self.body(x))
        return self.head(x), self.wrong(self.score(x).mean((2, 3)), x), self.wrong(self.colour(x), x)

    def wrong(self, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return output


def shifted(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """The bias of the head is another one in one class."""
    bias = torch.zeros(output.shape[1 if output.ndim != 3 else 2])
    bias[0] = 4 if len(bias) > 1 else 0.25
    return output + (bias if output.ndim == 3 else bias.view(-1, *[1] * (output.ndim - 2)))


def doubled(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return output + output


def scaled(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Other values of the same classes, by less than images without contrast show."""
    return 1.2 * output


def lifted(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Of a map all values."""
    return output + 0.3 if output.ndim == 4 else output


def permuted(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    axis = 1 if output.ndim != 3 else 2
    return output.roll(1, axis) if output.shape[axis] > 1 else -output


def not_a_number(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """In one value of each sample."""
    wrong = torch.zeros(output.shape[1:])
    wrong.flatten()[-1] = float("nan")
    return output + wrong


def one_place(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """One token or row is that of another sequence."""
    sign = torch.ones(output.shape[1:])
    sign.flatten()[: max(1, sign.shape[-1])] = -1
    return output * sign


def one_sample(output: torch.Tensor, mark: torch.Tensor) -> torch.Tensor:
    return output * (1 - 2 * mark.view(-1, *[1] * (output.ndim - 1)))


KINDS: dict[str, type[nn.Module]] = {each.__name__: each for each in (Tokens, Dense, Picture, Depth, Vectors, Several)}
FAULTS: dict[str, Fault] = {
    each.__name__: each for each in (shifted, doubled, permuted, not_a_number, one_place, one_sample)
}


def batch(kind: str, seed: int, marked: bool = True) -> torch.Tensor:
    """Two samples; the first value of the second one marks it."""
    size = getattr(KINDS[kind], "size")  # noqa: B009
    x = torch.randn(2, *size, generator=torch.Generator().manual_seed(seed))
    x.flatten(1)[:, 0] = torch.tensor([0.0, float(marked)])
    return x


@cache
def prepared(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = KINDS[kind]().eval()
    with torch.no_grad():  # classes that are far apart, as of a trained network
        model.head.weight.mul_(4)  # type: ignore[union-attr, operator]
    fd.prepare(model, include="body")
    fd.calibrate(model, torch.cat([batch(kind, seed) for seed in range(3)]))
    return model.eval()


def with_fault(model: nn.Module, fault: Fault) -> nn.Module:
    """A copy of the same layers whose output is wrong; of several outputs the first one is right."""
    own: Any = type(model)

    class Wrong(own):  # type: ignore[misc, valid-type]
        def forward(self, x: torch.Tensor) -> Any:
            if own is Several:
                self.mark = x.flatten(1)[:, 0]
                return super().forward(x)
            return fault(super().forward(x), x.flatten(1)[:, 0])

        def wrong(self, output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return fault(output, self.mark)

    found = copy.deepcopy(model)
    found.__class__ = Wrong
    return found


@cache
def graph_of(kind: str, fault: str = "") -> onnx.ModelProto:
    model, wrong = prepared(kind), FAULTS.get(fault, scaled)
    return fd.export_graph(with_fault(model, wrong) if fault else model, batch(kind, 5))


@pytest.mark.parametrize("kind", sample(KINDS, every=2))
def test_a_right_file_passes_and_says_what_was_compared(kind: str, tmp_path: Path) -> None:
    model, x = prepared(kind), [batch(kind, 5), batch(kind, 6)]
    found = fd.verify(model, graph_of(kind), x)
    packed = pack(model, tmp_path / "m.fp4", example_inputs=x[0]).verification
    assert packed is not None
    for sentence in (found.sentence(), packed.sentence()):
        assert {
            "Tokens": "argmax over axis 2 and values (within 0.01 of the range) equal to torch on 100.000 % of ",
            "Dense": "argmax over axis 1 and values (within 0.01 of the range) equal to torch on 100.000 % of ",
            "Picture": "argmax over axis 1 and values",
            "Depth": "values (within 0.01 of the range) equal to torch on 100.000 % of ",
            "Vectors": "argmax over axis 1 and values",
            "Several": "output_1: values (within 0.01 of the range) equal to torch on 100.000 % of ",
        }[kind] in sentence
    unit = {"Tokens": "64 tokens", "Dense": "384 pixels", "Depth": "384 values", "Vectors": "4 samples"}.get(kind, "")
    assert unit in found.sentence()
    assert found.passed
    assert found.layerwise is None


@pytest.mark.parametrize(("kind", "fault"), sample(KINDS, FAULTS, every=6))
def test_a_fault_is_seen_end_to_end_and_layer_by_layer(kind: str, fault: str) -> None:
    """In the first of two batches alone where the fault is of one sample."""
    model = prepared(kind)
    found = fd.verify(model, graph_of(kind, fault), [batch(kind, 5), batch(kind, 6, marked=False)])
    assert not found.passed, found.sentence()
    assert found.layerwise is not None
    assert not all(each.passed for each in found.layerwise.outputs)
    if kind == "Several":
        assert [each.passed for each in found.outputs] == [True, False, False]
    with pytest.raises(GateError, match="NaN or Inf" if fault == "not_a_number" else r"% of \d+"):
        require_agreement(found, "model")


@pytest.mark.parametrize(("kind", "fault"), sample(KINDS, FAULTS, every=6))
def test_a_fault_is_seen_in_a_packed_network(kind: str, fault: str, tmp_path: Path) -> None:
    model = prepared(kind)
    wrong = with_fault(model, FAULTS[fault])
    if fault == "not_a_number":
        with pytest.raises(InputError, match="NaN"):
            pack(wrong, tmp_path / "m.fp4", example_inputs=batch(kind, 5), verify=False)
        return
    file = pack(wrong, tmp_path / "m.fp4", example_inputs=batch(kind, 5), verify=False).file
    found = verify_packed(deployed(model), file, [batch(kind, 5), batch(kind, 6, marked=False)])
    assert not found.passed, found.sentence()
    assert not all(each.passed for each in found.referenced), "nodes without weights"
    with pytest.raises(GateError, match=r"% of \d+ .*, and with reference inputs"):
        require_packed(found, "model")


@pytest.mark.parametrize(("kind", "fault"), [("Tokens", "shifted"), ("Dense", "permuted"), ("Dense", "one_sample")])
def test_a_map_that_is_said_to_be_of_classes_is_compared_by_them(kind: str, fault: str) -> None:
    model, x = prepared(kind), batch(kind, 5)
    axis = 2 if kind == "Tokens" else 1
    for said in ("classes", f"classes:{axis}"):
        good = fd.verify(model, graph_of(kind, "scaled"), x, outputs=said)
        assert good.passed, "whatever the values are"
        assert good.sentence().startswith(f"argmax over axis {axis} equal to torch on 100.000 %")
        assert not fd.verify(model, graph_of(kind, fault), x, outputs=said).passed


def test_values_have_the_bound_that_is_said() -> None:
    model, x = prepared("Picture"), batch("Picture", 5)
    slightly = fd.export_graph(with_fault(model, lambda output, _: output * 1.03), x)
    assert not fd.verify(model, slightly, x, outputs="values").passed
    found = fd.verify(model, slightly, x, outputs="values:0.05")
    assert found.passed
    assert found.sentence() == "values (within 0.05 of the range) equal to torch on 100.000 % of 576 values"


def test_each_output_has_a_word() -> None:
    model, x = prepared("Several"), batch("Several", 5)
    wrong = fd.export_graph(with_fault(model, lifted), x)
    for right in ({"output_2": "classes"}, {"output_2": "values:0.9"}, ["classes", "values", "classes"]):
        assert fd.verify(model, wrong, x, outputs=right).passed
    for other in ({"output_1": "values:0.9"}, ["classes", "values", "values"]):
        assert not fd.verify(model, wrong, x, outputs=other).passed
    for unknown, cause in (
        ({"depth": "values"}, "has no output 'depth'. It has: output_0, output_1, output_2"),
        (["values"], r"3 outputs \(output_0, output_1, output_2\), and 1 are described"),
        ({"output_1": "classes:2"}, r"'output_1' \[2, 1\] has no axis 2"),
        ({"output_1": "classes"}, "has one class on axis 1. Say 'values'"),
    ):
        with pytest.raises(InputError, match=cause):
            fd.verify(model, wrong, x, outputs=unknown)


@pytest.mark.parametrize("said", ["class", "classes:x", "values:-1", "values:2", "values:nan", "", "values:"])
def test_words_that_say_nothing(said: str) -> None:
    with pytest.raises(InputError, match=f"'{said}' says nothing of an output. Valid: classes, classes:AXIS, values"):
        known_outputs(said=said)


def test_files_say_what_they_were_compared_by(tmp_path: Path) -> None:
    """`export` and `pack` take the word as well, and refuse a file by it."""
    model, x = prepared("Picture"), batch("Picture", 5)
    written = fd.export_onnx(model, x, tmp_path / "m.onnx", outputs="values:0.02")
    packed = pack(model, tmp_path / "m.fp4", example_inputs=x, outputs=["values:0.02"])
    for found in (written.verification, packed.verification):
        assert found is not None
        assert found.sentence().startswith("values (within 0.02 of the range) equal to torch on 100.000 %")
    with pytest.raises(InputError, match="says nothing"):
        fd.export_onnx(model, x, tmp_path / "other.onnx", outputs="depth")
    with pytest.raises(InputError, match="says nothing"):
        pack(model, tmp_path / "other.fp4", example_inputs=x, outputs="depth")
    assert not list(tmp_path.glob("other*"))


def compared(expected: torch.Tensor, given: torch.Tensor, meanings: OutputMeanings = UNKNOWN) -> OutputAgreement:
    (found,) = compare_outputs([expected], [given], ["logits"], meanings)
    return found


def test_whole_numbers_are_equal_or_not() -> None:
    labels = torch.arange(4000).view(1, 40, 100)
    other = labels.clone()
    other[0, 39] += 1  # a thousandth of the largest
    assert compared(labels, labels).passed
    assert compared(labels, labels.float()).passed, "a packed network gives floating point numbers"
    for given in (other, other.float()):
        assert compared(labels, given).differing == 100
    large = torch.tensor([[2**25 + 1, 3]])
    assert compared(large, large + torch.tensor([[1, 0]])).differing == 1


def test_whole_numbers_of_a_file_are_not_rounded() -> None:
    """Positions of maxima among 3,000: one beside is less than a hundredth of the largest."""

    class Position(nn.Module):
        def __init__(self, shift: int) -> None:
            super().__init__()
            self.scale, self.shift = nn.Parameter(torch.ones(1)), shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale).argmax(1) + self.shift

    x = torch.randn(4, 3000)
    x[0, 2990] = 9  # the largest position
    graph = fd.export_graph(Position(1), x)
    found = fd.verify(Position(0), graph, x)
    assert not found.passed
    assert found.sentence() == "whole numbers equal to torch on 0.000 % of 4 values"
    assert fd.verify(Position(1), graph, x).passed


@pytest.mark.parametrize("shape", [(2, 7), (2, 9, 7), (2, 7, 4, 4), (2, 7, 3, 4, 4)])
def test_the_class_axis_follows_from_the_rank(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    axis = 2 if len(shape) == 3 else 1
    (meaning,) = OutputMeanings(said="classes").of([x], ["logits"])
    assert meaning == Classes(axis, ("samples", "tokens", "pixels", "voxels")[len(shape) - 2])
    assert compared(x, 2 * x, OutputMeanings(said="classes")).passed
    assert not compared(x, x.roll(1, axis), OutputMeanings(said="classes")).passed
    assert not compared(x, 2 * x).passed
    assert compared(x, x + 1e-4).passed


def test_one_channel_of_values_has_its_own_range() -> None:
    """Metres of depth hide no error of a normal vector beside them."""
    x = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    x[:, 0] *= 100
    other = x.clone()
    other[:, 1] += 0.5
    assert compared(x, x).passed
    assert not compared(x, other, OutputMeanings(said="values")).passed


def test_a_small_part_that_is_lost_is_a_fault() -> None:
    """One token of 4096 and one channel of 2048 are less than a thousandth of what is compared."""
    x = torch.randn(2, 4096, 8, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 1234] = x[:, 1235]
    for meanings in (UNKNOWN, OutputMeanings(said="classes"), OutputMeanings(said="values")):
        found = compared(x, other, meanings)
        assert found.share > 0.999
        assert not found.passed
        assert found.lost == 1
        assert "at one place" in found.difference()
    other = x.clone()
    other[0, [5, 300, 4000]] = -x[0, [5, 300, 4000]]
    assert compared(x, other, OutputMeanings(said="classes")).passed, "single tokens, as last bits decide"


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("said", [None, "classes", "values"])
def test_what_is_not_finite_agrees_with_nothing(number: float, said: str | None) -> None:
    x = torch.randn(2, 64, 32, 32, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[0, 3, 5, 5] = number  # of 131,072 values
    meanings = OutputMeanings(said=said)
    for pair, whose in (((x, broken), "the file"), ((broken, x), "torch"), ((broken, broken), "torch and the file")):
        found = compared(*pair, meanings)
        assert not found.passed
        assert found.share == 0
        assert found.sentence() == f"NaN or Inf in {whose}"
    first = compare_outputs([x], [broken], ["logits"], meanings)
    (both,) = compare_outputs([x], [x], ["logits"], meanings, first)
    assert both.broken == "the file", "a later batch mends nothing"
    with pytest.raises(GateError, match="NaN or Inf in the file"):
        require_agreement(Agreement(2, (both,), 0.0), "model")
    with pytest.raises(GateError, match="NaN or Inf in the file"):
        require_packed(PackedAgreement(2, (both,), {"node": 0.0}, (compared(x, x),)), "model")


def test_every_batch_counts() -> None:
    x = torch.randn(1, 5, 8, 8, generator=torch.Generator().manual_seed(0))
    found: tuple[OutputAgreement, ...] = ()
    for given in (-x, x, x):
        found = compare_outputs([x], [given], ["logits"], UNKNOWN, found)
    assert (found[0].count, found[0].differing, found[0].lost) == (192, 64, 1)
    assert not found[0].passed


def test_another_shape_or_number_of_outputs_is_no_agreement() -> None:
    x = torch.zeros(2, 5, 8, 8)
    assert not compared(x, x[:1]).passed, "which would be broadcast"
    with pytest.raises(InputError, match="gives 1 outputs, and the model 2"):
        compare_outputs([x, x], [x], ["a", "b"], UNKNOWN)


def test_a_card_of_classes_and_a_head_say_what_the_first_output_is() -> None:
    head = InstanceHead("centres", 3)
    outputs = [torch.zeros(1, 6, 4, 4), torch.zeros(1, 2)]
    assert known_outputs(head=head).of(outputs, ["a", "b"])[0] is head
    assert known_outputs(head=head, said={"a": "values"}).of(outputs, ["a", "b"])[0].compared.startswith("values")
    one_class = OutputMeanings(Classes(1)).of([torch.zeros(1, 1, 4, 4)], ["a"])[0]
    assert one_class.compared.startswith("values"), "the largest of one class is always that one"


def test_not_a_number_inside_the_graph_is_a_fault_of_its_layer() -> None:
    """Also in one block of 16, which may differ where its amax has another last bit."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)).eval()
    x = torch.randn(1, 3, 1, 1)
    fd.prepare(model, include="2")
    fd.calibrate(model, x)
    model.eval()
    portable = to_portable(fd.export_graph(model, x))
    bias = initializer(portable, "0.bias")
    broken = numpy_helper.to_array(bias).copy()
    broken[3] = float("nan")
    bias.CopyFrom(numpy_helper.from_array(broken, bias.name))
    found = compare_layerwise(deployed(model), portable, [x])
    assert found.layers["2"] == 1
    with pytest.raises(GateError, match=r"the first layer to differ is 2"):
        require_agreement(Agreement(1, pixels_that_differ(1000, 500), 1.0, found), "model")


def test_not_a_number_of_a_node_is_the_largest_error() -> None:
    assert largest(0.5, float("nan"), 0.0) != largest(0.5, float("nan"), 0.0)
    wrong = pixels_that_differ(1000, 500)
    found = PackedAgreement(1, wrong, {"good": 0.0, "bad": float("nan")}, pixels_that_differ(1000, 0))
    assert not found.passed
    with pytest.raises(GateError, match="the first node to differ is bad, by nan"):
        require_packed(found, "model")


def test_files_of_token_ids_are_verified_and_run(tmp_path: Path) -> None:
    """No input of such a file is in FP16."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, 32), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 50)).eval()
    ids = torch.randint(0, 50, (2, 16))
    fd.prepare(model, include="1")
    fd.calibrate(model, ids)
    model.eval()
    path = tmp_path / "tokens.onnx"
    found = fd.export_onnx(model, ids, path, portable=True)
    assert found.verification is not None
    assert found.verification.sentence().endswith("100.000 % of 32 tokens")
    assert found.portable_path is not None
    expected = deployed(model)(ids)
    for file in (path, found.portable_path):
        assert fd.verify(model, file, ids).passed
        runtime = fd.open_runtime(file)
        assert torch.allclose(torch.from_numpy(runtime(ids)), expected, atol=1e-4)
        assert runtime.time({runtime.inputs[0].name: ids.numpy()}, 0, 1, 1.0)
    stripped = onnx.load(path)  # as written by an older version
    del stripped.metadata_props[:]
    assert fd.verify(model, stripped, ids).passed
