"""TRT_FP4DynamicQuantize and the DequantizeLinear that follows it, in standard FP32 operators.

With A = fp32(s * 2688) from the file's global scale s and, as constants, m = S * fp32(1/6), D = 1 / S:

    a = max |x| over a block      d = float(E4M3(min(a * m, 448)))      e = min(1 / (d * D), FLT_MAX); 0 where d = 0
    u = clip(x * e, -6, 6)        q = E2M1(u)                           x' = q * ((d * A) * fp32(1/2688))

Rounding to E2M1 without FP4, bit tricks or branches. An E2M1 number has one mantissa bit and steps of at least 1/2, so
the fp32 sum u + M rounds u to nearest even in the right step when M lies in the binade whose ulp is that step:

    M = max(floor |u|, 1) * K,  K = 1.25 * 2^22,            q = (u + M) - M

    |u|      floor   M                           ulp of M = step
    0 .. 2   0, 1    1.25 * 2^22                 1/2
    2 .. 4   2, 3    1.25, 1.875 * 2^23          1
    4 .. 6   4, 5, 6 1.25, 1.5625, 1.875 * 2^24  2

Each M is at least an eighth of its binade away from both ends, so no sum leaves the binade, and it is an even multiple
of its step, so ties go to even (checked for every fp32 number from -6 to 6). Eight passes over memory (Mul, Clip, Abs,
Floor, Mul, Max, Add, Sub); the textbook form with Where and Round needs ten and takes 1.3 to 1.6 times as long.

The block axis is split by a Reshape, which copies nothing, so activations stay in NCHW. Codes and scales are those of
`formats.quantize_nvfp4` with amax A, except that there is no negative zero. A block with an Inf becomes NaN as a whole;
of a block with a NaN, ONNX Runtime's ReduceMax may overlook the NaN, and then only that element becomes NaN.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, global_amax, nvfp4_range
from fp4deploy.formats.constants import MXFP8_BLOCK

FLT_MAX = np.finfo(np.float32).max
RANGE = np.float32(nvfp4_range())
INVERSE_RANGE = np.float32(1 / nvfp4_range())
_SHARED = {
    "inverse_range": INVERSE_RANGE,
    "largest": np.float32(E4M3_MAX),
    "largest_float": FLT_MAX,
    "zero": np.float32(0),
    "one": np.float32(1),
    "six": np.float32(E2M1_MAX),
    "minus_six": np.float32(-E2M1_MAX),
    "rounder": np.float32(1.25 * 2**22),
}


class DecomposeQuantizers(ir.passes.InPlacePass):
    """Replace each quantiser and its dequantisers; the dequantised value keeps its name."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        quantizers = [node for node in model.graph if node.op_type == QUANTIZE_OP]
        for node in quantizers:
            scales_nodes, values_nodes = _dequantizers(node)
            first, *others = values_nodes
            for reader in others:
                reader.outputs[0].replace_all_uses_with(first.outputs[0], replace_graph_outputs=True)
            prefix = (node.name or node.outputs[0].name or "quantize").removesuffix(".quantize")
            writer = NodeWriter(model.graph, prefix, before=first, dtype=ir.DataType.FLOAT)
            replace_node(writer, first, _decompose(writer, node))
            model.graph.remove([*others, *scales_nodes, node], safe=True)
        return ir.passes.PassResult(model, modified=bool(quantizers))


class DecomposeFp8(ir.passes.InPlacePass):
    """QuantizeLinear to E4M3 -> Div, Clip, Cast; DequantizeLinear of E4M3 values -> Cast, Mul.

    ONNX Runtime 1.31 has kernels for both, and before QuantizeLinear it drops a Relu, which is right for integers whose
    smallest value is the zero point, and wrong for E4M3. Block scales of FP4, E4M3 too, are gone by now; those of MXFP8
    are values that the graph computes.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        nodes = [node for node in model.graph if _is_fp8(node)]
        for node in nodes:
            writer = NodeWriter(
                model.graph, node.name or str(node.outputs[0].name), before=node, dtype=ir.DataType.FLOAT
            )
            lower = _fp8_codes if node.op_type == "QuantizeLinear" else _fp8_values
            replace_node(writer, node, lower(writer, node))
        return ir.passes.PassResult(model, modified=bool(nodes))


def _is_fp8(node: ir.Node) -> bool:
    codes = {"QuantizeLinear": node.outputs[:1], "DequantizeLinear": node.inputs[:1]}.get(node.op_type, ())
    return any(value is not None and value.dtype == ir.DataType.FLOAT8E4M3FN for value in codes)


def _fp8_codes(writer: NodeWriter, node: ir.Node) -> ir.Value:
    x, scale = node.inputs[0], node.inputs[1]
    assert x is not None
    assert scale is not None
    scaled = _blockwise("Div", "scaled", writer, node, x, scale)
    low, high = (writer.constant(role, np.float32(sign * E4M3_MAX), "fp8") for role, sign in (("low", -1), ("high", 1)))
    clipped = writer.add("Clip", "clipped", scaled, low, high, shape=x.shape)
    e4m3 = ir.DataType.FLOAT8E4M3FN
    return writer.add("Cast", "codes", clipped, dtype=e4m3, shape=x.shape, to=int(e4m3))


def _fp8_values(writer: NodeWriter, node: ir.Node) -> ir.Value:
    codes, scale = node.inputs[0], node.inputs[1]
    assert codes is not None
    assert scale is not None
    wide = writer.add("Cast", "wide", codes, shape=codes.shape, to=int(ir.DataType.FLOAT))
    if scale.const_value is not None and scale.const_value.size > 1:
        if codes.shape is None:
            raise unsupported(node, "the shape of what a channel's scale belongs to is not known")
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
        sizes = [1] * len(codes.shape)
        sizes[axis] = scale.const_value.size
        scale = writer.constant("scales", scale.const_value.numpy().reshape(sizes))
    return _blockwise("Mul", "values", writer, node, wide, scale)


def _blockwise(op: str, role: str, writer: NodeWriter, node: ir.Node, x: ir.Value, scale: ir.Value) -> ir.Value:
    """x times, or by, its scale: one number or one a channel, or one a block, which is split off and joined again."""
    if "block_size" not in node.attributes:
        return writer.add(op, role, x, scale, shape=x.shape)
    if x.shape is None:
        raise unsupported(node, "the shape of its input is unknown")
    axis = _attribute(node, "axis", 1) % len(x.shape)
    split, whole = _split_shapes(node, tuple(x.shape), axis, _attribute(node, "block_size", 0))
    blocks = writer.add("Reshape", "blocks", x, writer.constant("blocked_shape", split))
    each = writer.add("Unsqueeze", "block_scales", scale, writer.integers("within", axis + 1))
    result = writer.add(op, f"{role}_blocks", blocks, each)
    return writer.add("Reshape", role, result, writer.constant("whole_shape", whole), shape=x.shape)


def block_steps(scales: NDArray[np.float32], amax: np.float32) -> NDArray[np.float32]:
    """What one unit of E2M1 stands for in blocks of the given scales: (d8 * A) * fp32(1/2688)."""
    steps: NDArray[np.float32] = (scales * amax) * INVERSE_RANGE
    return steps


def unsupported(node: ir.Node, reason: str) -> InputError:
    """The error for an operator that cannot be decomposed."""
    return InputError(f"{node.name or node.op_type} ({node.op_type}) cannot be decomposed: {reason}.")


def replace_node(writer: NodeWriter, node: ir.Node, result: ir.Value) -> None:
    """Remove `node`; what computes `result` takes its name, and `result` that of its value."""
    writer.replace(node.outputs[0], result)
    producer = result.producer()
    assert producer is not None
    producer.name = node.name
    writer.graph.remove(node, safe=True)


def _dequantizers(node: ir.Node) -> tuple[list[ir.Node], list[ir.Node]]:
    """(readers of the block scales, readers of the codes) of a quantiser; all must dequantise."""
    codes, scales = node.outputs
    scales_nodes, values_nodes = list(scales.consumers()), list(codes.consumers())
    steps = {reader.outputs[0] for reader in scales_nodes}
    plain = all(reader.op_type == "DequantizeLinear" for reader in (*scales_nodes, *values_nodes))
    if not plain or not values_nodes or not all(reader.inputs[1] in steps for reader in values_nodes):
        raise unsupported(node, "its codes and scales must go straight into DequantizeLinear")
    return scales_nodes, values_nodes


def _decompose(writer: NodeWriter, node: ir.Node) -> ir.Value:
    """Quantise and dequantise by the formulas of this module."""
    x, scale = node.inputs
    whole_scale = ir.convenience.get_const_tensor(scale) if scale is not None else None
    if whole_scale is None or whole_scale.size != 1:
        raise unsupported(node, "its global scale must be a constant scalar")
    if x is None or x.shape is None:
        raise unsupported(node, "the shape of its input is unknown")
    axis = _attribute(node, "axis", -1) % len(x.shape)
    blocked, whole = _split_shapes(node, tuple(x.shape), axis, _attribute(node, "block_size", NVFP4_BLOCK))
    amax = global_amax(np.float32(whole_scale.numpy().item()))
    blocks = writer.add("Reshape", "blocks", x, writer.constant("blocked_shape", blocked))
    scales, element = _compute_scales(writer, blocks, axis + 1, amax)
    values = _round_to_e2m1(writer, writer.add("Mul", "scaled", blocks, element))
    ranged = writer.add("Mul", "step_range", scales, writer.constant("amax", amax))
    step = writer.add("Mul", "step", ranged, _shared(writer, "inverse_range"))
    products = writer.add("Mul", "dequantized_blocks", values, step)
    return writer.add("Reshape", "dequantized", products, writer.constant("whole_shape", whole))


def _compute_scales(writer: NodeWriter, blocks: ir.Value, axis: int, amax: np.float32) -> tuple[ir.Value, ir.Value]:
    """(d, e) in FP32, one of each a block."""
    e4m3 = ir.DataType.FLOAT8E4M3FN
    sixth, decode = _encoding(amax)
    magnitude = writer.add("Abs", "magnitude", blocks)
    block_amax = writer.add("ReduceMax", "block_amax", magnitude, writer.constant("axis", np.array([axis])), keepdims=1)
    scale = writer.add("Mul", "scale_unbounded", block_amax, writer.constant("encode_sixth", sixth))
    scale = writer.add("Min", "scale_bounded", scale, _shared(writer, "largest"))
    damage = writer.add("Sub", "damage", block_amax, block_amax)  # 0, and NaN where a block holds NaN or Inf
    scale = writer.add("Add", "scale_exact", scale, damage)
    scale = writer.add("Cast", "scale_e4m3", scale, dtype=e4m3, to=int(e4m3))
    scale = writer.add("Cast", "scale", scale, to=int(ir.DataType.FLOAT))
    unit = writer.add("Mul", "unit", scale, writer.constant("decode", decode))
    inverse = writer.add("Div", "inverse", _shared(writer, "one"), unit)
    inverse = writer.add("Min", "inverse_bounded", inverse, _shared(writer, "largest_float"))
    empty = writer.add("Equal", "empty", scale, _shared(writer, "zero"), dtype=ir.DataType.BOOL)
    return scale, writer.add("Where", "element_scale", empty, _shared(writer, "zero"), inverse)


def _round_to_e2m1(writer: NodeWriter, scaled: ir.Value) -> ir.Value:
    """E2M1 values of u by adding and subtracting a number whose ulp is the step."""
    u = writer.add("Clip", "clipped", scaled, _shared(writer, "minus_six"), _shared(writer, "six"))
    floor = writer.add("Floor", "floor", writer.add("Abs", "size", u))
    product = writer.add("Mul", "rounder_unbounded", floor, _shared(writer, "rounder"))
    rounder = writer.add("Max", "rounder", product, _shared(writer, "rounder"))
    return writer.add("Sub", "values", writer.add("Add", "rounded", u, rounder), rounder)


def _shared(writer: NodeWriter, role: str) -> ir.Value:
    """A constant that every quantiser reads."""
    return writer.constant(role, _SHARED[role], prefix="nvfp4")


def _encoding(amax: np.float32) -> tuple[np.float32, np.float32]:
    """(S * fp32(1/6), 1 / S), each step in FP32 in the order of the numerics contract; amax 0 gives zeros only."""
    if amax == 0:
        return np.float32(0), np.float32(1)
    with np.errstate(over="ignore"):
        scale = min(RANGE / amax, FLT_MAX) or np.float32(1)
        return scale * np.float32(1 / 6), np.float32(1) / scale


def _attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def _split_shapes(
    node: ir.Node, shape: tuple[object, ...], axis: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reshape targets [..., C/16, 16, ...] and back: sizes before the axis are copied (0), after it known or one -1."""
    extent, inner = shape[axis], shape[axis + 1 :]
    if block not in (NVFP4_BLOCK, MXFP8_BLOCK):
        raise unsupported(node, f"its blocks are of {block}; valid are {NVFP4_BLOCK} and {MXFP8_BLOCK}")
    if not isinstance(extent, int) or extent % block:
        raise unsupported(
            node, f"it quantises {extent} elements in blocks of {block}; pad them to a multiple of {block}"
        )
    if sum(not isinstance(size, int) for size in inner) > 1:
        raise unsupported(node, f"more than one size after its blocked axis is unknown: {list(shape)}")
    tail = [size if isinstance(size, int) else -1 for size in inner]
    head = [0] * axis
    return np.array([*head, extent // block, block, *tail]), np.array([*head, extent, *tail])
