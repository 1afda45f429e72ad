"""Whether a graph that anyone may have written has a meaning: checked before it is audited or an engine is built of it.

TensorRT skips an attribute of the wrong type and takes the default: a file whose `strides` are a string becomes an
engine of another network, without an error. So the whole file is checked against ONNX's own rules, attribute types and
shapes among them, and what those rules leave open about convolutions: channels, groups, biases, `auto_pad`.

What runtimes take although ONNX's rules forbid it is no defect here: nodes in another order, operators of plugins in
the default domain, domains without a version, and declared shapes of values, which go stale when a file is edited.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from graphlib import TopologicalSorter

import onnx
import onnx.checker
import onnx.defs
import onnx.helper
import onnx.shape_inference

from fp4deploy.export.onnx.trt_operators import standardized

CONVOLUTIONS = ("Conv", "ConvTranspose")
AUTO_PAD = (b"NOTSET", b"SAME_UPPER", b"SAME_LOWER", b"VALID")
UNKNOWN = "unknown"  # domain of operators that are not ONNX's


def check_meaning(model: onnx.ModelProto) -> None:
    """Refuse a graph that breaks ONNX's rules in a way that changes what it computes.

    Raises:
        ValueError, RuntimeError: naming the node or tensor; onnx's own exceptions are among them.
    """
    opsets = {"ai.onnx" if each.domain == "" else each.domain: each.version for each in model.opset_import}
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opsets.get("ai.onnx", 0) <= newest:
        raise ValueError(f"its opset is {opsets.get('ai.onnx', 'missing')}; known are 1 to {newest}")
    plain = _plain(model)
    for value in plain.graph.input:
        _check_sizes(value)
    try:
        plain = standardized(plain)
        tensors = [value.type.tensor_type for value in plain.graph.output if value.type.HasField("tensor_type")]
        unknown = [tensor for tensor in tensors if not tensor.HasField("shape")]
        for tensor in unknown:  # the checker asks for some shape
            tensor.shape.SetInParent()
        onnx.checker.check_model(plain, skip_opset_compatibility_check=True)  # of functions
        for tensor in unknown:
            tensor.ClearField("shape")
        onnx.shape_inference.infer_shapes(plain, check_type=True, strict_mode=True)
    except onnx.shape_inference.InferenceError as error:
        raise ValueError(re.sub(r"\[\w+\] |Inference error\(s\): ", "", str(error))) from error
    shaped = onnx.shape_inference.infer_shapes(plain, data_prop=True)
    for value in shaped.graph.value_info:
        _check_sizes(value)
    shapes = {
        value.name: [
            size.dim_value if size.HasField("dim_value") else None for size in value.type.tensor_type.shape.dim
        ]
        for value in (*shaped.graph.input, *shaped.graph.value_info)
        if value.type.tensor_type.HasField("shape")
    }
    shapes |= {tensor.name: list(tensor.dims) for tensor in shaped.graph.initializer}
    for number, node in enumerate(shaped.graph.node):
        if node.domain in ("", "ai.onnx") and node.op_type in CONVOLUTIONS:
            _check_convolution(node, node.name or f"node {number}", [shapes.get(name) for name in node.input])


def _plain(model: onnx.ModelProto) -> onnx.ModelProto:
    """A copy in order, without declared shapes, its unknown operators in a domain of their own."""
    plain = onnx.ModelProto()
    plain.CopyFrom(model)
    graph = plain.graph
    del graph.value_info[:]
    for value in graph.output:
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")
    producers = {name: number for number, node in enumerate(graph.node) for name in node.output if name}
    above = {
        number: {producers[name] for name in node.input if name in producers} for number, node in enumerate(graph.node)
    }
    if any(max(before, default=-1) >= number for number, before in above.items()):
        ordered = [graph.node[number] for number in TopologicalSorter(above).static_order()]
        del graph.node[:]
        graph.node.extend(ordered)
    for node in _nodes(graph.node):
        if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type):
            node.domain = UNKNOWN
    imported = {each.domain for each in plain.opset_import}
    absent = {node.domain for node in _nodes(graph.node)} - imported - {"", "ai.onnx"}
    plain.opset_import.extend(onnx.helper.make_opsetid(domain, 1) for domain in sorted(absent))
    return plain


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    """With those of subgraphs."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _check_sizes(value: onnx.ValueInfoProto) -> None:
    sizes = [size.dim_value for size in value.type.tensor_type.shape.dim]
    if min(sizes, default=0) < 0:
        raise ValueError(f"{value.name} has the shape {sizes}")


def _check_convolution(node: onnx.NodeProto, name: str, shapes: list[list[int | None] | None]) -> None:
    attributes = {each.name: each for each in node.attribute}
    if "auto_pad" in attributes and attributes["auto_pad"].s not in AUTO_PAD:
        raise ValueError(f"{name} ({node.op_type}): its auto_pad is none of ONNX's")
    groups = attributes["group"].i if "group" in attributes else 1
    x, weight, bias = (*shapes, None)[:3]
    if weight is None or len(weight) < 3 or weight[0] is None or weight[1] is None:
        return
    if groups < 1 or weight[0] % groups:
        raise ValueError(f"{name} ({node.op_type}): {weight[0]} channels of its weight in {groups} groups")
    read, written = weight[1] * groups, weight[0]
    if node.op_type == "ConvTranspose":
        read, written = weight[0], weight[1] * groups
    if x is not None and len(x) > 1 and x[1] not in (None, read):
        raise ValueError(f"{name} ({node.op_type}): its weight is for {read} input channels, and it reads {x[1]}")
    if bias is not None and bias != [written] and None not in bias:
        raise ValueError(f"{name} ({node.op_type}): its bias has the shape {bias}, and it writes {written} channels")
