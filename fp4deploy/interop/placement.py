"""Q/DQ of other tools' files, moved to where an engine multiplies in eight bits.

A convolution or GEMM is INT8 or FP8 where a DequantizeLinear stands right before both of its operands. Tools for
quantisation-aware training put quantisers behind modules instead, and a network compiled of such a file has layers that
decode and multiply in FP16, or is refused. What is found and done, in this order:

1. A quantised bias, or number of a BatchNormalization, becomes the constant that it decodes to. The same numbers.
2. UINT8, or codes with a zero point, become INT8 without one, of a range as large on both sides: fewer steps. Codes
   that have no sign clip like a Relu, which is written where the values may be negative.
3. A quantised operand that passes a Relu, a pooling, a resizing or a change of layout first gets a pair right before
   the layer, and so does a Concat whose parts have other scales, the largest, and an Add, their sum. The same numbers
   where all commutes.
4. A pair between a convolution and what is fused into it (normalisation, activation, Add, output) goes: unrounded.
5. An Add that reads a residual unquantised, which the next layer reads quantised, reads that: rounded.

The range of a value is that of a quantiser that reads it, or of what it was made of by operators that do not enlarge
it, or that add. Sizes that the file computes are folded first. A layer whose operand has none, and that the file leaves
in high precision, stays as it is.

Source: NVIDIA TensorRT documentation, "Working with Quantized Types", Q/DQ placement recommendations; which of the
rules change a TensorRT-RTX engine was found by building pairs of graphs (`benchmarks/qdq_placement.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import RemoveUnusedNodesPass

from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.size import fold_sizes
from fp4deploy.export.onnx.trt_operators import standardized
from fp4deploy.export.onnx.writer import NodeWriter

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
LAYOUT = ("Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Cast", "Slice", "Split", "Gather")
COMMUTING = (*LAYOUT, "Relu", "MaxPool", "DepthToSpace", "SpaceToDepth")  # with rounding to a grid that holds 0
KEEPING = (*COMMUTING, "Resize", "AveragePool", "GlobalAveragePool", "Clip", "Dropout", "LeakyRelu", "Pad")
FUSED = ("BatchNormalization", "Add", "Sub", "Mul", "Relu", "LeakyRelu", "Sigmoid", "HardSigmoid", "HardSwish", "Tanh",
         "Clip", "Softplus", "Erf", "PRelu", "Gelu", "Swish")  # fmt: skip
EIGHT_BITS = {ir.DataType.INT8: 127.0, ir.DataType.FLOAT8E4M3FN: 448.0}
Scale = tuple[NDArray[Any], ir.DataType]  # scalar, and the type of the codes


@dataclass(frozen=True)
class Edit:
    """One change: the layer or node that it is for, what was done, and whether every number stays the same."""

    at: str
    done: str
    exact: bool


def with_placed_quantizers(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[Edit]]:
    """A file whose Q/DQ pairs stand where an engine uses them, and what was changed; `model` is left as it is.

    >>> from onnx import helper
    >>> model, edits = with_placed_quantizers(helper.make_model(helper.make_graph([], "without_quantizers", [], [])))
    >>> edits
    []
    """
    graph = ir.from_proto(standardized(model))
    fold_sizes(graph)
    edits: list[Edit] = []
    for rule in (_decode_biases, _make_symmetric, _quantize_operands, _free_epilogues, _share_residuals):
        edits += rule(graph.graph)
        RemoveUnusedNodesPass()(graph)
    return ir.to_proto(graph), edits


def _decode_biases(graph: ir.Graph) -> Iterator[Edit]:
    placed = [(node, 2) for node in _gemms(graph)]
    placed += [(node, place) for node in graph if node.op_type == "BatchNormalization" for place in range(1, 5)]
    for node, place in placed:
        decoder = _producer(node.inputs[place] if len(node.inputs) > place else None, DEQUANTIZE)
        values = _decoded(decoder) if decoder is not None else None
        if decoder is not None and values is not None:
            what = "bias" if place == 2 else ("scale", "mean", "variance")[place // 2]
            writer = NodeWriter(graph, _name(node), before=node, dtype=decoder.outputs[0].dtype)
            node.replace_input_with(place, writer.constant(what, values))
            yield Edit(_name(node), f"its {what} is a constant, and no longer quantised", True)


def _make_symmetric(graph: ir.Graph) -> Iterator[Edit]:
    """Pairs, and decoded constants, whose codes are unsigned or have a zero point."""
    for node in [node for node in graph if node.op_type == DEQUANTIZE]:
        codes, zero = node.inputs[0], _content(node.inputs[2]) if len(node.inputs) > 2 else None
        unsigned = codes is not None and codes.dtype == ir.DataType.UINT8
        scale = _content(node.inputs[1])
        if scale is None or not (unsigned or (zero is not None and np.any(zero.astype(np.float32)))):
            continue
        quantizer, values = _producer(codes, QUANTIZE), _decoded(node)
        offset = 0.0 if zero is None else float(zero.reshape(-1)[0])
        low, high = (bound - offset for bound in ((0, 255) if unsigned else (-128, 127)))
        if values is not None:
            amax = _amax(values, _axis(node) if scale.size > 1 else None)
            replaced = (np.maximum(amax, np.finfo(np.float32).tiny) / 127).astype(scale.dtype).reshape(scale.shape)
            wide = _broadcast(replaced.astype(np.float32), values.ndim, _axis(node))
            stored = np.clip(np.rint(values.astype(np.float32) / wide), -128, 127).astype(np.int8)
            _requantize(graph, node, stored, replaced)
            yield Edit(_name(node), "weights are INT8 without a zero point", False)
        elif quantizer is not None:
            largest = max(abs(low), abs(high)) * scale.astype(np.float32) / 127
            source = quantizer.inputs[0]
            if not low and source is not None and not _never_negative(source):  # codes without a sign clip, too
                writer = NodeWriter(graph, source.name or _name(node), before=quantizer, dtype=source.dtype)
                source = writer.add("Relu", "clipped", source, shape=source.shape)
            _pair(graph, node, source, (largest.astype(scale.dtype), ir.DataType.INT8))
            yield Edit(_name(quantizer), "INT8 without a zero point, of a range as large on both sides", False)


def _quantize_operands(graph: ir.Graph) -> Iterator[Edit]:
    """A pair right before every layer whose weights are in eight bits, where its operand has a range."""
    for node in _gemms(graph):
        operand = node.inputs[0]
        weight = _decoder_above(node.inputs[1])
        if operand is None or weight is None or _decoder_above(operand) is not None:
            continue
        if (scale := _scale_of(operand)) is None or scale[1] != _codes(weight):
            continue
        exact = _commutes(operand, scale)
        _pair(graph, node, operand, scale)
        above = operand.producer()
        what = f"quantised after {above.op_type}" if above is not None else "quantised"
        yield Edit(_name(node), f"its operand is {what}, right before it", exact)


def _free_epilogues(graph: ir.Graph) -> Iterator[Edit]:
    """No pair between a layer and what is fused into its kernel."""
    for node in [node for node in graph if node.op_type == DEQUANTIZE]:
        quantizer = _producer(node.inputs[0], QUANTIZE)
        source = quantizer.inputs[0] if quantizer is not None else None
        layer = source.producer() if source is not None else None
        if source is None or layer is None or layer.op_type not in GEMM_OPS:
            continue
        value = node.outputs[0]
        readers = [use.node for use in value.uses()]
        if len(source.uses()) != 1 or any(reader.op_type not in FUSED for reader in readers):
            continue
        what = readers[0].op_type if readers else "the output"
        _replace(graph, value, source)
        yield Edit(_name(layer), f"its result goes into {what} unrounded", False)


def _share_residuals(graph: ir.Graph) -> Iterator[Edit]:
    for node in [node for node in graph if node.op_type == "Add"]:
        sides = [_origin(value) for value in node.inputs]
        if sum(side is not None and side.op_type in GEMM_OPS for side in sides) != 1:
            continue
        for at, value in enumerate(node.inputs):
            layer = sides[at]
            own = layer is not None and layer.op_type in GEMM_OPS
            quantizer = _reader(value, QUANTIZE) if value is not None and not own else None
            decoder = _reader(quantizer.outputs[0], DEQUANTIZE) if quantizer is not None else None
            if decoder is not None and decoder is not node:
                node.replace_input_with(at, decoder.outputs[0])
                yield Edit(_name(node), "it adds the residual as the next layer reads it, quantised", False)


def _gemms(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.op_type in GEMM_OPS and len(node.inputs) > 1]


def _name(node: ir.Node) -> str:
    return node.name or node.outputs[0].name or node.op_type


def _producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator else None


def _reader(value: ir.Value | None, operator: str) -> ir.Node | None:
    readers = (use.node for use in value.uses() if use.idx == 0) if value is not None else iter(())
    return next((node for node in readers if node.op_type == operator), None)


def _decoder_above(value: ir.Value | None) -> ir.Node | None:
    """The DequantizeLinear of an operand, whose layout may be changed on the way."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in LAYOUT:
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node if node is not None and node.op_type == DEQUANTIZE else None


def _origin(value: ir.Value | None) -> ir.Node | None:
    """What gives a value, past normalisation."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in ("BatchNormalization", "Identity", "Cast"):
        node = node.inputs[0].producer() if node.inputs[0] is not None else None
    return node


def _codes(node: ir.Node) -> ir.DataType | None:
    return node.inputs[0].dtype if node.inputs[0] is not None else None


def _content(value: ir.Value | None) -> NDArray[Any] | None:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    return None if tensor is None else np.asarray(tensor.numpy())


def _axis(node: ir.Node) -> int:
    return node.attributes["axis"].as_int() if "axis" in node.attributes else 1


def _broadcast(scale: NDArray[Any], rank: int, axis: int) -> NDArray[Any]:
    return scale.reshape([-1 if at == axis % rank else 1 for at in range(rank)]) if scale.size > 1 else scale


def _amax(values: NDArray[Any], axis: int | None) -> NDArray[np.float32]:
    others = None if axis is None else tuple(at for at in range(values.ndim) if at != axis % values.ndim)
    return np.abs(values.astype(np.float32)).max(axis=others)


def _decoded(node: ir.Node) -> NDArray[Any] | None:
    """What a DequantizeLinear gives of constant codes; None of an activation."""
    if "block_size" in node.attributes or (scale := _content(node.inputs[1])) is None:
        return None
    zero = _content(node.inputs[2]) if len(node.inputs) > 2 else None
    codes = _content(node.inputs[0])
    if codes is None:
        return None
    rank, axis = codes.ndim, _axis(node)
    offset = np.float32(0) if zero is None else _broadcast(zero.astype(np.float32), rank, axis)
    wide = _broadcast(scale.astype(np.float32), rank, axis)
    return ((codes.astype(np.float32) - offset) * wide).astype(scale.dtype)


def _scale_of(value: ir.Value | None, known: dict[ir.Value, Scale | None] | None = None) -> Scale | None:
    """The scalar scale that covers a value: of a quantiser that reads it, or of what it was made of. known: so far."""
    known = {} if known is None else known
    if value is not None and value not in known:
        known[value] = _range_of(value, known)
    return None if value is None else known[value]


def _range_of(value: ir.Value, known: dict[ir.Value, Scale | None]) -> Scale | None:
    reader, node = _reader(value, QUANTIZE), value.producer()
    if node is not None and node.op_type == DEQUANTIZE:
        scale, kind = _content(node.inputs[1]), _codes(node)
    elif reader is not None:
        scale, kind = _content(reader.inputs[1]), reader.outputs[0].dtype
    elif node is not None and node.op_type in ("Concat", "Add"):
        parts = [_scale_of(part, known) for part in node.inputs]
        scales = [part for part in parts if part is not None]
        if len(scales) < len(parts) or len({kind for _, kind in scales}) != 1:
            return None
        largest = max(scales, key=lambda part: float(part[0]))
        return largest if node.op_type == "Concat" else (np.sum([step for step, _ in scales], axis=0), largest[1])
    elif node is not None and node.op_type in KEEPING:
        return _scale_of(node.inputs[0], known)
    else:
        return None
    return (scale.reshape(()), kind) if scale is not None and scale.size == 1 and kind in EIGHT_BITS else None


def _commutes(value: ir.Value | None, scale: Scale) -> bool:
    """Whether a value consists of rounded numbers of this scale already, so that rounding it again changes nothing."""
    node = value.producer() if value is not None else None
    if node is None:
        return False
    if node.op_type == DEQUANTIZE:
        own = _scale_of(value)
        return own is not None and bool(own[0] == scale[0])
    if node.op_type == "Concat":
        return all(_commutes(part, scale) for part in node.inputs)
    nearest = node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") == "nearest"
    return (nearest or node.op_type in COMMUTING) and _commutes(node.inputs[0], scale)


def _never_negative(value: ir.Value | None) -> bool:
    node = value.producer() if value is not None else None
    if node is None or node.op_type in ("Relu", "Sigmoid"):
        return node is not None
    parts = node.inputs if node.op_type == "Concat" else node.inputs[:1]
    return node.op_type in ("Concat", QUANTIZE, DEQUANTIZE, *KEEPING) and all(map(_never_negative, parts))


def _pair(graph: ir.Graph, node: ir.Node, source: ir.Value | None, scale: Scale) -> None:
    """Quantise `source` before `node`: as its first operand, or in place of a decoder."""
    assert source is not None
    step, kind = scale
    writer = NodeWriter(graph, source.name or _name(node), before=node, dtype=source.dtype)
    zero = np.zeros((), kind.numpy())
    constants = writer.constant("quantize.scale", step.reshape(())), writer.constant("quantize.zero", zero)
    codes = writer.add(QUANTIZE, "quantize", source, *constants, dtype=kind, shape=source.shape)
    value = writer.add(DEQUANTIZE, "dequantize", codes, *constants, dtype=source.dtype, shape=source.shape)
    if node.op_type == DEQUANTIZE:
        _replace(graph, node.outputs[0], value)
    else:
        node.replace_input_with(0, value)


def _requantize(graph: ir.Graph, node: ir.Node, codes: NDArray[np.int8], scale: NDArray[Any]) -> None:
    writer = NodeWriter(graph, _name(node), before=node, dtype=node.outputs[0].dtype)
    inputs = writer.constant("codes", codes), writer.constant("scales", scale)
    axis = {"axis": _axis(node)} if scale.size > 1 else {}
    old = node.outputs[0]
    value = writer.add(DEQUANTIZE, "decoded", *inputs, dtype=old.dtype, shape=old.shape, **axis)
    _replace(graph, old, value)


def _replace(graph: ir.Graph, old: ir.Value, new: ir.Value) -> None:
    """Let everything read `new`; an output of the graph keeps its name."""
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    if new.is_graph_output():
        old.name, new.name = f"{name}.quantized", name
