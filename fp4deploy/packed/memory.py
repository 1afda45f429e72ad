"""Memory of a graph: bytes of its weights, and the largest number of bytes of activations that are live at once.

An activation is live from the node that writes it to the last one that reads it, an output of the network to the end;
while a node runs, its inputs and outputs are all live. The peak is the largest sum over the nodes: what an allocator
without fragmentation needs. The workspace of kernels (sums of GroupNorm, a few bytes a channel) does not count. A
network that reads its input as multi-term FP4, or packed, starts with the RGB image, the encoded channels and their
packed form; the FP32 in which the terms are computed is workspace.

    plain             2 C (of an FP32 rest 4 C)      bytes a pixel
    packed, NVFP4     ceil16(C) / 2 + ceil16(C) / 16
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.packed.graph import Concat, Conv2d, Experts, Form, Graph, Input, Layer, Linear, Node, is_quantized
from fp4deploy.packed.shapes import Shape, Shapes, fitting, shapes_of, stored_shape, weight_shape
from fp4deploy.rest import FP16, Rest, rest_of


def last_reads(graph: Graph) -> dict[str, int]:
    """The number of the last node that reads each activation; outputs are read after the last node."""
    reads = {name: number for number, node in enumerate(graph.nodes) for name in node.inputs}
    return reads | {each.activation: len(graph.nodes) for each in graph.outputs}


def feature_map_bytes(form: Form, shape: Shape, rest: Rest = FP16) -> int:
    """Bytes of one activation of a shape with torch's axes."""
    if form.amax is None:
        return rest.bytes * math.prod(shape)
    channels = shape[1 if form.axis == "channels" else -1]
    blocks = -(-channels // NVFP4_BLOCK)
    return math.prod(shape) // max(1, channels) * blocks * (NVFP4_BLOCK // 2 + 1)


def input_shapes(graph: Graph, size: Sequence[int], batch: int = 1) -> dict[str, Shape]:
    """Shapes of the inputs: the first feature map of so many axes has this size, others in proportion.

    The rest is as in the example.
    """
    maps = {each.name: each.shape[2:] for each in graph.inputs if len(each.shape) == 2 + len(size)}
    first = next(iter(maps.values()), size)
    shapes: dict[str, Shape] = {}
    for each in graph.inputs:
        sides = maps.get(each.name, each.shape[2:])
        if each.name in maps:
            sides = [side * own // of for side, own, of in zip(size, sides, first, strict=True)]
        shapes[each.name] = (batch if 0 in each.free else each.shape[0], *each.shape[1:2], *sides)
    return shapes


def activation_bytes(graph: Graph, *size: int, batch: int = 1) -> int:
    """The largest number of bytes of activations that are live at once; `size`: the spatial axes of the first input.

    Raises:
        InputError: a size that the network cannot take.
    """
    given = input_shapes(graph, size, batch)
    shapes, forms, last = fitting(graph, given), graph.forms(), last_reads(graph)
    sizes = {name: feature_map_bytes(form, shapes[name], rest_of(graph)) for name, form in forms.items()}
    live = {form.name for each in graph.inputs for form in each.outputs}
    peak = sum(_reading_bytes(graph, each, given[each.name], shapes) for each in graph.inputs)
    for number, node in enumerate(graph.nodes):
        live.update(form.name for form in node.outputs)
        peak = max(peak, sum(sizes[name] for name in live))
        live = {name for name in live if last.get(name, -1) > number}
    return peak


def _reading_bytes(graph: Graph, each: Input, shape: Shape, shapes: Shapes) -> int:
    """The input and the forms of it up to those that nodes read."""
    read = shapes[each.outputs[0].name]
    rest = rest_of(graph)
    total = rest.bytes * math.prod(shape)
    if graph.digits:
        total += rest.bytes * math.prod(read)
    return total + sum(feature_map_bytes(form, read, rest) for form in each.outputs if form.amax)


def plain_bytes(graph: Graph) -> int:
    """Bytes of the same parameters in FP16."""
    shapes, total, counted = shapes_of(graph), 0, set[str]()
    for node in graph.nodes:
        if isinstance(node, Layer) and is_quantized(node) and node.layer not in counted:
            counted.add(node.layer)
            axis = -1 if isinstance(node, Linear) else 1
            channels = sum(shapes[name][axis] for name in node.inputs)
            total += FP16.bytes * math.prod(weight_shape(graph, node, channels))
        elif isinstance(node, Experts):
            total += FP16.bytes * math.prod(stored_shape(graph, node.tensor))
    others = [info for name, info in graph.tensors.items() if not name.endswith(".weight.scales")]
    kept = [info for info in others if "16" in info.dtype or (info.dtype == "F32" and info.shape)]
    return total + sum(FP16.bytes * math.prod(info.shape) for info in kept)


def full_precision(graph: Graph) -> Graph:
    """The same network with plain activations and written concatenations: what its FP16 model needs. Not to be run."""
    new: dict[str, str] = {}
    inputs = [each.model_copy(update={"outputs": _plain(each, new)}) for each in graph.inputs]
    nodes: list[Node] = []
    for node in graph.nodes:
        reads = [new[name] for name in node.inputs]
        if isinstance(node, Conv2d) and len(reads) == 2:
            joined = f"{node.outputs[0].name}.concat"
            nodes.append(Concat(inputs=reads, outputs=[Form(name=joined)]))
            reads = [joined]
        update: dict[str, object] = {"inputs": reads, "outputs": _plain(node, new)}
        if isinstance(node, Layer) and is_quantized(node):
            update["precision"] = "fp16"
        nodes.append(node.model_copy(update=update))
    outputs = [each.model_copy(update={"activation": new[each.activation]}) for each in graph.outputs]
    tensors = dict(graph.tensors)
    shapes = shapes_of(graph)
    for node in graph.nodes:
        if isinstance(node, Layer) and is_quantized(node):
            axis = -1 if isinstance(node, Linear) else 1
            channels = sum(shapes[name][axis] for name in node.inputs)
            info = graph.tensors[f"{node.layer}.weight.codes"]
            weight = info.model_copy(update={"dtype": "F16", "shape": weight_shape(graph, node, channels)})
            tensors[f"{node.layer}.weight"] = weight
    changed = {"rest": "fp16", "inputs": inputs, "nodes": nodes, "outputs": outputs, "tensors": tensors}
    return graph.model_copy(update=changed)


def _plain(writer: Node | Input, new: dict[str, str]) -> list[Form]:
    """One plain form of all that were full size, and one of the pooled ones; `new` learns their names."""
    found: dict[bool, Form] = {}
    for form in writer.outputs:
        kept = found.setdefault(form.pooled, Form(name=form.name, pooled=form.pooled))
        new[form.name] = kept.name
    return list(found.values())
