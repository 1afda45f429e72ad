"""Checks of a graph: every name exists, every shape fits, every activation is written once and before it is read.

A network that passes does not fail later because of its file, whatever program wrote it.
"""

from __future__ import annotations

from fp4deploy.errors import InputError
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.models.input_encoding import ENCODED_CHANNELS
from fp4deploy.packed.graph import (
    INPUT,
    RGB,
    Activation,
    Concat,
    Conv2d,
    Convolution,
    ConvTranspose2d,
    Graph,
    GroupNormReLU,
    Head,
    Node,
    outputs_of,
    tensors_of,
)


def check_graph(graph: Graph, channels: int) -> None:
    """Check the whole graph.

    Args:
        channels: how many the model card says that the head gives.

    Raises:
        InputError: naming the node and the fault.
    """
    first = graph.images.get(INPUT)
    expected = ENCODED_CHANNELS if graph.digits else RGB.channels
    if first is None or first.stride != RGB.stride or first.channels != expected:
        kind = "digits" if graph.digits else "RGB"
        raise InputError(f"The graph has no input named '{INPUT}' of the {expected} channels of {kind}.")
    if first.amax is not None:
        _require(first.amax in graph.tensors, f"the tensor '{first.amax}' that the input is packed with is missing")
        _tensor(graph, first.amax, "F32", [])
    written = {INPUT}
    for number, node in enumerate(graph.steps):
        try:
            _check_names(graph, node, written)
            _check_node(graph, node, channels)
        except InputError as error:
            layer = "" if isinstance(node, Concat) else f" '{node.layer}'"
            raise InputError(f"Node {number} of the graph ({node.op}{layer}): {error}") from None
        if isinstance(node, Head) != (number == len(graph.steps) - 1):
            raise InputError(f"Node {number} of the graph ({node.op}): the head is the last node, and only the last.")
        written.update(outputs_of(node))
    unused = [name for name in graph.images if name not in written]
    read = {name for node in graph.steps for name in tensors_of(node, graph.images)} | {first.amax}
    unused += [name for name in graph.tensors if name not in read]
    if unused:
        raise InputError(f"{len(unused)} names of the graph are never used (first '{unused[0]}').")


def _check_names(graph: Graph, node: Node, written: set[str]) -> None:
    for name in node.inputs:
        _require(name in written, f"it reads '{name}', which no node before it writes")
    outputs = outputs_of(node)
    for name in outputs:
        _require(name in graph.images, f"it writes '{name}', which the graph does not describe")
        _require(name not in written and outputs.count(name) == 1, f"it writes '{name}' a second time")
    for name in tensors_of(node, graph.images):
        _require(name in graph.tensors, f"the tensor '{name}' is missing")
    for name in outputs:
        amax = graph.images[name].amax
        if amax:
            _tensor(graph, amax, "F32", [])


def _check_node(graph: Graph, node: Node, out: int) -> None:
    inputs = [graph.images[name] for name in node.inputs]
    channels = sum(activation.channels for activation in inputs)
    _require(len({activation.stride for activation in inputs}) == 1, "its inputs differ in size")
    stride = inputs[0].stride
    packed = [activation.amax is not None for activation in inputs]
    if isinstance(node, Convolution):
        _require(all(packed) if node.precision == "nvfp4" else not any(packed), f"its input is not {node.precision}")
    else:
        _require(not any(packed), "its input is packed")
    if isinstance(node, GroupNormReLU):
        _check_norm(graph, node, channels, stride)
    elif isinstance(node, Concat):
        _check_shape(graph.images[node.output], channels, stride)
    elif isinstance(node, Head):
        _weight(graph, node, out, channels, 1 + 2 * node.padding)
    elif isinstance(node, Conv2d):
        if len(inputs) == 2:
            _require(node.precision == "nvfp4", "only a packed convolution has two inputs")
            _require(
                inputs[0].channels % NVFP4_BLOCK == 0, f"its first input is not a multiple of {NVFP4_BLOCK} channels"
            )
        output = graph.images[node.output]
        _weight(graph, node, output.channels, channels, 1 + 2 * node.padding)
        _check_shape(output, output.channels, stride)
    elif isinstance(node, ConvTranspose2d):
        output = graph.images[node.output]
        _weight(graph, node, output.channels, channels, 2)
        _require(stride % 2 == 0, "its input is not half the size of anything")
        _check_shape(output, output.channels, stride // 2)


def _check_norm(graph: Graph, node: GroupNormReLU, channels: int, stride: int) -> None:
    _require(channels % node.groups == 0, f"{node.groups} groups do not divide {channels} channels")
    for name in (f"{node.layer}.weight", f"{node.layer}.bias", *([node.bias] if node.bias else [])):
        _tensor(graph, name, "F16", [channels])
    for form in node.outputs:
        _check_shape(graph.images[form.output], channels, 2 * stride if form.pooled else stride)


def _check_shape(activation: Activation, channels: int, stride: int) -> None:
    _require(
        (activation.channels, activation.stride) == (channels, stride),
        f"its output is described as {activation.channels} channels at stride {activation.stride}, "
        f"not {channels} at {stride}",
    )


def _weight(graph: Graph, node: Convolution, out: int, channels: int, kernel: int) -> None:
    """OHWI, the channels of a packed one padded to whole blocks."""
    weight, shape = f"{node.layer}.weight", [out, kernel, kernel]
    if node.bias:
        _tensor(graph, node.bias, "F16", [out])
    if node.precision == "fp16":
        _tensor(graph, weight, "F16", [*shape, channels])
        return
    blocks = -(-channels // NVFP4_BLOCK)
    _tensor(graph, f"{weight}.codes", "U8", [*shape, blocks * NVFP4_BLOCK // 2])
    _tensor(graph, f"{weight}.scales", "F8_E4M3", [*shape, blocks])
    _tensor(graph, f"{weight}.amax", "F32", [])


def _tensor(graph: Graph, name: str, dtype: str, shape: list[int]) -> None:
    info = graph.tensors[name]
    _require(
        (info.dtype, info.shape) == (dtype, shape),
        f"the tensor '{name}' is {info.dtype} {info.shape}, and {dtype} {shape} is needed",
    )


def _require(condition: bool, cause: str) -> None:
    if not condition:
        raise InputError(f"{cause}. Export the model again: fp4deploy export --format packed")
