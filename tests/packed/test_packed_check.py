"""A graph that does not fit together is refused, with the node and the cause."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from fp4deploy.errors import InputError
from fp4deploy.packed.check import check_graph
from fp4deploy.packed.graph import Graph
from tests.packed.small_networks import CLASSES, packed

Change = Callable[[dict[str, Any]], object]


def node(graph: dict[str, Any], layer: str) -> dict[str, Any]:
    return next(node for node in graph["steps"] if node.get("layer") == layer)


def broken(change: Change, scale: float = 0.25) -> Graph:
    graph = copy.deepcopy(packed("nvfp4_qat", scale)[1].graph.model_dump())
    change(graph)
    return Graph.model_validate(graph)


@pytest.mark.parametrize("scale", [0.125, 0.25])
@pytest.mark.parametrize("recipe", [None, "nvfp4_qat"])
def test_what_is_exported_passes(recipe: str | None, scale: float) -> None:
    check_graph(packed(recipe, scale)[1].graph, len(CLASSES))


def _plain(graph: dict[str, Any], layer: str) -> None:
    """A layer and what it reads in FP16, all tensors there."""
    changed, tensors = node(graph, layer), graph["tensors"]
    changed.update(precision="fp16")
    tensors[f"{layer}.weight"] = {**tensors["head.weight"], "shape": [128, 3, 3, 256]}
    for name in changed["inputs"]:
        graph["images"][name]["amax"] = None


CASES: dict[str, tuple[Change, str]] = {
    "an activation nobody writes": (lambda g: node(g, "up.1").update(inputs=["nothing"]), "'up.1'.*reads 'nothing'"),
    "a later activation": (
        lambda g: node(g, "up.0").update(inputs=["decoder.0.norm2.out"]),
        "no node before it writes",
    ),
    "written twice": (lambda g: node(g, "encoder.1.conv1").update(output="encoder.0.conv1"), "a second time"),
    "an unknown output": (lambda g: node(g, "encoder.1.conv1").update(output="lost"), "does not describe"),
    "a missing tensor": (lambda g: g["tensors"].pop("up.2.weight.scales"), "'up.2.weight.scales' is missing"),
    "an unused tensor": (lambda g: g["tensors"].update(more=g["tensors"]["head.bias"]), "never used .*'more'"),
    "an unused activation": (lambda g: g["images"].update(more={"channels": 3, "stride": 1}), "never used .*'more'"),
    "another weight shape": (
        lambda g: g["tensors"]["encoder.1.conv2.weight.codes"].update(shape=[32, 3, 3, 8]),
        r"is U8 \[32, 3, 3, 8\], and U8 \[32, 3, 3, 16\] is needed",
    ),
    "another weight type": (lambda g: g["tensors"]["head.weight"].update(dtype="F32"), "and F16 .* is needed"),
    "other channels": (lambda g: g["images"]["up.0"].update(channels=112), "'up.0'"),
    "another size": (lambda g: g["images"]["up.0"].update(stride=4), "described as 128 channels at stride 4"),
    "plain where packed is needed": (lambda g: g["images"]["encoder.2.norm1.out"].update(amax=None), "is not nvfp4"),
    "packed where plain is needed": (
        lambda g: g["images"]["decoder.3.norm2.out"].update(amax="up.0.input_amax"),
        "is not fp16",
    ),
    "groups": (lambda g: node(g, "encoder.0.norm1").update(groups=7), "7 groups do not divide 16"),
    "two inputs of a plain convolution": (lambda g: _plain(g, "decoder.0.conv1"), "only a packed convolution"),
    "a norm of another amax": (lambda g: g["tensors"]["up.0.input_amax"].update(shape=[1]), "'up.0.input_amax'"),
    "no head": (lambda g: g["steps"].pop(), "the head is the last node"),
    "steps after the head": (lambda g: g["steps"].insert(0, g["steps"].pop()), "head"),
    "no input": (lambda g: g["images"].pop("image"), "no input named 'image' of the 3 channels of RGB"),
    "digits of three channels": (
        lambda g: g.update(digits=True),
        "no input named 'image' of the 13 channels of digits",
    ),
    "a packed input for a plain layer": (
        lambda g: g["images"]["image"].update(amax="up.0.input_amax"),
        "'encoder.0.conv1'.*is not fp16",
    ),
    "an input packed with nothing": (lambda g: g["images"]["image"].update(amax="none"), "'none'.*is missing"),
}


@pytest.mark.parametrize("digits", [False, True])
@pytest.mark.parametrize("everything", [False, True])
def test_what_reads_digits_or_a_packed_activation_passes(digits: bool, everything: bool) -> None:
    _, file = packed("nvfp4_qat", 0.125, digits, everything)
    check_graph(file.graph, len(CLASSES))
    channels, amax = 13 if digits else 3, "encoder.0.conv1.input_amax" if everything else None
    assert (file.graph.images["image"].channels, file.graph.images["image"].amax) == (channels, amax)


def test_the_amax_of_the_input_is_one_number() -> None:
    graph = copy.deepcopy(packed("nvfp4_qat", 0.125, True, True)[1].graph.model_dump())
    graph["tensors"]["encoder.0.conv1.input_amax"]["shape"] = [1]
    with pytest.raises(InputError, match=r"'encoder\.0\.conv1\.input_amax' is F32 \[1\]"):
        check_graph(Graph.model_validate(graph), len(CLASSES))


@pytest.mark.parametrize("case", CASES)
def test_what_does_not_fit(case: str) -> None:
    change, cause = CASES[case]
    with pytest.raises(InputError, match=cause):
        check_graph(broken(change), len(CLASSES))


def test_the_head_has_the_classes_of_the_card() -> None:
    with pytest.raises(InputError, match="'head'"):
        check_graph(packed()[1].graph, len(CLASSES) + 1)


def test_a_first_source_that_ends_inside_a_block() -> None:
    def join(graph: dict[str, Any]) -> None:
        """Two packed sources of 8 channels where the exporter writes their concatenation."""
        concat = next(node for node in graph["steps"] if node["op"] == "concat")
        graph["steps"].remove(concat)
        del graph["images"][concat["output"]]
        node(graph, "decoder.3.conv1").update(inputs=concat["inputs"])
        for name in concat["inputs"]:
            graph["images"][name]["amax"] = "decoder.3.conv1.input_amax"

    with pytest.raises(InputError, match="'decoder.3.conv1'.*not a multiple of 16 channels"):
        check_graph(broken(join, 0.125), len(CLASSES))
