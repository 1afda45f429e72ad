"""Linear layers, and convolutions that became GEMMs, in the form that TensorRT-RTX 1.7 keeps as an FP4 GEMM.

Two forms of a MatMul are decoded to FP16 by the compiler, and have an equal one that is not:

    an input of four dimensions      flat [N,P,K] . W -> [N,P,O], then Reshape: the form in which the input is quantised
    a result that is read in parts   one MatMul a part, each with its rows of W, then Concat: queries, keys and values
                                     of one projection, gates, chunks

For the second the compiler moves Slice, Gather or Split above the MatMul, to the weight, and cannot cut FP4 codes. Cut
here, the parts are rows of the same codes and block scales, so **no number changes**; it multiplies them in one
batched FP4 GEMM where they are of one size, and drops the Concat.

Which part is read is found by following the numbers of the output features through Reshape, Transpose and pointwise
operators to what reads them (`read_parts`), so that no spelling of a network is known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.export.lowering.pattern import Fp4Layer, attribute, constant_ints, find_fp4_layers
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import NVFP4_BLOCK

PART = ".part."  # between a layer's name and the number of a part
MAX_PARTS = 16
Features = NDArray[np.int64]
_UNARY = ("Identity", "Cast", "Relu", "LeakyRelu", "Gelu", "Sigmoid", "Tanh", "HardSwish", "Softplus", "Elu")
_BINARY = ("Add", "Sub", "Mul", "Div")


class FlattenLinear(InPlacePass):
    """Multiply inputs of more than three dimensions in the shape in which they are quantised."""

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for layer in find_fp4_layers(model):
            reshape = layer.compute.inputs[0].producer() if layer.compute.inputs[0] is not None else None
            if layer.kind != "Linear" or reshape is None or reshape.op_type != "Reshape" or _bias(layer) is not None:
                continue
            writer = NodeWriter(model.graph, f"{layer.name}.gemm", before=layer.compute)
            weight = layer.compute.inputs[1]
            assert weight is not None
            result = writer.add(
                "MatMul", "matmul", layer.dequantized, weight, dtype=layer.half.dtype, shape=_flat_shape(layer)
            )
            result = writer.add("Reshape", "result", result, _extents(writer, layer, reshape))
            writer.replace(layer.compute.outputs[0], result)
            model.graph.remove(layer.compute, safe=True)
            modified = True
        return PassResult(model, modified)


class CutLinear(InPlacePass):
    """Write a MatMul whose result is read in parts as one MatMul a part."""

    def call(self, model: ir.Model) -> PassResult:
        modified = False
        for layer in find_fp4_layers(model):
            parts = read_parts(layer) if layer.kind == "Linear" and _bias(layer) is None else ()
            if len(parts) > 1:
                _cut(model.graph, layer, parts)
                modified = True
        return PassResult(model, modified)


def read_parts(layer: Fp4Layer) -> tuple[tuple[int, int], ...]:
    """(first, last + 1) of each range of output features that some operator reads without the others; () if unknown."""
    result = layer.compute.outputs[0]
    shape = [extent if isinstance(extent, int) else 1 for extent in result.shape or ()]  # an open one: any will do
    if not shape or shape[-1] != layer.out_channels:
        return ()
    numbers = np.broadcast_to(np.arange(layer.out_channels), (1, *shape[1:]))
    bounds = _bounds(layer, _followed(result, numbers)) or _bounds(layer, _followed(result, numbers, numbers.size))
    parts = tuple(pairwise(bounds))
    blocks = layer.scales.const_value.size // layer.out_channels if layer.scales.const_value is not None else 0
    return parts if all((end - start) * blocks > 1 for start, end in parts) else ()


def _bounds(layer: Fp4Layer, reads: Iterable[Features]) -> list[int]:
    """Where parts begin and end; [] where there are more than MAX_PARTS."""
    edges = {0, layer.out_channels}
    for read in reads:
        found = np.unique(_once(read))
        ends = np.flatnonzero(np.diff(found) > 1)
        edges |= {int(found[0]), int(found[-1]) + 1, *(found[ends] + 1).tolist(), *found[ends + 1].tolist()}
        if len(edges) > MAX_PARTS + 1:
            return []
    return sorted(edges)


def _once(read: Features) -> Features:
    """Without the axes along which a value is repeated."""
    return read[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in read.strides)]


def _followed(value: ir.Value, numbers: Features, whole: int = 0) -> Iterator[Features]:
    """The features that each last reader of a value reads; `numbers` has the value's shape, for a batch of one.

    whole: how many numbers there are, where a part counts as read that has fewer, such as queries whose halves a rotary
        embedding reads.
    """
    if numbers.size < whole:
        yield numbers
        return
    if value.is_graph_output():
        yield numbers
    for node, _ in value.uses():
        try:
            passed = _passed(node, value, numbers)
        except (ValueError, IndexError):  # a shape for another batch or size
            passed = None
        if passed is None:
            yield numbers
        for output, changed in passed or ():
            if changed.size:
                yield from _followed(output, changed, whole)


def _passed(node: ir.Node, value: ir.Value, numbers: Features) -> list[tuple[ir.Value, Features]] | None:
    """What a node gives on of them, an entry an output; None where it computes something of them."""
    output = node.outputs[0]
    if node.op_type in _UNARY:
        return [(output, numbers)]
    if node.op_type in _BINARY:
        other = next((each for each in node.inputs if each is not value), None)
        tensor = ir.convenience.get_const_tensor(other) if other is not None else None
        if tensor is None or np.broadcast_shapes(tensor.shape.numpy(), numbers.shape) != numbers.shape:
            return None
        return [(output, numbers)]
    if node.op_type == "Transpose":
        order = attribute(node, "perm", list(range(numbers.ndim))[::-1])
        assert isinstance(order, list)
        return [(output, numbers.transpose(order))]
    given = [constant_ints(each) or _joined(each) for each in node.inputs[1:]]
    if node.op_type not in _BY_CONSTANTS or None in given[:1]:
        return None
    changed = _BY_CONSTANTS[node.op_type](node, numbers, [each or [] for each in given])
    return list(zip(node.outputs, changed, strict=True))


def _joined(value: ir.Value | None) -> list[int] | None:
    """Extents that a graph of an open size concatenates, an open one as 1, like everywhere here."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type != "Concat":
        return None
    return [extent for each in node.inputs for extent in constant_ints(each) or [1]]


def _reshaped(node: ir.Node, numbers: Features, given: list[list[int]]) -> list[Features]:
    extents = [numbers.shape[place] if extent == 0 else extent for place, extent in enumerate(given[0])]
    return [numbers.reshape(extents)]


def _squeezed(node: ir.Node, numbers: Features, given: list[list[int]]) -> list[Features]:
    return [numbers.squeeze(tuple(given[0])) if node.op_type == "Squeeze" else np.expand_dims(numbers, given[0])]


def _sliced(node: ir.Node, numbers: Features, given: list[list[int]]) -> list[Features]:
    starts, ends, axes, steps = (*given, [], [])[:4]
    axes, steps = axes or list(range(len(starts))), steps or [1] * len(starts)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        if step < 1:
            raise ValueError("in reverse")
        numbers = numbers[(slice(None),) * (axis % numbers.ndim) + (slice(start, end, step),)]
    return [numbers]


def _gathered(node: ir.Node, numbers: Features, given: list[list[int]]) -> list[Features]:
    axis = attribute(node, "axis", 0)
    indices = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
    assert isinstance(axis, int)
    assert indices is not None
    return [np.take(numbers, indices.numpy(), axis)]


def _split(node: ir.Node, numbers: Features, given: list[list[int]]) -> list[Features]:
    axis = attribute(node, "axis", 0)
    assert isinstance(axis, int)
    if given:
        return np.split(numbers, np.cumsum(given[0])[:-1], axis)
    size = -(-numbers.shape[axis] // len(node.outputs))
    return np.split(numbers, range(size, numbers.shape[axis], size), axis)


_BY_CONSTANTS = {
    "Reshape": _reshaped, "Squeeze": _squeezed, "Unsqueeze": _squeezed, "Slice": _sliced, "Gather": _gathered,
    "Split": _split,
}  # fmt: skip


def _cut(graph: ir.Graph, layer: Fp4Layer, parts: tuple[tuple[int, int], ...]) -> None:
    activation, result = layer.compute.inputs[0], layer.compute.outputs[0]
    assert activation is not None
    products = []
    for number, (start, end) in enumerate(parts):
        writer = NodeWriter(graph, f"{layer.name}{PART}{number}", before=layer.compute)
        products.append(writer.add("MatMul", "matmul", activation, _rows(writer, layer, start, end)))
    whole = NodeWriter(graph, f"{layer.name}.parts", before=layer.compute)
    whole.replace(result, whole.add("Concat", "concat", *products, axis=-1))
    graph.remove(layer.compute, safe=True)


def _rows(writer: NodeWriter, layer: Fp4Layer, start: int, end: int) -> ir.Value:
    """The weight [K, end - start] of some output features."""
    above = next(user for user, _ in layer.scales.uses())
    scale = above.inputs[1]
    assert scale is not None
    scales = _stored_rows(writer, "weight.scales", layer.scales, start, end)
    codes = _stored_rows(writer, "weight.codes", layer.codes, start, end)
    block = writer.add("DequantizeLinear", "scales_dequantized", scales, scale)
    value = writer.add("DequantizeLinear", "dequantized", codes, block, axis=1, block_size=NVFP4_BLOCK)
    half = writer.add("Cast", "half", value, to=int(layer.dtype))
    return writer.add("Transpose", "transposed", half, perm=[1, 0])


def _stored_rows(writer: NodeWriter, role: str, value: ir.Value, start: int, end: int) -> ir.Value:
    """Rows of a packed initialiser, which are whole bytes."""
    tensor = value.const_value
    assert tensor is not None
    rows = tensor.shape.numpy()[0]
    raw = np.frombuffer(tensor.tobytes(), np.uint8).reshape(rows, -1)[start:end]
    if tensor.dtype == ir.DataType.FLOAT4E2M1:
        shape = ir.Shape((end - start, tensor.shape.numpy()[1]))
        return writer.constant(role, ir.PackedTensor(raw.reshape(-1), tensor.dtype, shape=shape))
    return writer.constant(role, ir.Tensor(tensor.numpy()[start:end], dtype=tensor.dtype))


def _extents(writer: NodeWriter, layer: Fp4Layer, reshape: ir.Node) -> ir.Value:
    """The shape that a layer's result has, from the one that its input is given."""
    shape = reshape.inputs[1]
    assert shape is not None
    known = constant_ints(shape)
    if known is not None:
        return writer.integers("extents", *known[:-1], layer.out_channels)
    bounds = [writer.integers("first", 0), writer.integers("last", -1)]
    front = writer.add("Slice", "front", shape, *bounds, dtype=ir.DataType.INT64)
    width = writer.integers("width", layer.out_channels)
    return writer.add("Concat", "extents", front, width, axis=0, dtype=ir.DataType.INT64)


def _flat_shape(layer: Fp4Layer) -> tuple[int | None, ...] | None:
    shape = layer.dequantized.shape
    if shape is None:
        return None
    return (*(extent if isinstance(extent, int) else None for extent in list(shape)[:-1]), layer.out_channels)


def _bias(layer: Fp4Layer) -> ir.Value | None:
    """Of a Gemm, which is left as it is."""
    return layer.compute.inputs[2] if len(layer.compute.inputs) > 2 else None
