"""One node of the captured graph -> one node of the packed network, for every operation but the norms."""

from __future__ import annotations

from typing import Any, cast

from fp4deploy.export.packing.writer import Writer, refuse, size_value, size_values
from fp4deploy.graph import ir
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Form


def write_conv(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A convolution; its bias may be the business of the norm that follows."""
    _two_dimensional(node)
    source = node.inputs["input"]
    if (source, node.name) in writer.joined:
        inputs = [writer.read(value, node) for value in writer.producers[source].inputs.values()]
    else:
        inputs = [writer.read(source, node)]
    attributes = node.attributes
    return packed.Conv2d(
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
    _two_dimensional(node)
    attributes = node.attributes
    return packed.ConvTranspose2d(
        inputs=[writer.read(node.inputs["input"], node)],
        outputs=forms,
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        output_padding=list(attributes["output_padding"]),
        dilation=list(attributes["dilation"]),
        groups=attributes["groups"],
        **writer.layer(node, with_bias=True),
    )


def _two_dimensional(node: ir.Node) -> None:
    if len(node.attributes["weight_shape"]) != 4:
        raise refuse(node, f"a convolution over {len(node.attributes['weight_shape']) - 2} axes")


def write_linear(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A linear layer over the last axis."""
    inputs = [writer.read(node.inputs["input"], node)]
    return packed.Linear(inputs=inputs, outputs=forms, relu=writer.relu(node), **writer.layer(node, with_bias=True))


PARAMETERS: dict[str, tuple[str, ...]] = {  # activation function -> its numbers among ATen's arguments
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "softplus": ("beta", "threshold"),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
}
LIMITS = {"min": -65504.0, "max": 65504.0}


def write_activation(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """An activation function with its numbers."""
    if node.op == "prelu":
        raise refuse(node, "a PReLU")
    if node.op == "elu" and (node.attributes.get("scale", 1) != 1 or node.attributes.get("input_scale", 1) != 1):
        raise refuse(node, "an ELU with scales")
    given = [node.attributes[name] for name in PARAMETERS.get(node.op, ())]
    names = PARAMETERS.get(node.op, ())
    numbers = [LIMITS[name] if value is None else float(value) for name, value in zip(names, given, strict=True)]
    function = "clamp" if node.op == "hardtanh" else node.op
    if node.op == "gelu" and node.attributes.get("approximate", "none") == "tanh":
        function = "gelu_tanh"
    inputs = [writer.read(node.inputs["input"], node)]
    return packed.Activation(function=cast(Any, function), parameters=numbers, inputs=inputs, outputs=forms)


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


def write_concat(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A concatenation."""
    return packed.Concat(inputs=writer.reads(node), outputs=forms, dim=node.attributes["dim"])


def write_pool(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A pooling window."""
    attributes = node.attributes
    if attributes.get("divisor_override"):
        raise refuse(node, "an average over another count")
    return packed.Pool(
        op=cast(Any, node.op),
        inputs=[writer.read(node.inputs["input"], node)],
        outputs=forms,
        kernel=list(attributes["kernel_size"]),
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        dilation=list(attributes.get("dilation", (1, 1))),
        ceil_mode=attributes["ceil_mode"],
        count_padding=bool(attributes.get("count_include_pad", True)),
    )


def write_adaptive(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A pooling to a given size."""
    function: Any = "avg" if node.op == "adaptive_avg_pool" else "max"
    inputs = [writer.read(node.inputs["input"], node)]
    return packed.AdaptivePool(
        function=function, inputs=inputs, outputs=forms, size=size_values(node.attributes["output_size"])
    )


def write_reduce(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A reduction over axes."""
    inputs = [writer.read(node.inputs["input"], node)]
    dims = [int(dim) for dim in node.attributes["dim"]]
    function = cast(Any, node.op)
    return packed.Reduce(function=function, dims=dims, keep=node.attributes["keepdim"], inputs=inputs, outputs=forms)


def write_resize(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A nearest or bilinear resize."""
    size, scale = node.attributes["size"], node.attributes["scale"]
    return packed.Resize(
        mode=node.attributes["mode"],
        inputs=[writer.read(node.inputs["input"], node)],
        outputs=forms,
        size=None if size is None else size_values(size),
        scale=None if scale is None else list(scale),
        align_corners=node.attributes["align_corners"],
    )


def write_shuffle(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A pixel shuffle or unshuffle."""
    inputs = [writer.read(node.inputs["input"], node)]
    return packed.PixelShuffle(op=cast(Any, node.op), factor=node.attributes["factor"], inputs=inputs, outputs=forms)


def write_reshape(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Another shape of the same values."""
    shape = size_values(node.attributes["shape"])
    return packed.Reshape(op=cast(Any, node.op), shape=shape, inputs=writer.reads(node), outputs=forms)


def write_permute(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Another order of the axes."""
    return packed.Permute(dims=list(node.attributes["dims"]), inputs=writer.reads(node), outputs=forms)


def write_slice(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A range along one axis."""
    end = node.attributes["end"]
    return packed.Slice(
        dim=node.attributes["dim"],
        start=size_value(node.attributes["start"]),
        end=None if end is None else size_value(end),
        step=node.attributes["step"],
        inputs=writer.reads(node),
        outputs=forms,
    )


def write_select(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """One index along an axis, which goes."""
    index = size_value(node.attributes["index"])
    return packed.Select(dim=node.attributes["dim"], index=index, inputs=writer.reads(node), outputs=forms)


def write_pad(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Constant padding."""
    attributes = node.attributes
    return packed.Pad(
        pad=size_values(attributes["pad"]),
        mode=attributes["mode"],
        value=attributes["value"],
        inputs=[writer.read(node.inputs["input"], node)],
        outputs=forms,
    )


def write_matmul(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A product of two activations."""
    return packed.Matmul(inputs=writer.reads(node), outputs=forms)


def write_softmax(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """A softmax over one axis."""
    return packed.Softmax(dim=node.attributes["dim"], inputs=writer.reads(node), outputs=forms)


def write_attention(writer: Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    """Scaled dot-product attention."""
    if "attn_mask" in node.inputs or "attn_mask" in node.parameters or node.attributes.get("enable_gqa"):
        raise refuse(node, "an attention with a mask or grouped queries")
    scale, causal = node.attributes["scale"], bool(node.attributes["is_causal"])
    return packed.Attention(
        inputs=writer.reads(node), outputs=forms, causal=causal, scale=None if scale is None else float(scale)
    )
