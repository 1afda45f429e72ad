"""The decomposed graph: a canonical file rewritten in standard operators, for plain ONNX Runtime on any CPU.

ONNX Runtime has no FP4 kernels, so the decomposed graph computes the same numbers in FP32:

* weights: E2M1 codes become INT8 integers 2q in blocks of 16, times half the block's step,
  ((d8 * A) * fp32(1/2688)) / 2. They are written as Cast, Mul, Reshape rather than DequantizeLinear: ONNX Runtime folds
  these into constants when it loads the file and then packs the weights, whereas it keeps DequantizeLinear and would
  decode every weight again for each image.
* activations: see `decomposed_quantize`.
* GroupNormalization is decomposed with its sums in two stages, along each row of the feature map and then over rows,
  and InstanceNormalization as the case of one channel a group.
  ONNX Runtime's own expansion, and its InstanceNormalization, add up to a million numbers in one go and are off by
  2e-4; this is off by 3e-6. It matters: each error moves some activations over a rounding boundary of E2M1, and the
  graph then differs from torch by whole E2M1 steps.
* a Pad before a pooling names its axes. ONNX Runtime makes a Pad without them part of the pooling, also where that
  gives other numbers (zeros around a maximum) or more padding than a window takes, which it then refuses.
* everything FP16 becomes FP32, and the casts to FP16 vanish. One does not: where the canonical graph casts its FP16
  input to FP32, as the multi-term FP4 encoding does (`models.input_encoding`), the input is rounded to FP16 first.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes.common import NameFixPass, RemoveUnusedFunctionsPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.canonical import DECOMPOSED, FORM_KEY
from fp4deploy.export.onnx.decomposed_quantize import (
    DecomposeFp8,
    DecomposeQuantizers,
    block_steps,
    replace_node,
    unsupported,
)
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP
from fp4deploy.export.onnx.trt_operators import standardized
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import global_amax

_GROUP_NORMS = ("GroupNormalization", "InstanceNormalization")
_POOLS = ("MaxPool", "AveragePool")
HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_TWICE_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)


def to_portable(model: onnx.ModelProto) -> onnx.ModelProto:
    """Rewrite a canonical Q/DQ model, or one of another tool in TensorRT's operators, for plain ONNX Runtime.

    Returns:
        A new model: float32 in and out, same names, standard operators only, metadata kept.

    Raises:
        InputError: FP4 operators in a form that cannot be decomposed.
    """
    portable = ir.from_proto(standardized(model))
    passes = (
        DecodeWeights(),
        DecomposeQuantizers(),
        WidenToFloat(),
        DecomposeFp8(),
        DecomposeGroupNorms(),
        KeepPads(),
        RemoveUnusedNodesPass(),
        RemoveUnusedFunctionsPass(),
        RemoveUnusedOpsetsPass(),
        NameFixPass(),
    )
    for each in passes:
        each(portable)
    portable.metadata_props[FORM_KEY] = DECOMPOSED
    proto = ir.to_proto(portable)
    _refuse_leftovers(proto)
    return proto


class DecodeWeights(ir.passes.InPlacePass):
    """DequantizeLinear of FP4 constants -> INT8 constants, cast, times FP32 half steps."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _decodes_constant(node)]
        for node in nodes:
            _decode_weight(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))


class DecomposeGroupNorms(ir.passes.InPlacePass):
    """Group- (opset 21+) and InstanceNormalization -> mean, variance, scale and bias in standard operators."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type in _GROUP_NORMS and _known_shape(node)]
        for node in nodes:
            _decompose_group_norm(model.graph, node)
        return ir.passes.PassResult(model, modified=bool(nodes))


class KeepPads(ir.passes.InPlacePass):
    """Pad(x, pads, value) that a pooling reads -> Pad(x, pads, value, all axes)."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if node.op_type == "Pad" and _before_pooling(node)]
        for node in nodes:
            x = node.inputs[0]
            assert x is not None
            assert x.shape is not None
            axes = NodeWriter(model.graph, node.name or str(x.name), before=node).integers("axes", *range(len(x.shape)))
            node.resize_inputs(4)
            node.replace_input_with(3, axes)
        return ir.passes.PassResult(model, modified=bool(nodes))


class WidenToFloat(ir.passes.InPlacePass):
    """FLOAT16 and BFLOAT16 become FLOAT in inputs, outputs, constants and attributes; casts between them vanish."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        exact = [node for node in graph if node.op_type == "Cast" and _reads_half_input(graph, node)]
        for value in (*graph.inputs, *graph.initializers.values()):
            _widen(value)
        for node in list(graph):
            for attribute in list(node.attributes.values()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in HALF:
                    tensor = ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
                    node.attributes[attribute.name] = ir.AttrTensor(attribute.name, tensor)
            for value in node.outputs:
                _widen(value)
            if node.op_type == "Cast" and node not in exact:
                _widen_cast(graph, node)
        for node in exact:
            _round_input(graph, node)
        return ir.passes.PassResult(model, modified=True)


def _before_pooling(node: ir.Node) -> bool:
    readers = [use.node for use in node.outputs[0].uses()]
    known = node.inputs[0] is not None and node.inputs[0].shape is not None
    return known and len(node.inputs) < 4 and any(reader.op_type in _POOLS for reader in readers)


def _decodes_constant(node: ir.Node) -> bool:
    codes = node.inputs[0] if node.inputs else None
    if node.op_type != "DequantizeLinear" or codes is None or codes.const_value is None:
        return False
    return codes.dtype == ir.DataType.FLOAT4E2M1


def _decode_weight(graph: ir.Graph, node: ir.Node) -> None:
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None
    assert codes.const_value is not None
    if len(node.inputs) > 2:
        raise unsupported(node, "FP4 has no zero point")
    shape = tuple(codes.const_value.shape.numpy())
    axis = node.attributes["axis"].as_int() % len(shape) if "axis" in node.attributes else len(shape) - 1
    half_steps = _weight_steps(node, scale) * np.float32(0.5)
    blocks = half_steps.shape[axis] if half_steps.ndim == len(shape) else 0
    if not blocks or shape[axis] % blocks:
        raise unsupported(node, "its scale must have one element a block")
    split = (*shape[:axis], blocks, shape[axis] // blocks, *shape[axis + 1 :])
    writer = NodeWriter(graph, node.name or str(codes.name), before=node, dtype=ir.DataType.FLOAT)
    integers = writer.constant("int8", _TWICE_E2M1[_nibbles(codes.const_value)].reshape(split))
    wide = writer.add("Cast", "wide", integers, to=int(ir.DataType.FLOAT))
    values = writer.add("Mul", "values", wide, writer.constant("half_steps", np.expand_dims(half_steps, axis + 1)))
    replace_node(writer, node, writer.add("Reshape", "weight", values, writer.integers("shape", *shape)))


def _nibbles(tensor: ir.TensorProtocol) -> NDArray[np.uint8]:
    """Codes 0..15 in a row, one a byte."""
    packed = np.frombuffer(tensor.tobytes(), np.uint8)
    return np.stack([packed & 0xF, packed >> 4], axis=-1).reshape(-1)[: tensor.size]


def _weight_steps(node: ir.Node, scale: ir.Value | None) -> NDArray[np.float32]:
    """What one unit of E2M1 stands for in each block of a constant weight, in the order of the numerics contract."""
    if scale is not None and scale.const_value is not None:
        return cast("NDArray[np.float32]", scale.const_value.numpy().astype(np.float32))
    producer = scale.producer() if scale is not None else None
    if producer is None or producer.op_type != "DequantizeLinear":
        raise unsupported(node, "its scale is neither a constant nor the DequantizeLinear of one")
    block, whole = (value.const_value if value is not None else None for value in producer.inputs[:2])
    if block is None or whole is None or (whole.size != 1 and [*whole.shape] != [block.shape[0]]):
        raise unsupported(node, "its scale needs constant block scales under one constant global scale, or one a row")
    scales = whole.numpy().reshape(-1, *[1] * (len(block.shape) - 1))
    return block_steps(block.numpy().astype(np.float32), global_amax(cast(Any, scales)))


def _known_shape(node: ir.Node) -> bool:
    """The channels are known; height and width may be open."""
    x = node.inputs[0]
    return x is not None and x.shape is not None and len(x.shape) > 2 and isinstance(x.shape[1], int)


def _decompose_group_norm(graph: ir.Graph, node: ir.Node) -> None:
    x, weight, bias = node.inputs
    assert x is not None
    assert x.shape is not None
    assert weight is not None
    assert bias is not None
    channels, *spatial = (size if isinstance(size, int) else None for size in tuple(x.shape)[1:])
    assert channels is not None
    groups = node.attributes["num_groups"].as_int() if "num_groups" in node.attributes else channels
    epsilon = node.attributes["epsilon"].as_float() if "epsilon" in node.attributes else 1e-5
    writer = NodeWriter(graph, node.name or str(node.outputs[0].name), before=node, dtype=ir.DataType.FLOAT)
    column = writer.integers("column", -1, *[1] * len(spatial))
    sizes = [size for size in spatial if size is not None]
    columns = sizes[-1] if len(sizes) == len(spatial) else None
    extents: ir.Value | None = None
    if columns is None:
        extents = writer.add("Shape", "image_shape", x, dtype=ir.DataType.INT64)
        split = _open_split(writer, extents, groups)
    else:
        split = writer.integers("groups_shape", 0, groups, channels // groups * math.prod(sizes[:-1]), columns)
    centred, deviation = _moments(writer, writer.add("Reshape", "groups", x, split), columns, epsilon)
    weights = writer.integers("weight_shape", groups, channels // groups, 1)
    slopes = writer.add("Div", "slopes", writer.add("Reshape", "group_weight", weight, weights), deviation)
    slope = writer.add("Reshape", "slope", slopes, writer.integers("slope_shape", 0, channels, *[1] * len(spatial)))
    shape = extents if extents is not None else writer.integers("image_shape", 0, channels, *sizes)
    restored = writer.add("Reshape", "image", centred, shape)
    scaled = writer.add("Mul", "scaled", restored, slope)
    shift = writer.add("Reshape", "bias_column", bias, column)
    replace_node(writer, node, writer.add("Add", "normalized", scaled, shift))


def _open_split(writer: NodeWriter, shape: ir.Value, groups: int) -> ir.Value:
    """[0, groups, -1, W] with the W of an image whose size is open."""
    wide = ir.DataType.INT64
    last = writer.add("Gather", "width", shape, writer.integers("last_index", -1), dtype=wide, axis=0)
    head = writer.integers("groups_head", 0, groups, -1)
    return writer.add("Concat", "groups_shape", head, last, dtype=wide, axis=0)


def _moments(writer: NodeWriter, x: ir.Value, columns: int | None, epsilon: float) -> tuple[ir.Value, ir.Value]:
    """(x - mean, standard deviation) of x [N, G, rows, columns] a group; sums in two stages."""
    last, rows = writer.integers("last_axis", 3), writer.integers("rows_axis", 2)
    row_means = writer.add("ReduceMean", "row_means", x, last, keepdims=1)
    centred = writer.add("Sub", "centred", x, writer.add("ReduceMean", "mean", row_means, rows, keepdims=1))
    if columns is None:
        square = writer.add("Mul", "square", centred, centred)
        row_squares = writer.add("ReduceMean", "row_squares", square, last, keepdims=1)
        variance = writer.add("ReduceMean", "variance", row_squares, rows, keepdims=1)
    else:
        row_squares = writer.add("ReduceSumSquare", "row_squares", centred, last, keepdims=1)
        squares = writer.add("ReduceMean", "squares", row_squares, rows, keepdims=1)
        variance = writer.add("Div", "variance", squares, writer.constant("columns", np.float32(columns)))
    shifted = writer.add("Add", "variance_epsilon", variance, writer.constant("epsilon", np.float32(epsilon)))
    return centred, writer.add("Sqrt", "deviation", shifted)


def _widen(value: ir.Value) -> None:
    if value.dtype not in HALF:
        return
    value.dtype = ir.DataType.FLOAT
    if value.const_value is not None:
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)


def _widen_cast(graph: ir.Graph, node: ir.Node) -> None:
    """Cast to FLOAT instead of a half, and drop a cast of what is FLOAT already."""
    source = node.inputs[0]
    assert source is not None
    if ir.DataType(node.attributes["to"].as_int()) in HALF:
        node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
    same = source.dtype == node.attributes["to"].as_int()
    if same and node.outputs[0] not in graph.outputs:
        node.outputs[0].replace_all_uses_with(source)
        graph.remove(node, safe=True)


def _reads_half_input(graph: ir.Graph, node: ir.Node) -> bool:
    source = node.inputs[0]
    if source is None or source.dtype != ir.DataType.FLOAT16 or source not in graph.inputs:
        return False
    return node.attributes["to"].as_int() == ir.DataType.FLOAT


def _round_input(graph: ir.Graph, node: ir.Node) -> None:
    """A cast to FP16 before the cast of what was an FP16 input."""
    name = f"{node.name}.rounded"
    half = ir.val(name, ir.DataType.FLOAT16, node.outputs[0].shape)
    rounded = ir.node("Cast", [node.inputs[0]], {"to": int(ir.DataType.FLOAT16)}, outputs=[half], name=name)
    graph.insert_before(node, rounded)
    node.replace_input_with(0, half)


def _refuse_leftovers(model: onnx.ModelProto) -> None:
    fp4 = onnx.TensorProto.FLOAT4E2M1
    left = [tensor.name for tensor in model.graph.initializer if tensor.data_type == fp4]
    foreign = [node.name or node.op_type for node in model.graph.node if node.domain not in ("", "ai.onnx")]
    if left or foreign:
        raise InputError(
            f"{', '.join([*left, *foreign][:3])} cannot be decomposed: --portable covers FP4 DequantizeLinear of "
            f"constants and {QUANTIZE_OP} followed by DequantizeLinear. Export the file with: fp4deploy export"
        )
