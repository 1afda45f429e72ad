"""The oldest format of a file that has a node, at and beside each edge: what older readers are told they can read."""

from __future__ import annotations

from typing import Any

import pytest

from fp4deploy.packed import graph
from fp4deploy.packed.graph import Form, Input, format_of
from fp4deploy.rest import FP16

LARGEST = FP16.largest  # 65504


def node(kind: type[Any], **fields: Any) -> Any:
    """A node of fields that decide about its format alone; `check` reads the others."""
    return kind.model_construct(**{"inputs": ["x"], "outputs": [Form(name="y")], **fields})


def layer(kind: type[Any] = graph.Linear, precision: str = "nvfp4", **fields: Any) -> Any:
    return node(kind, layer="l", precision=precision, **fields)


def aten(function: str, **arguments: Any) -> Any:
    return node(graph.Aten, function=function, arguments=arguments)


FORMATS = [
    (layer(), 3), (layer(precision="fp16"), 3), (layer(graph.Conv2d), 3), (layer(graph.ConvTranspose2d), 3),
    (layer(precision="fp8"), 11), (layer(precision="int8"), 11), (layer(precision="w4a8"), 10),
    (layer(graph.Conv2d, op="conv1d"), 4), (layer(graph.Conv2d, op="conv3d"), 4),
    (layer(graph.ConvTranspose2d, op="conv_transpose3d"), 4),
    (layer(graph.Conv2d, inputs=["x", "z"]), 3), (layer(graph.Conv2d, inputs=["x", "z"], op="conv3d"), 8),
    (layer(graph.ConvTranspose2d, inputs=["x", "z"], op="conv_transpose3d"), 4),
    (node(graph.Experts), 9), (aten("arange.default"), 9), (aten("scatter.src"), 9),
    (aten("embedding.default"), 8), (aten("index.Tensor"), 8), (aten("index_select.default"), 8),
    (aten("erf.default"), 5), (aten("full.default", value=LARGEST), 5), (aten("full.default", value=-65505.0), 6),
    (aten("full.default", value=100_000), 5),  # a whole number
    (node(graph.Norm, op="group_norm", eps=1e-5), 3), (node(graph.Norm, op="layer_norm", eps=1e-12), 8),
    (node(graph.Norm, op="layer_norm", eps=1.1e-12), 3), (node(graph.GroupNormReLU, eps=0.0), 8),
    (node(graph.Arithmetic, op="add", number=None), 3), (node(graph.Arithmetic, op="mul", number=LARGEST), 3),
    (node(graph.Arithmetic, op="mul", number=LARGEST + 1), 6), (node(graph.Arithmetic, op="sub", number=-LARGEST), 3),
    (node(graph.Arithmetic, op="sub", number=-1e5), 6), (node(graph.Arithmetic, op="add", number=1, alpha=1e5), 6),
    *((node(graph.Arithmetic, op=op, number=2), 4) for op in ("pow", "maximum", "minimum")),
    (node(graph.Compare, op="less", number=1), 4), (node(graph.Compare, op="less", number=1e9), 6),
    (node(graph.Activation, function="relu", parameters=[]), 3),
    (node(graph.Activation, function="erf", parameters=[]), 4),
    (node(graph.Activation, function="leaky_relu", parameters=[0.1]), 3),
    (node(graph.Activation, function="hardtanh", parameters=[0.0, 1e6]), 6),
    (node(graph.Pad, value=0.0), 3), (node(graph.Pad, value=-1e9), 6),
    (node(graph.Pool, op="max_pool", kernel=[2, 2]), 3), (node(graph.Pool, op="max_pool", kernel=[2]), 4),
    (node(graph.AdaptivePool, function="avg", size=[1, 1]), 3),
    (node(graph.AdaptivePool, function="avg", size=[1, 1, 1]), 4),
    (node(graph.Resize, size=None, scale=[2.0, 2.0]), 3), (node(graph.Resize, size=[4, 4, 4], scale=None), 4),
    (node(graph.Reduce, function="mean"), 3), (node(graph.Reduce, function="norm"), 4),
    (node(graph.Attention, inputs=["q", "k", "v"]), 3), (node(graph.Attention, inputs=["q", "k", "v", "mask"]), 4),
    (node(graph.Softmax), 3), (node(graph.Softmax, op="log_softmax"), 4),
    *((node(kind), 4) for kind in (
        graph.PReLU, graph.Where, graph.Variance, graph.CumulativeSum, graph.Roll, graph.Flip, graph.Repeat, graph.Take,
        graph.Unfold, graph.Fold, graph.ArgMax,
    )),
    *((node(kind), 3) for kind in (graph.Affine, graph.Concat, graph.Permute, graph.Slice, graph.Select, graph.Matmul)),
]  # fmt: skip


@pytest.mark.parametrize(("node", "oldest"), FORMATS, ids=[f"{each.op}-{at}" for at, (each, _) in enumerate(FORMATS)])
def test_the_oldest_format_that_has_a_node(node: Any, oldest: int) -> None:
    assert format_of(node) == oldest


@pytest.mark.parametrize(
    ("given", "fields", "oldest"),
    [
        ({}, {}, 3),
        ({"dtype": "int64"}, {}, 8),
        ({"free": [0, 1, 2]}, {}, 8),
        ({"free": [2, 3]}, {}, 8),
        ({"free": [0, 2, 3]}, {}, 3),
        ({}, {"rest": "bf16"}, 7),
        ({}, {"wide": {"y": ["x"]}}, 7),
        ({"dtype": "int64"}, {"rest": "bf16"}, 8),
        ({}, {"nodes": [node(graph.Concat), node(graph.Experts), node(graph.Where)]}, 9),
        ({}, {"rest": "fp32", "nodes": [node(graph.Where)]}, 7),
    ],
)
def test_the_oldest_format_that_has_a_graph(given: dict[str, Any], fields: dict[str, Any], oldest: int) -> None:
    image = Input.model_construct(**{"name": "x", "shape": [1, 3, 8, 8], "free": [0], "dtype": "float32", **given})
    nodes = fields.pop("nodes", [node(graph.Concat)])
    whole = graph.Graph.model_construct(**{"inputs": [image], "nodes": nodes, "rest": "fp16", "wide": {}, **fields})
    assert whole.format() == oldest
