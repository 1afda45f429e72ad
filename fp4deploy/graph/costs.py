"""Multiply-accumulates of a graph: those of its GEMMs; everything else is memory traffic and is not counted.

convolution              output elements x input channels of a group x taps
transposed convolution   input elements x output channels of a group x taps
linear, matmul           output elements x length of the contraction
attention                N heads x (query x key x (E + Ev))

A layer whose input is a parameter is not counted, since the network's input has no part in it; nor is a matmul or an
attention with a parameter among its operands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fp4deploy.graph.ir import Graph, Node
from fp4deploy.graph.sizes import evaluate

OPERANDS = {
    **dict.fromkeys(("conv", "conv_transpose", "linear"), ("input",)),
    "matmul": ("input", "other"),
    "attention": ("query", "key", "value"),
}
MULTIPLYING = (nn.Linear, nn.modules.conv._ConvNd)  # modules; transposed convolutions are of the second class


def macs_of(graph: Graph, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Node name -> multiply-accumulates, of every node that multiplies matrices, for one item of the batch.

    Args:
        sizes: of the inputs (`Graph.sizes`); None for the example's. The first axis of each counts as 1.
    """
    chosen = {name: 1 if name.endswith(".0") else size for name, size in (sizes or graph.example).items()}
    found = {node.name: _macs(graph, node, chosen) for node in graph.nodes}
    return {name: count for name, count in found.items() if count}


def macs_by_layer(graph: Graph, sizes: Mapping[str, int] | None = None) -> dict[str, int]:
    """Layer -> multiply-accumulates of all its calls; what owns no parameters is left out."""
    counts, found = macs_of(graph, sizes), dict[str, int]()
    for layer, nodes in graph.layers():
        found[layer] = sum(counts.get(node.name, 0) for node in nodes)
    return found


def _macs(graph: Graph, node: Node, sizes: Mapping[str, int]) -> int:
    def shape(name: str) -> list[int]:
        return [evaluate(size, sizes) for size in graph.values[name].shape]

    if not set(OPERANDS.get(node.op, ())) <= set(node.inputs):
        return 0
    if node.op in ("conv", "conv_transpose"):
        weight = node.attributes["weight_shape"]  # [O, C / groups, taps...], transposed [C, O / groups, taps...]
        counted = node.name if node.op == "conv" else node.inputs["input"]
        return math.prod(shape(counted)) * math.prod(weight[1:])
    if node.op == "linear":
        return math.prod(shape(node.name)) * node.attributes["weight_shape"][1]
    if node.op == "matmul":
        return math.prod(shape(node.name)) * shape(node.inputs["input"])[-1]
    if node.op == "attention":
        query, key, value = (shape(node.inputs[role]) for role in ("query", "key", "value"))
        return math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])
    return 0


@torch.no_grad()
def macs_of_calls(model: nn.Module, layers: Mapping[str, nn.Module], image: torch.Tensor) -> dict[str, int]:
    """Layer -> multiply-accumulates of all its calls in a forward pass of one image [1, C, H, W], run for it."""
    found = dict.fromkeys(layers, 0)

    def count(name: str, layer: nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        found[name] += macs_of_call(layer, inputs[0], output)

    handles = [layer.register_forward_hook(partial(count, name)) for name, layer in layers.items()]
    try:
        model(image)
    finally:
        for handle in handles:
            handle.remove()
    return found


def macs_of_call(layer: Any, x: torch.Tensor, y: torch.Tensor) -> int:
    """Multiply-accumulates of a linear layer or convolution that made y of x."""
    transposed = isinstance(layer, nn.modules.conv._ConvTransposeNd)
    return int((x if transposed else y).numel() * layer.weight[0].numel())
