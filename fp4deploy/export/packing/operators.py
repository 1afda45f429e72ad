"""One node of the captured graph -> one node of the packed network, for every operation but the norms.

Most are written as they are (`as_written`), by the table in `capture`; those with more to decide have a function here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch

from fp4deploy.export.packing.writer import Write, Writer, refuse, role_order, size_values
from fp4deploy.graph import ir
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Form
from fp4deploy.rest import FP16


def as_written(
    kind: type[packed.Step], named: str = "", roles: tuple[str, ...] = (), always: Mapping[str, str] = {}, **fields: str
) -> Write:
    """Writes nodes of one kind whose fields are attributes of the captured node, as they are.

    Args:
        named: the field that holds the name of the operation.
        roles: the order of the inputs, where it is not that of `role_order`.
        always: fields of one value.
        fields: name of the node's field -> name of the attribute.
    """

    def write(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
        values: dict[str, Any] = {field: _listed(node.attributes[name]) for field, name in fields.items()}
        values |= {named: node.op} if named else {}
        return cast(packed.Node, kind(inputs=writer.reads(node, roles), outputs=forms, **always, **values))

    return write


def _listed(value: Any) -> object:
    """Tuples as the lists of the file; a size is one where it is an expression."""
    return [_listed(each) for each in value] if isinstance(value, tuple | list) else value


def write_conv(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A convolution; its bias may be the business of the norm that follows."""
    source = node.inputs.get("input", "")
    if (source, node.name) in writer.joined:
        inputs = [writer.read(value, node) for value in writer.producers[source].inputs.values()]
    else:
        inputs = [writer.source(node)]
    attributes = node.attributes
    return packed.Conv2d(
        op=cast(Any, f"conv{_axes(node)}d"),
        inputs=inputs,
        outputs=forms,
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        dilation=list(attributes["dilation"]),
        groups=attributes["groups"],
        relu=writer.relu(node),
        **writer.layer(node, with_bias=writer.gives_bias(node) is None),
    )


def write_conv_transpose(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A transposed convolution."""
    attributes = node.attributes
    return packed.ConvTranspose2d(
        op=cast(Any, f"conv_transpose{_axes(node)}d"),
        inputs=[writer.source(node)],
        outputs=forms,
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        output_padding=list(attributes["output_padding"]),
        dilation=list(attributes["dilation"]),
        groups=attributes["groups"],
        **writer.layer(node, with_bias=True),
    )


def _axes(node: ir.Node) -> int:
    """Spatial axes of a convolution."""
    return len(node.attributes["weight_shape"]) - 2


def write_linear(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A linear layer over the last axis."""
    inputs = [writer.source(node)]
    return packed.Linear(inputs=inputs, outputs=forms, relu=writer.relu(node), **writer.layer(node, with_bias=True))


PARAMETERS: dict[str, tuple[str, ...]] = {  # activation function -> its numbers among ATen's arguments
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "softplus": ("beta", "threshold"),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
}
LIMITS = {"min": -FP16.largest, "max": FP16.largest}  # which limit nothing


def write_activation(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """An activation function with its numbers."""
    if node.op == "elu" and (node.attributes.get("scale", 1) != 1 or node.attributes.get("input_scale", 1) != 1):
        raise refuse(node, "an ELU with scales")
    given = [node.attributes[name] for name in PARAMETERS.get(node.op, ())]
    names = PARAMETERS.get(node.op, ())
    numbers = [LIMITS[name] if value is None else float(value) for name, value in zip(names, given, strict=True)]
    function = "clamp" if node.op == "hardtanh" else node.op
    if node.op == "gelu" and node.attributes.get("approximate", "none") == "tanh":
        function = "gelu_tanh"
    inputs = [writer.source(node)]
    return packed.Activation(function=cast(Any, function), parameters=numbers, inputs=inputs, outputs=forms)


def write_prelu(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A PReLU, whose slopes are a parameter."""
    tensor = node.parameters["weight"]
    writer.plain(tensor, writer.state[tensor])
    return packed.PReLU(tensor=tensor, inputs=[writer.source(node)], outputs=forms)


COMPARISONS: dict[str, str] = {
    "gt": "greater", "ge": "greater_equal", "lt": "less", "le": "less_equal", "eq": "equal", "ne": "not_equal",
}  # fmt: skip


def write_compare(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A comparison with an activation or a number."""
    number = node.attributes.get("number")
    if number is not None and not isinstance(number, int | float):
        raise refuse(node, "a comparison with a size")
    return packed.Compare(
        op=cast(Any, COMPARISONS[node.op]),
        inputs=writer.reads(node),
        outputs=forms,
        number=None if number is None else float(number),
    )


def write_take(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Positions of an axis, which the module's code fixes or other nodes compute."""
    axis = node.attributes["dim"]
    if "index" not in node.parameters:
        given = writer.reads(node, ("input", "index"))
        chosen: dict[str, Any] = {"function": "index_select.default", "roles": ["self", "index"]}
        return packed.Aten(**chosen, arguments={"dim": axis}, inputs=given, outputs=forms)
    size = writer.shape(node, "input")[axis]
    positions = [int(each) for each in writer.state[node.parameters["index"]].flatten().tolist()]
    if any(each < 0 for each in positions):
        if not isinstance(size, int):
            raise refuse(node, "negative positions of an axis without a fixed size")
        positions = [each % size for each in positions]
    inputs = [writer.source(node)]
    return packed.Take(dim=axis, indices=positions, inputs=inputs, outputs=forms)


def write_arithmetic(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A sum, difference, product or quotient."""
    number = node.attributes.get("number")
    if number is not None and not isinstance(number, int | float):
        raise refuse(node, "arithmetic with a size")
    return packed.Arithmetic(
        op=cast(Any, node.op),
        inputs=writer.reads(node),
        outputs=forms,
        number=None if number is None else float(number),
        alpha=float(node.attributes.get("alpha", 1)),
    )


def write_cast(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Another type of floating point numbers, or those that a comparison gives: the same numbers."""
    if not node.attributes["dtype"].is_floating_point:
        raise refuse(node, f"a cast to {str(node.attributes['dtype']).removeprefix('torch.')}")
    return packed.Arithmetic(op="mul", number=1.0, inputs=writer.reads(node), outputs=forms)


def write_pool(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A pooling window."""
    attributes = node.attributes
    if attributes.get("divisor_override"):
        raise refuse(node, "an average over another count")
    return packed.Pool(
        op=cast(Any, node.op),
        inputs=[writer.source(node)],
        outputs=forms,
        kernel=list(attributes["kernel_size"]),
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        dilation=list(attributes.get("dilation", (1,) * len(attributes["kernel_size"]))),
        ceil_mode=attributes["ceil_mode"],
        count_padding=bool(attributes.get("count_include_pad", True)),
    )


def write_pad(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Padding; an infinite number, as before maximum pooling, is the largest one between layers."""
    attributes, value = node.attributes, node.attributes["value"]
    return packed.Pad(
        pad=size_values(attributes["pad"]),
        mode=attributes["mode"],
        value=math.copysign(writer.rest.largest, value) if math.isinf(value) else value,
        inputs=[writer.source(node)],
        outputs=forms,
    )


def write_attention(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Scaled dot-product attention."""
    mask, constant = node.inputs.get("attn_mask"), node.parameters.get("attn_mask")
    chosen = mask is not None and not writer.captured.values[mask].dtype.is_floating_point  # by 1 and 0
    if constant is not None:
        value = writer.state[constant]
        seen = value if value.dtype == torch.bool else value == 0
        if seen is value or bool((seen | value.isneginf()).all()):
            chosen = not bool(seen.any(-1).all())
            own = f"{constant}.mask"  # what else reads the constant reads its own numbers
            writer.state[own] = seen if chosen else torch.where(seen, 0.0, -writer.rest.largest)
            node = replace(node, parameters={**node.parameters, "attn_mask": own})
    scale, causal = node.attributes["scale"], bool(node.attributes["is_causal"])
    inputs = writer.reads(node, ("query", "key", "value", "attn_mask"))
    if node.attributes.get("enable_gqa"):
        inputs[1:3] = [_for_each_query(writer, node, *each) for each in zip(KEYS, inputs[1:3], strict=True)]
    scale = None if scale is None else float(scale)
    if chosen:
        # Added to the scores as 0 and the least number. A query that sees nothing, as in a text that is padded on the
        # left, gives 0 in torch.
        last = len(writer.shape(node, "attn_mask")) - 1
        any_key = writer.step(packed.Reduce, inputs[3], "mask", function="amax", dims=[last], keep=True)
        less = writer.step(packed.Arithmetic, inputs[3], "mask", op="add", number=-1.0)
        inputs[3] = writer.step(packed.Arithmetic, less, "mask", op="mul", number=writer.rest.largest)
        every = writer.steps(packed.Attention, inputs, "attention", causal=causal, scale=scale)
        return packed.Arithmetic(inputs=[every, any_key], outputs=forms, op="mul")
    return packed.Attention(inputs=inputs, outputs=forms, causal=causal, scale=scale)


KEYS = ("key", "value")


def _for_each_query(writer: Writer, node: ir.Node, role: str, read: str) -> str:
    """Keys or values [N, heads, L, D], repeated for each query of a group: [N, query heads, L, D]."""
    queries, (n, heads, *rest) = (writer.shape(node, name) for name in ("query", role))
    if not isinstance(queries[1], int) or not isinstance(heads, int):
        raise refuse(node, "an attention with grouped queries of a number of heads that is not fixed")
    each = queries[1] // heads
    if each == 1:
        return read
    apart = writer.step(packed.Reshape, read, role, op="reshape", shape=size_values((n, heads, 1, *rest)))
    repeated = writer.step(packed.Reshape, apart, role, op="expand", shape=size_values((n, heads, each, *rest)))
    return writer.step(packed.Reshape, repeated, role, op="reshape", shape=size_values((n, heads * each, *rest)))


def write_arange(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Positions along an axis of open size."""
    sizes = dict(zip(node.attributes, size_values(tuple(node.attributes.values())), strict=True))
    return packed.Aten(function="arange.start_step", roles=[], arguments=cast(Any, sizes), inputs=[], outputs=forms)


def write_aten(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """An operator of ATen that a packed network may name, as its schema has it."""
    name = node.op.removeprefix("aten.")
    attributes = {key: value for key, value in node.attributes.items() if key != "result"}
    roles = sorted((*node.inputs, *node.parameters), key=role_order)
    for overload in getattr(torch.ops.aten, name).overloads():
        schema = getattr(getattr(torch.ops.aten, name), overload)._schema
        tensors = {argument.name for argument in schema.arguments if "Tensor" in str(argument.type)}
        numbers = {argument.name for argument in schema.arguments} - tensors
        given = [_schema_role(role, tensors) for role in roles]
        if {*attributes} == numbers and {role.partition(".")[0] for role in given} == tensors:
            return packed.Aten(
                function=f"{name}.{overload}",
                roles=given,
                arguments={key: _argument(node, value) for key, value in attributes.items()},
                result=node.attributes.get("result", 0),
                inputs=[writer.reads(node, (role,))[0] for role in roles],
                outputs=forms,
            )
    raise refuse(node, "a call of a form of its own")


def _schema_role(role: str, names: set[str]) -> str:
    return "self" if role == "input" and "input" not in names else role


def _argument(node: ir.Node, value: object) -> Any:
    if isinstance(value, tuple | list):
        return [list(each) if isinstance(each, tuple) else each for each in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise refuse(node, f"an argument such as {value!r:.40}")
