"""Which activations of a packed network stay FP32 where the others are FP16 or BF16: the rule of `graph.wide` on its
nodes.

BF16 does not hold positions beyond 256: what gives positions stays FP32 there, too. So does what is computed of whole
numbers and constants alone, products included, such as the angles of a rotary embedding or of a time step: FP16 has
0.25 between its numbers at 500. What reads their sines does not. And so does what the file says (`Graph.wide`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp4deploy.graph.wide import wide_steps
from fp4deploy.packed.graph import (
    Activation,
    Affine,
    ArgMax,
    Aten,
    Attention,
    Compare,
    Constant,
    Graph,
    GroupNormReLU,
    Layer,
    Matmul,
    Node,
    Norm,
    Reduce,
    Variance,
    function_of,
    numbers_of,
)
from fp4deploy.packed.operators import TAKES_WHOLE
from fp4deploy.rest import POSITIONS, Rest

CASTS = (Layer, Norm, GroupNormReLU, Affine, Matmul, Attention)  # whose operands and result have one type
SUMS = ("add", "sub", "mul", "pow", "square", "exp", "abs", "sum", "mean", "norm")


def wide_activations(graph: Graph, tensors: Mapping[str, torch.Tensor], rest: Rest) -> frozenset[str]:
    """The names of what nodes write in FP32, packed forms among them: a node computes in FP32 as a whole."""
    if rest.name == "fp32":
        return frozenset()
    nodes = graph.nodes
    writer = {form.name: at for at, node in enumerate(nodes) for form in node.outputs}
    said = {name for names in graph.wide.values() for name in names}
    seeds = {
        at
        for at, node in enumerate(nodes)
        if _is_seed(node, tensors, rest) or any(form.name in said for form in node.outputs)
    }
    found = _of_whole_numbers(graph) | wide_steps(
        range(len(nodes)),
        reads=lambda at: dict.fromkeys(writer[name] for name in nodes[at].inputs if name in writer),
        seeds=seeds,
        casts=lambda at: isinstance(nodes[at], CASTS),
        sums=lambda at: _is_sum(nodes[at]),
        kept={writer[each.activation] for each in graph.outputs if each.activation in writer},
    )
    return frozenset(form.name for at in found for form in nodes[at].outputs)


def _of_whole_numbers(graph: Graph) -> set[int]:
    """The nodes that compute with whole numbers and constants alone; comparisons, which give 0 and 1, end it."""
    whole = {form.name for each in graph.inputs if each.dtype == "int64" for form in each.outputs}
    computed, known, found = set[str](), set[str](), set[int]()
    for at, node in enumerate(graph.nodes):
        written = {form.name for form in node.outputs}
        if isinstance(node, Constant):
            known |= written
        elif (isinstance(node, Aten) and function_of(node) == "arange") or (
            isinstance(node, TAKES_WHOLE) and not isinstance(node, Aten | Compare) and whole.issuperset(node.inputs)
        ):
            whole |= written
        elif isinstance(node, Layer | Aten) or known.issuperset(node.inputs):
            continue
        elif (whole | computed | known).issuperset(node.inputs):
            computed |= set() if isinstance(node, Compare) else written
            found.add(at)
    return found


def _is_seed(node: Node, tensors: Mapping[str, torch.Tensor], rest: Rest) -> bool:
    if rest.whole < POSITIONS and _gives_positions(node):
        return True
    if isinstance(node, Constant):
        tensor = tensors[node.tensor]
        return tensor.dtype == torch.float32 and not rest.holds_tensor(tensor)
    return not isinstance(node, CASTS) and any(not rest.holds(number) for number in numbers_of(node))


def _gives_positions(node: Node) -> bool:
    return isinstance(node, ArgMax) or (isinstance(node, Aten) and bool(node.result))  # of sort and topk


def _is_sum(node: Node) -> bool:
    function: Any = node.function if isinstance(node, Activation | Reduce) else node.op
    return isinstance(node, Variance) or function in SUMS
