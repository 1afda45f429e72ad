"""Quantised inputs kept for the backward as codes and scales, 0.63 bytes a value instead of 2.

The weight gradient reads x', what the forward GEMM read. x' is 16 values of four bits times a scale, so a block is one
int64 and one float16 (an E4M3 value), from which the same x' is decoded bit for bit. For a network that a compiler
captures this is a pass over the graph of forward and backward, before it is divided: where a multiplication of the
backward reads x', or what only moves its values (a concatenation, repeated pixels, a view), it reads a copy of those
operators on the decoded codes, which the partitioner is told to compute in the backward. What is left for it to keep
are the codes.

A norm computed again could be rounded otherwise in another generated kernel, and its x' would differ from that of the
forward; codes cannot.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.utils.checkpoint import CheckpointPolicy

from fp4deploy.qat.fusion import operators

aten, ops = torch.ops.aten, torch.ops.fp4deploy
MULTIPLIES = (aten.convolution_backward.default, aten.mm.default, aten.bmm.default)
MOVES = (
    *(aten.cat.default, aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default),
    *(aten.permute.default, aten.transpose.int, aten.t.default, aten.unsqueeze.default, aten.squeeze.dim),
    *(aten.clone.default, aten.alias.default),
)


class KeepCodes(CustomGraphPass):
    """The pass, on the graph of forward and backward."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share

    def __call__(self, graph: fx.Graph) -> None:
        keep_codes(graph, self.share)

    def uuid(self) -> object:
        return get_hash_for_files((__file__, operators.__file__), str(self.share))


def keep_codes(graph: fx.Graph, share: float = 1.0) -> None:
    """Let multiplications of the backward read decoded codes where they read quantised values.

    share: of the quantised elements, at least; those that the backward reads last are kept longest and come first.
    """
    backward = _after_tangents(graph)
    multiplications = [each for each in graph.nodes if each.target in MULTIPLIES and each in backward]
    chosen = _chosen(multiplications, backward, share)
    for node in multiplications:
        known: dict[fx.Node, fx.Node | None] = {}
        with graph.inserting_before(node):
            for read in node.all_input_nodes:
                wanted = read not in backward and _sources(read) <= chosen
                decoded = _decoded(graph, read, known) if wanted else None
                if decoded is not None:
                    node.replace_input_with(read, decoded)


def _chosen(multiplications: list[fx.Node], backward: set[fx.Node], share: float) -> set[fx.Node]:
    """The quantisers whose codes are kept."""
    reads = [read for node in reversed(multiplications) for read in node.all_input_nodes if read not in backward]
    sizes = {source: source.meta["val"][0].numel() for read in reads for source in _sources(read)}
    found: dict[fx.Node, int] = {}
    for read in reads:
        if sum(found.values()) >= share * sum(sizes.values()):
            break
        found |= {source: sizes[source] for source in _sources(read)}
    return set(found)


def _sources(node: fx.Node) -> set[fx.Node]:
    """The quantisers that a tensor's values come from, if they are only moved on the way; else nothing."""
    if node.target is operator.getitem:
        source: Any = node.args[0]
        quantizes = source.target in (ops.traced_quantize.default, ops.traced_keep.default)
        return {source} if quantizes and node.args[1] == 0 else set()
    if node.op != "call_function" or node.target not in MOVES:
        return set()
    parts = [_sources(each) for each in node.all_input_nodes]
    return set().union(*parts) if all(parts) else set()


def _after_tangents(graph: fx.Graph) -> set[fx.Node]:
    """What depends on a gradient of the network's results."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and str(node.target).startswith("tangents")
        if tangent or any(each in found for each in node.all_input_nodes):
            found.add(node)
    return found


def _decoded(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    """A copy of `node` that reads codes; None where it is no moved quantised tensor."""
    if node not in known:
        known[node] = _decoded_values(graph, node) or _moved(graph, node, known)
    return known[node]


def _decoded_values(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    source: Any = node.args[0] if node.target is operator.getitem else None
    if source is None or node.args[1] != 0:
        return None
    if source.target is ops.traced_quantize.default:
        source.target = ops.traced_keep.default
        source.meta["val"] = _fake(source, source.args)
    if source.target is not ops.traced_keep.default:
        return None
    amax, axis = source.args[1:3]
    codes, scales = (_results(graph, source, at) for at in (2, 3))
    value = node.meta["val"]
    return _call(graph, ops.traced_decode.default, (codes, scales, amax, axis, value.shape[axis], value.dtype))


def _results(graph: fx.Graph, source: fx.Node, place: int) -> fx.Node:
    """The node of one result of `source`, right after it."""
    for user in source.users:
        if user.args[1] == place:
            return user
    with graph.inserting_after(source):
        result = graph.call_function(operator.getitem, (source, place))
    result.meta = {"val": source.meta["val"][place]}
    return result


def _moved(graph: fx.Graph, node: fx.Node, known: dict[fx.Node, fx.Node | None]) -> fx.Node | None:
    if node.op != "call_function" or node.target not in MOVES:
        return None
    inputs = {each: _decoded(graph, each, known) for each in node.all_input_nodes}
    if None in inputs.values():
        return None
    copy = graph.node_copy(node, lambda each: inputs[each])
    copy.meta = {**node.meta, "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    return copy


def _call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...]) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta = {"val": _fake(node, arguments), "recompute": CheckpointPolicy.MUST_RECOMPUTE}
    return node


def _fake(node: fx.Node, arguments: tuple[Any, ...]) -> object:
    """What a node computes, without data."""
    values = fx.node.map_arg(arguments, lambda each: each.meta["val"])
    with torch._guards.detect_fake_mode(list(values)):  # type: ignore[union-attr]
        return node.target(*values)  # type: ignore[operator]
