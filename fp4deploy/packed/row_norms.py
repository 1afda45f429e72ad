"""Which LayerNorms of a graph one kernel computes with the sum before and the quantisation after them.

A block of a transformer adds a branch to its rows, normalises the sum and quantises that for the next layer: three
nodes, of which a compiler makes two kernels, and `fusion.layer_norm` one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from fp4deploy.packed.graph import Arithmetic, Graph, Norm
from fp4deploy.plugins.quantize import layer_norm


@dataclass(frozen=True)
class RowNorms:
    """norms: first outputs of such LayerNorms. sums: activations that the LayerNorm which reads them first adds up."""

    norms: frozenset[str]
    sums: frozenset[str]


def row_norms(graph: Graph, wide: Collection[str], dtype: torch.dtype, device: torch.device) -> RowNorms:
    """Those of a graph run in a dtype on a device; wide: activations in FP32, which the kernel does not write."""
    readers = {name: node for node in reversed(graph.nodes) for name in node.inputs}  # the first of each activation
    outputs = {each.activation for each in graph.outputs}
    norms = [
        node
        for node in graph.nodes
        if isinstance(node, Norm)
        and node.op == "layer_norm"
        and len(node.shape) == 1
        and layer_norm.supports(node.shape[0], dtype, device)
        and any(form.amax and form.axis == "last" and not form.pooled for form in node.outputs)
        and not {*node.inputs, *(form.name for form in node.outputs)} & set(wide)
    ]
    sums = {
        node.outputs[0].name
        for node in graph.nodes
        if isinstance(node, Arithmetic)
        and (node.op, len(node.inputs), node.alpha, len(node.outputs)) == ("add", 2, 1.0, 1)
        and node.outputs[0].amax is None
        and not node.outputs[0].pooled
        and not {*node.inputs} & set(wide)
        and any(readers.get(node.outputs[0].name) is norm for norm in norms)
    }
    return RowNorms(frozenset(norm.outputs[0].name for norm in norms), frozenset(sums - outputs - set(wide)))
