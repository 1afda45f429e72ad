"""Shapes by formula are those that torch computes, and a UNet's need no call of torch."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter

from fp4deploy.packed import shapes
from fp4deploy.packed.graph import Node
from fp4deploy.packed.operators import Context, compute, convolve
from fp4deploy.packed.shapes import Shape, shapes_of, weight_order
from tests.packed.small_networks import packed

NODES: TypeAdapter[Any] = TypeAdapter(Node)
CONTEXT = Context(lambda name: torch.zeros(4), {})
SMOOTH = ["linear"], ["bilinear", "bicubic"], ["trilinear"]  # interpolation over one, two and three axes


def drawn(draw: random.Random) -> tuple[dict[str, Any], list[Shape], list[int]]:
    """Fields of a node, shapes of its inputs, O, taps, C of its weight; about a third of the draws do not fit."""
    axes = draw.choice((1, 2, 2, 2, 3))
    groups = draw.choice((1, 1, 2))
    source = (draw.choice((1, 3)), 4, *(draw.randint(1, 9) for _ in range(axes)))

    def each(low: int, high: int, count: int = axes) -> list[int]:
        return [draw.randint(low, high) for _ in range(count)]

    kernel = each(1, 4)
    places = {"stride": each(1, 3), "padding": each(0, 2), "dilation": each(1, 2)}
    more = [draw.randrange(step) for step in places["stride"]]
    layer = {"layer": "it", "precision": "fp16", "groups": groups}
    axis = draw.randrange(axes + 2)
    other = tuple(draw.randint(1, 3) if at == axis or draw.random() < 0.05 else size for at, size in enumerate(source))
    pixels, wide = (1, 4, 5, draw.randint(5, 6)), (1, draw.randint(1, 3), 5, 5)
    dims = each(0, axes + 1, draw.randint(1, axes + 2))
    mode = draw.choice(["nearest", *SMOOTH[axes - 1], *SMOOTH[draw.randrange(3)]])
    size = {"size": each(1, 9)} if draw.random() < 0.5 else {"scale": [draw.choice((0.3, 1.0, 1.7, 2.0))] * axes}
    kinds: list[tuple[dict[str, Any], list[Shape], list[int]]] = [
        ({"op": f"conv{axes}d", **layer, **places}, [source], [4, *kernel, 4 // groups]),
        ({"op": f"conv_transpose{axes}d", **layer, **places, "output_padding": more}, [source], [4, *kernel, 4]),
        ({"op": "conv2d", "layer": "it", "precision": "nvfp4"}, [pixels, wide], [4, 2, 2, 4 + wide[1]]),
        ({"op": "linear", "layer": "it", "precision": "fp16"}, [source], [5, source[-1]]),
        ({"op": "max_pool", "kernel": kernel, **places, "ceil_mode": draw.random() < 0.2}, [source], []),
        ({"op": "avg_pool", "kernel": kernel, **places, "dilation": [1] * axes}, [source], []),
        ({"op": "adaptive_pool", "function": draw.choice(("max", "avg")), "size": each(1, 4)}, [source], []),
        ({"op": "resize", "mode": mode, **size}, [source], []),
        ({"op": "reduce", "function": "mean", "dims": dims, "keep": draw.random() < 0.5}, [source], []),
        ({"op": "concat", "dim": axis}, [source, other, source], []),
        ({"op": draw.choice(("add", "pow", "less"))}, [source, draw.choice((source, other))], []),
        ({"op": "activation", "function": "hardswish"}, [source], []),
        ({"op": "group_norm_relu", "layer": "it", "groups": draw.choice((1, 2, 3)), "eps": 1e-5}, [source], []),
        ({"op": "affine", "layer": "it"}, [source], []),
    ]
    return draw.choice(kinds)


def by_torch(node: Any, inputs: list[Shape], weight: list[int]) -> Shape | None:
    """The shape of what torch computes; None where it refuses."""
    tensors = [torch.ones(shape) for shape in inputs]
    try:
        if weight:
            kernel = torch.ones(weight).permute(weight_order(node, len(weight)))
            return tuple(convolve(node, tensors, kernel, None).shape)
        return tuple(compute(node, tensors, CONTEXT).shape)
    except (RuntimeError, ValueError, IndexError, NotImplementedError):
        return None


def test_formulas_give_what_torch_computes() -> None:
    draw = random.Random(0)
    agreed, refused, left = set(), 0, 0
    for _ in range(1500):
        fields, inputs, weight = drawn(draw)
        names = [f"x{number}" for number in range(len(inputs))]
        given = {"inputs": names, "outputs": [{"name": "y"}]}
        node = NODES.validate_python({**fields, **given})
        found = shapes._by_formula(node, inputs, weight, CONTEXT)
        expected = by_torch(node, inputs, weight)
        if found is None or min(found, default=1) < 1:
            left += 1
            refused += expected is None
            continue
        assert found == expected, (fields, inputs, weight)
        agreed.add(fields["op"])
    assert agreed >= {
        "conv1d", "conv2d", "conv3d", "conv_transpose2d", "linear", "max_pool", "avg_pool", "adaptive_pool", "resize",
        "reduce", "concat", "add", "activation", "group_norm_relu", "affine",
    }  # fmt: skip
    assert refused > 100
    assert left - refused < 150  # what fits is left to torch only where it is rare


@pytest.mark.parametrize("digits", [False, True])
def test_a_unet_needs_no_call_of_torch(monkeypatch: pytest.MonkeyPatch, digits: bool) -> None:
    graph = packed(digits=digits)[1].graph
    (name,) = (each.name for each in graph.inputs)
    sizes = {name: (3, 3, 48, 80)}
    monkeypatch.setattr(shapes, "_by_formula", lambda *_: None)
    expected = shapes_of(graph, sizes)
    monkeypatch.undo()
    monkeypatch.setattr(shapes, "_empty", None)
    assert shapes_of(graph, sizes) == expected
    assert math.prod(expected[graph.outputs[0].activation]) == 3 * 5 * 48 * 80
