"""A graph that does not fit together is refused, with the node and the cause; one that passes runs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from fp4deploy.errors import InputError
from fp4deploy.packed import shapes
from fp4deploy.packed.check import check_graph, check_values
from fp4deploy.packed.graph import Activation, Arithmetic, Aten, Conv2d, Form, Graph, Input, Output, TensorInfo
from tests.packed.small_networks import CLASSES, packed

Change = Callable[[dict[str, Any]], object]


def node(graph: dict[str, Any], layer: str) -> dict[str, Any]:
    return next(node for node in graph["nodes"] if node.get("layer") == layer)


def form(graph: dict[str, Any], layer: str, number: int = 0) -> dict[str, Any]:
    return node(graph, layer)["outputs"][number]


def changed(change: Change, scale: float = 0.25) -> Graph:
    graph = copy.deepcopy(packed("nvfp4_qat", scale)[1].graph.model_dump())
    change(graph)
    return Graph.model_validate(graph)


@pytest.mark.parametrize("scale", [0.125, 0.25])
@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
def test_what_is_exported_passes(recipe: str | None, scale: float) -> None:
    shapes = check_graph(packed(recipe, scale)[1].graph, len(CLASSES))
    assert shapes["logits" if "logits" in shapes else "head"] == (1, len(CLASSES), 32, 32)


@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
def test_every_tensor_has_the_type_and_the_shape_of_what_reads_it(recipe: str | None) -> None:
    plain = packed(recipe, 0.125)[1].graph
    assert plain.tensors
    for name, info in plain.tensors.items():
        for other in ({"shape": [*info.shape, 1]}, {"dtype": "F64"}):
            graph = plain.model_copy(update={"tensors": {**plain.tensors, name: info.model_copy(update=other)}})
            with pytest.raises(InputError, match=r"Node \d+ of the graph .*(its weight has|is needed)"):
                check_graph(graph, len(CLASSES))


def _two_plain_inputs(graph: dict[str, Any]) -> None:
    """The first convolution of a decoder in FP16, its two inputs plain."""
    reader, tensors = node(graph, "decoder.0.conv1"), graph["tensors"]
    reader.update(precision="fp16")
    tensors["decoder.0.conv1.weight"] = {**tensors["head.weight"], "shape": [128, 3, 3, 256]}
    for writer in graph["nodes"]:
        for each in writer["outputs"]:
            if each["name"] in reader["inputs"]:
                each["amax"] = None


def _shared_layer(graph: dict[str, Any]) -> None:
    """Two convolutions that read one layer with other channels."""
    node(graph, "encoder.1.conv1").update(layer="encoder.1.conv2")
    for part in ("codes", "scales", "amax"):
        del graph["tensors"][f"encoder.1.conv1.weight.{part}"]


def _shared_scale(graph: dict[str, Any]) -> None:
    """Two convolutions of one shape read one layer, with block scales of another range."""
    by_shape: dict[str, dict[str, Any]] = {}
    for reader in graph["nodes"]:
        tensor = graph["tensors"].get(f"{reader.get('layer')}.weight.codes")
        if reader["op"] != "conv2d" or tensor is None:
            continue
        other = by_shape.setdefault(str(tensor["shape"]), reader)
        if other is not reader:
            for part in ("codes", "scales", "amax"):
                del graph["tensors"][f"{reader['layer']}.weight.{part}"]
            reader.update(layer=other["layer"], e4m3_max=256)
            return
    raise AssertionError("no two layers have one shape")


def _resized(graph: dict[str, Any]) -> None:
    """One source of a concatenation twice the size."""
    source = form(graph, "up.0")["name"]
    amax = form(graph, "up.0")["amax"]
    form(graph, "up.0").update(amax=None)
    at = graph["nodes"].index(node(graph, "decoder.0.conv1"))
    wide = {"name": "wide", "amax": amax, "axis": "channels", "pooled": False}
    graph["nodes"].insert(
        at, {"op": "resize", "mode": "nearest", "scale": [2.0, 2.0], "inputs": [source], "outputs": [wide]}
    )
    reader = node(graph, "decoder.0.conv1")
    reader["inputs"] = [wide["name"] if name == source else name for name in reader["inputs"]]


CASES: dict[str, tuple[Change, str]] = {
    "an activation nobody writes": (lambda g: node(g, "up.1").update(inputs=["nothing"]), "'up.1'.*reads 'nothing'"),
    "a later activation": (
        lambda g: node(g, "up.0").update(inputs=[form(g, "decoder.0.norm2")["name"]]),
        "no node before it writes",
    ),
    "written twice": (
        lambda g: form(g, "encoder.1.conv1").update(name=form(g, "encoder.0.conv1")["name"]),
        "a second time",
    ),
    "a missing tensor": (lambda g: g["tensors"].pop("up.0.weight.scales"), "'up.0.weight.scales' is missing"),
    "an unused tensor": (lambda g: g["tensors"].update(more=g["tensors"]["head.bias"]), "never used .*'more'"),
    "an unused form": (
        lambda g: node(g, "encoder.1.conv1")["outputs"].append({"name": "more"}),
        "never used .*'more'",
    ),
    "another weight shape": (
        lambda g: g["tensors"]["encoder.1.conv2.weight.codes"].update(shape=[32, 3, 3, 8]),
        r"is U8 \[32, 3, 3, 8\], and U8 \[32, 3, 3, 16\] is needed",
    ),
    "another weight type": (lambda g: g["tensors"]["head.weight"].update(dtype="F32"), "and F16 .* is needed"),
    "plain where packed is needed": (lambda g: form(g, "encoder.2.norm1").update(amax=None), "is not nvfp4"),
    "packed where plain is needed": (
        lambda g: form(g, "decoder.1.norm2").update(amax="up.0.input_amax"),
        "is not fp16",
    ),
    "packed along another axis": (lambda g: form(g, "encoder.2.norm1").update(axis="last"), "not packed along"),
    "groups": (lambda g: node(g, "encoder.0.norm1").update(groups=7), "'encoder.0.norm1'.*divisible by"),
    "two inputs of a plain convolution": (_two_plain_inputs, "only a packed convolution of one group has two inputs"),
    "a scale of another shape": (lambda g: g["tensors"]["up.0.input_amax"].update(shape=[1]), "'up.0.input_amax'"),
    "a layer of two shapes": (_shared_layer, "'encoder.1.conv2'.*'encoder.1.conv2.weight.codes' is U8"),
    "a layer of two ranges": (_shared_scale, "another node reads this layer as one of another shape or kind"),
    "inputs that differ in size": (_resized, "'decoder.0.conv1'.*[Ss]izes of tensors must match"),
    "no node that writes the output": (lambda g: g["nodes"].pop(), "is no plain activation that a node writes"),
    "an output of another stride": (
        lambda g: g["outputs"][0].update(activation=form(g, "encoder.1.conv1")["name"]),
        "model card has|never used",
    ),
    "a free batch of two": (lambda g: g["inputs"][0].update(shape=[2, 3, 32, 32]), "free batch of 1"),
    "digits of four channels": (
        lambda g: (g["inputs"][0].update(shape=[1, 4, 32, 32]), g.update(digits=True)),
        "Only an RGB image",
    ),
    "a packed input for a plain layer": (
        lambda g: g["inputs"][0]["outputs"][0].update(amax="up.0.input_amax"),
        "'encoder.0.conv1'.*is not fp16",
    ),
    "an input packed with nothing": (lambda g: g["inputs"][0]["outputs"][0].update(amax="none"), "'none' is missing"),
    "pooling outside a normalisation": (lambda g: form(g, "up.0").update(pooled=True), "only group_norm_relu pools"),
    "a stride that leaves nothing": (
        lambda g: node(g, "encoder.0.conv1").update(dilation=[1000, 1000]),
        "encoder.0.conv1",
    ),
    "a softplus of slope 0": (
        lambda g: g["nodes"].append(
            {
                "op": "activation",
                "function": "softplus",
                "parameters": [0.0, 20.0],
                "inputs": ["head"],
                "outputs": [{"name": "more"}],
            }
        ),
        "the first number of softplus is positive",
    ),
    "an image of one row that is pooled": (
        lambda g: g["inputs"][0].update(shape=[1, 3, 1, 32]),
        "1 x 32 pixels cannot be pooled",
    ),
    "too many elements": (lambda g: g["inputs"][0].update(shape=[1, 3, 1 << 20, 1 << 20]), "2\\^28|2\\^31"),
}


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_what_reads_digits_or_a_packed_image_passes(digits: bool, everything: bool) -> None:
    _, file = packed("nvfp4_qat", 0.125, digits, everything)
    check_graph(file.graph, len(CLASSES))
    (read,) = file.graph.inputs[0].outputs
    assert read.amax == ("encoder.0.conv1.input_amax" if everything else None)
    assert file.graph.digits == digits


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit(case: str) -> None:
    change, cause = CASES[case]
    with pytest.raises(InputError, match=cause):
        check_graph(changed(change), len(CLASSES))


def test_ten_thousand_nodes_are_refused() -> None:
    with pytest.raises(ValidationError, match=r"nodes\n.*at most 4096 items"):
        changed(lambda graph: graph["nodes"].extend(graph["nodes"][-1:] * 10_000))


def test_a_row_that_32_bits_cannot_count(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, widest = packed("nvfp4_qat", 0.25)[1].graph, 4 * 3 * 256  # pixels x taps x channels of decoder.0.conv1
    monkeypatch.setattr(shapes, "KERNEL_ELEMENTS", widest)
    check_graph(graph, len(CLASSES))
    monkeypatch.setattr(shapes, "KERNEL_ELEMENTS", widest - 1)
    with pytest.raises(InputError, match=r"'decoder.0.conv1'.*a row of its input is beyond 2\^31 elements"):
        check_graph(graph, len(CLASSES))


@pytest.mark.parametrize("channels", [0, 1, len(CLASSES) + 1])
def test_the_output_has_the_channels_of_the_card(channels: int) -> None:
    with pytest.raises(InputError, match="model card has"):
        check_graph(packed()[1].graph, channels)


@pytest.mark.parametrize(
    ("name", "value", "cause"),
    [
        ("encoder.1.conv1.weight.amax", 1e38, "the largest of FP16"),
        ("encoder.1.conv1.weight.amax", -1.0, "not negative"),
        ("encoder.1.conv1.input_amax", 1e-38, "at least 2"),
        ("encoder.1.conv1.input_amax", 1e6, "the largest of FP16"),
        ("encoder.1.conv1.weight.scales", float("nan"), "holds NaN"),
        ("encoder.1.conv1.weight.scales", -1.0, "negative number"),
        ("head.bias", float("inf"), "holds NaN or Inf"),
        ("head.bias", 65520.0, "holds 65520, and the largest of FP16 is 65504"),
        ("head.bias", -7e4, "holds 70000, and the largest of FP16"),
    ],
)
@pytest.mark.parametrize("at", [0, -1])
def test_one_value_that_could_not_be_computed_with(name: str, value: float, cause: str, at: int) -> None:
    file = packed()[1]
    tensor = file.tensors[name].clone()
    wide = tensor.dtype == torch.float16 and abs(value) > 65504  # of another tool
    tensor = tensor.float() if wide else tensor
    tensor.view(-1)[at] = value
    with pytest.raises(InputError, match=cause):
        check_values({**file.tensors, name: tensor}, file.graph)


def test_a_first_source_that_ends_inside_a_block() -> None:
    def join(graph: dict[str, Any]) -> None:
        """Two packed sources of 8 channels where the exporter writes their concatenation."""
        concat = next(node for node in graph["nodes"] if node["op"] == "concat")
        graph["nodes"].remove(concat)
        node(graph, "decoder.1.conv1").update(inputs=concat["inputs"])
        for writer in graph["nodes"]:
            for each in writer["outputs"]:
                if each["name"] in concat["inputs"]:
                    each["amax"] = "decoder.1.conv1.input_amax"

    with pytest.raises(InputError, match="'decoder.1.conv1'.*not a multiple of 16 channels"):
        check_graph(changed(join, 0.125), len(CLASSES))


def aten(function: str = "topk.default", **fields: Any) -> Aten:
    given = {"inputs": ["x"], "outputs": [Form(name="y")], "roles": ["self"], "arguments": {"k": 1, "dim": 1}}
    return Aten(function=function, **{**given, **fields})


def of_one(node: Any, *more: Any, out: str = "y") -> Graph:
    image = Input(name="image", shape=[1, 3, 8, 8], free=[0, 2, 3], outputs=[Form(name="x")])
    outputs = [Output(name="", activation=out)]
    return Graph(inputs=[image], nodes=[node, *more], outputs=outputs, tensors={})


def test_the_batch_is_free_in_every_input_or_in_none() -> None:
    def two(free: list[int], size: int) -> Graph:
        other = Input(name="other", shape=[size, 3, 8, 8], free=free, outputs=[Form(name="z")])
        graph = of_one(Arithmetic(op="add", inputs=["x", "z"], outputs=[Form(name="y")]))
        return graph.model_copy(update={"inputs": [*graph.inputs, other]})

    assert check_graph(two([0, 2, 3], 1))["y"] == (1, 3, 8, 8)
    with pytest.raises(InputError, match="batch of 'other' is free where that of another input is not"):
        check_graph(two([2, 3], 1))


@pytest.mark.parametrize(
    ("names", "fits"), [(("a", "b"), True), (("a", "a"), False), (("", "b"), False), (("",), True)]
)
def test_several_outputs_have_names_of_their_own(names: tuple[str, ...], fits: bool) -> None:
    graph = of_one(aten()).model_copy(update={"outputs": [Output(name=name, activation="y") for name in names]})
    if fits:
        check_graph(graph)
        return
    with pytest.raises(InputError, match="Outputs of the graph share a name"):
        check_graph(graph)


def test_an_operator_of_the_list_is_taken() -> None:
    assert check_graph(of_one(aten()))["y"] == (1, 1, 8, 8)


@pytest.mark.parametrize(
    ("node", "cause"),
    [
        (aten("exponential_.default"), "no operator that a packed network may name"),
        (aten("topk.nothing"), "no operator that a packed network may name"),
        (aten(arguments={"k": 1, "axis": 1}), "topk.default has no argument 'axis'"),
        (aten(roles=["self", "other"]), "another number of roles"),
        (aten(result=2), "has 2 results"),
        (aten(arguments={"k": 9, "dim": 1}), "k not in range"),
        (aten(arguments={"k": "many", "dim": 1}), "k"),
        (aten("sort.stable", arguments={}), "stable"),
        (aten("gather.default", arguments={"dim": 1}), "index"),
        (aten("index.Tensor", arguments={}), "indices"),
    ],
)
def test_what_does_not_fit_an_operator_of_the_list(node: Aten, cause: str) -> None:
    with pytest.raises(InputError, match=cause):
        check_graph(of_one(node))


def test_a_complex_activation_stays_within() -> None:
    transform = aten("_fft_r2c.default", arguments={"dim": [2, 3], "normalization": 0, "onesided": True})
    with pytest.raises(InputError, match="output of the graph is complex"):
        check_graph(of_one(transform))
    relu = Activation(function="abs", inputs=["y"], outputs=[Form(name="z")])
    assert check_graph(of_one(transform, relu, out="z"))["z"] == (1, 3, 8, 5)
    layer = Conv2d(inputs=["y"], outputs=[Form(name="z")], layer="a", precision="fp16")
    graph = of_one(transform, layer, out="z")
    info = TensorInfo(dtype="F16", shape=[4, 1, 1, 3], sha256="0" * 64)
    with pytest.raises(InputError, match="reads a complex activation"):
        check_graph(graph.model_copy(update={"tensors": {"a.weight": info}}))
