"""Quantise/dequantise nodes of the canonical graph.

A quantised layer computes in FP16, or what else the rest is, what its Q/DQ nodes leave of its operands:

    x [N,C,H,W] -> (Pad C to 16s) -> Reshape [N,C,HW] -> TRT_FP4DynamicQuantize(., s) -> codes E2M1, scales E4M3
        DequantizeLinear(scales, s) -> DequantizeLinear(codes, that, axis=1, block_size=16) -> Cast -> Reshape [N,C,H,W]
    codes [O, KH*KW*C] E2M1, scales [O, KH*KW*C/16] E4M3, global scale []
        DequantizeLinear twice likewise -> Cast -> Reshape [O,KH,KW,C] -> Transpose -> Conv | ConvTranspose | MatMul
        (a 1x1 kernel has no taps to move past: another Reshape, [O,C,1,1], in place of the Transpose)

Why so: TensorRT's quantiser takes at most three axes and wants the blocked one last or second to last; its FP4
constants must be 2-D for a convolution to build; E4M3 may not be the scale of an FP4 DequantizeLinear, hence two. The
weights stay in OHWI order, so that a block never crosses a tap. Channels beyond C are zeros on both sides, so padding
does not change the result.

A layer in FP8 or INT8 has ONNX's own operators, with FP16 scales (the same numbers in FP32, and Casts, where the rest
is not FP16):

    x -> QuantizeLinear(s) -> DequantizeLinear(s)              one scale
    W E4M3 -> DequantizeLinear(axis)                           one scale a channel

A layer in W4A8 has both operands in ONNX's own operators as well, in blocks of 32:

    x -> (Pad C to 32s) -> p, a power of two a block (`_mx_scales`) -> QuantizeLinear(p) to E4M3 -> DequantizeLinear(p)
    codes [O, KH*KW*C] E2M1, p [O, KH*KW*C/32] -> DequantizeLinear -> Cast -> Reshape ... as above

The powers of two are FP32: DequantizeLinear takes scales of type E8M0 from opset 24 on, and these files have 23.

Tracing leaves two markers a layer, ActivationQuantize and WeightQuantize; `LowerMarkers` puts these nodes in their
place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import onnx_ir as ir

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import BlockConstants, Constants, EightBitConstants, LayerConstants
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP, TRT_DOMAIN, dynamic_quantize_function
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import E4M3_MAX, MXFP4_BLOCK, NVFP4_BLOCK, global_scale
from fp4deploy.formats.constants import MXFP8_BLOCK
from fp4deploy.rest import Rest

ONNX_TYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16, "fp32": ir.DataType.FLOAT}  # of the rest
MARKER_DOMAIN = "fp4deploy"
ACTIVATION_MARKER = "ActivationQuantize"
WEIGHT_MARKER = "WeightQuantize"


class LowerMarkers(ir.passes.InPlacePass):
    """Replace every marker that tracing left by its Q/DQ nodes; precondition: `layers` has each marked layer."""

    def __init__(self, layers: Mapping[str, Constants], rest: Rest) -> None:
        super().__init__()
        self.layers, self.dtype = layers, ONNX_TYPES[rest.name]

    def requires(self, model: ir.Model) -> None:
        unknown = marked_layers(model) - set(self.layers)
        if unknown:
            raise ir.passes.PreconditionError(f"no constants for {sorted(unknown)}")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        markers = _markers(model)
        for node in markers:
            name, is_input = _layer_of(node), node.op_type == ACTIVATION_MARKER
            prefix = f"{name}.input" if is_input else f"{name}.weight"
            writer = NodeWriter(model.graph, prefix, before=node, dtype=self.dtype)
            layer = self.layers[name]
            if isinstance(layer, EightBitConstants):
                value = _activation(writer, layer, node) if is_input else _weight(writer, layer)
            elif not is_input:
                value = _lower_weight(writer, layer)
            elif isinstance(layer, LayerConstants):
                value = _lower_activation(writer, layer, node)
            else:
                value = _mx_activation(writer, layer, node)
            node.outputs[0].replace_all_uses_with(value)
            model.graph.remove(node, safe=True)
        if markers:
            del model.graph.opset_imports[MARKER_DOMAIN]
        if any(node.op_type == QUANTIZE_OP for node in model.graph):
            model.graph.opset_imports[TRT_DOMAIN] = 1
            function = cast(ir.Function, ir.from_proto(dynamic_quantize_function()))
            model.functions[function.identifier()] = function
        return ir.passes.PassResult(model, modified=bool(markers))


def marked_layers(model: ir.Model) -> set[str]:
    """The quantised layers that tracing reached."""
    return {_layer_of(node) for node in _markers(model)}


def _markers(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == MARKER_DOMAIN]


def _layer_of(node: ir.Node) -> str:
    return node.attributes["layer"].as_string()


def _lower_activation(writer: NodeWriter, layer: LayerConstants, marker: ir.Node) -> ir.Value:
    """x -> Pad -> Reshape -> quantise -> dequantise -> Cast -> Reshape; layout operators only where they are needed."""
    (x,) = marker.inputs
    assert x is not None
    assert x.shape is not None
    axis = layer.channel_axis % len(x.shape)
    whole = value = _padded(writer, x, axis, layer.channels, _layer_of(marker))
    padded = tuple(cast(Any, whole.shape))
    flat, flat_axis = _at_most_three(padded, axis, _layer_of(marker))
    if flat != padded:
        value = _reshape(writer, value, "flat", flat)
    scale = writer.constant("global_scale", global_scale(layer.input_amax))
    blocks = _replace(flat, flat_axis, layer.channels // NVFP4_BLOCK)
    codes, scales = writer.add_node(
        QUANTIZE_OP,
        "quantize",
        [value, scale],
        [
            writer.value("codes", ir.DataType.FLOAT4E2M1, flat),
            writer.value("scales", ir.DataType.FLOAT8E4M3FN, blocks),
        ],
        {"axis": flat_axis, "block_size": NVFP4_BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)},
        domain=TRT_DOMAIN,
    )
    value = _dequantize(writer, codes, scales, scale, flat_axis)
    if flat == padded:
        return value
    if all(isinstance(size, int) for size in padded[1:]):
        return _reshape(writer, value, "image", padded)
    extents = writer.add("Shape", "image_shape", whole, dtype=ir.DataType.INT64, shape=(len(padded),))
    return writer.add("Reshape", "image", value, extents, shape=padded)


def _padded(writer: NodeWriter, x: ir.Value, axis: int, channels: int, layer: str) -> ir.Value:
    """Zeros behind the channels, up to whole blocks; only where some are missing."""
    shape = tuple(cast(Any, x.shape))
    if shape[axis] == channels:
        return x
    if not isinstance(shape[axis], int):
        raise InputError(
            f"{layer} contracts an axis of open size ({shape[axis]}), which has no fixed number of blocks. Export "
            f"without --dynamic-size (dynamic_size=False), or leave the layer in FP16: --set quant.exclude=[{layer}]."
        )
    pads = [0] * 2 * len(shape)
    pads[len(shape) + axis] = channels - shape[axis]
    return writer.add("Pad", "padded", x, writer.integers("pads", *pads), shape=_replace(shape, axis, channels))


def _mx_activation(writer: NodeWriter, layer: BlockConstants, marker: ir.Node) -> ir.Value:
    """x -> Pad -> QuantizeLinear to MXFP8 -> DequantizeLinear, scales computed from x."""
    (x,) = marker.inputs
    assert x is not None
    assert x.shape is not None
    axis, e4m3 = layer.channel_axis % len(x.shape), ir.DataType.FLOAT8E4M3FN
    x = _padded(writer, x, axis, layer.channels, _layer_of(marker))
    scales, blocks = _mx_scales(writer, x, axis), {"axis": axis, "block_size": MXFP8_BLOCK}
    codes = writer.add(
        "QuantizeLinear", "quantize", x, scales, dtype=e4m3, shape=x.shape, output_dtype=int(e4m3), **blocks
    )
    value = writer.add("DequantizeLinear", "dequantized", codes, scales, dtype=scales.dtype, shape=x.shape, **blocks)
    return _narrow(writer, value)


def _mx_scales(writer: NodeWriter, x: ir.Value, axis: int) -> ir.Value:
    """The smallest power of two p of each block with a <= 448 p, a the amax; FP32, C/32 in place of C.

    A logarithm finds p up to a factor of 2; comparisons with 448 p and 224 p, which are exact, decide.
    """
    wide, shape = ir.DataType.FLOAT, tuple(cast(Any, x.shape))
    tail = [size if isinstance(size, int) else -1 for size in shape[axis + 1 :]]
    if tail.count(-1) > 1:  # copied by position, which only sizes before the split are
        tail = [size if isinstance(size, int) else 0 for size in shape[axis + 1 :]]
    split = [*[0] * axis, shape[axis] // MXFP8_BLOCK, MXFP8_BLOCK, *tail]
    blocks = writer.add("Reshape", "blocked", x, writer.integers("blocked_shape", *split))
    magnitude = writer.add("Abs", "magnitude", blocks)
    amax = writer.add("ReduceMax", "amax", magnitude, writer.integers("within", axis + 1), keepdims=0)
    if writer.dtype != wide:
        amax = writer.add("Cast", "amax_wide", amax, dtype=wide, to=int(wide))
    add = partial(writer.add, dtype=wide)

    def number(role: str, value: float) -> ir.Value:
        return writer.constant(role, np.float32(value), prefix="mxfp8")

    two, largest = number("two", 2.0), number("largest", E4M3_MAX)
    amax = add("Max", "amax_bounded", amax, number("smallest", E4M3_MAX * 2.0**-126))
    octaves = add(
        "Div", "octaves", add("Log", "log", add("Div", "ratio", amax, largest)), number("log_two", math.log(2))
    )
    power = add("Pow", "power", two, add("Ceil", "exponent", octaves))
    above = writer.add("Greater", "above", amax, add("Mul", "limit", power, largest), dtype=ir.DataType.BOOL)
    power = add("Where", "raised", above, add("Mul", "double", power, two), power)
    limit = add("Mul", "half_limit", power, number("half_of_largest", E4M3_MAX / 2))
    below = writer.add("LessOrEqual", "below", amax, limit, dtype=ir.DataType.BOOL)
    sizes = _replace(shape, axis, shape[axis] // MXFP8_BLOCK)
    return add("Where", "scales", below, add("Div", "half", power, two), power, shape=sizes)


def _activation(writer: NodeWriter, layer: EightBitConstants, marker: ir.Node) -> ir.Value:
    """x -> QuantizeLinear -> DequantizeLinear."""
    (x,) = marker.inputs
    assert x is not None
    scale = writer.constant("scale", _scale(writer, layer.input_scale))
    zero = writer.constant("zero", np.zeros((), layer.codes.dtype))
    if writer.dtype == ir.DataType.BFLOAT16:
        x = writer.add("Cast", "wide", x, dtype=ir.DataType.FLOAT, shape=x.shape, to=int(ir.DataType.FLOAT))
    codes = writer.add("QuantizeLinear", "quantize", x, scale, zero, dtype=zero.dtype, shape=x.shape)
    return _narrow(
        writer, writer.add("DequantizeLinear", "dequantized", codes, scale, zero, dtype=scale.dtype, shape=x.shape)
    )


def _weight(writer: NodeWriter, layer: EightBitConstants) -> ir.Value:
    """codes -> DequantizeLinear, one scale an output channel."""
    codes, scales = writer.constant("codes", layer.codes), writer.constant("scales", _scale(writer, layer.scales))
    value = writer.add(
        "DequantizeLinear", "dequantized", codes, scales, dtype=scales.dtype, shape=layer.shape, axis=layer.axis
    )
    return _narrow(writer, value)


def _scale(writer: NodeWriter, scale: object) -> Any:
    """An FP16 scale; as FP32 where the rest is not FP16, in which BF16 would not hold it."""
    return scale if writer.dtype == ir.DataType.FLOAT16 else np.asarray(scale, np.float32)


def _narrow(writer: NodeWriter, value: ir.Value) -> ir.Value:
    """A decoded value in the type of the rest."""
    if value.dtype == writer.dtype:
        return value
    return writer.add("Cast", "half", value, shape=value.shape, to=int(cast(ir.DataType, writer.dtype)))


def _lower_weight(writer: NodeWriter, layer: BlockConstants) -> ir.Value:
    """codes, scales -> dequantise -> Cast -> Reshape OHWI -> Transpose."""
    rows, width = layer.codes.shape[0], 2 * layer.codes.shape[1]
    packed = ir.PackedTensor(layer.codes, ir.DataType.FLOAT4E2M1, shape=ir.Shape((rows, width)))
    codes = writer.constant("codes", packed)
    if not isinstance(layer, LayerConstants):
        powers = np.ldexp(np.float32(1), layer.scales.astype(np.int32) - 127)
        value = writer.add(
            "DequantizeLinear", "dequantized", codes, writer.constant("scales", powers), dtype=ir.DataType.FLOAT,
            shape=codes.shape, axis=1, block_size=MXFP4_BLOCK,
        )  # fmt: skip
        return _in_place(writer, layer, _narrow(writer, value))
    scales = writer.constant("scales", layer.scales)
    amax = np.repeat(layer.weight_amax, layer.shape[1]) if np.ndim(layer.weight_amax) else layer.weight_amax
    scale = writer.constant("global_scale", global_scale(cast(Any, amax), layer.e4m3_max))
    return _in_place(writer, layer, _dequantize(writer, codes, scales, scale, 1))


def _in_place(writer: NodeWriter, layer: BlockConstants, value: ir.Value) -> ir.Value:
    """A decoded weight [O, KH*KW*C] -> Reshape OHWI -> Transpose."""
    shape = tuple(layer.shape[axis] for axis in layer.order)
    if layer.shape != tuple(cast(Any, value.shape)):
        value = _reshape(writer, value, "ohwi", layer.shape)
    if layer.order == tuple(range(len(layer.order))):
        return value
    if layer.order[0] == 0 and set(layer.shape[1:-1]) == {1}:
        return _reshape(writer, value, "oihw", shape)  # no byte moves, and TensorRT-RTX does not compile this transpose
    return writer.add("Transpose", "transposed", value, shape=shape, perm=list(layer.order))


def _reshape(writer: NodeWriter, x: ir.Value, role: str, shape: tuple[object, ...]) -> ir.Value:
    sizes = [size if isinstance(size, int) else 0 if index == 0 else -1 for index, size in enumerate(shape)]
    return writer.add("Reshape", role, x, writer.integers(f"{role}_shape", *sizes), shape=shape)


def _dequantize(writer: NodeWriter, codes: ir.Value, scales: ir.Value, scale: ir.Value, axis: int) -> ir.Value:
    """Codes and block scales -> the type of the rest."""
    op, wide = "DequantizeLinear", ir.DataType.FLOAT
    rows = {"axis": 0} if scale.shape else {}  # a global scale each
    steps = writer.add(op, "scales_dequantized", scales, scale, dtype=wide, shape=scales.shape, **rows)
    blocks = {"axis": axis, "block_size": NVFP4_BLOCK}
    value = writer.add(op, "dequantized", codes, steps, dtype=wide, shape=codes.shape, **blocks)
    return _narrow(writer, value)


def _at_most_three(shape: tuple[object, ...], axis: int, name: str) -> tuple[tuple[object, ...], int]:
    """(shape, axis) as the quantiser takes it: 2-D or 3-D, the blocked axis last or second to last."""
    if len(shape) in (2, 3) and axis >= len(shape) - 2:
        return shape, axis
    if len(shape) < 2 or axis == 0:
        raise InputError(f"{name}: an input of shape {list(shape)} cannot be quantised along axis {axis}.")
    if axis == len(shape) - 1:
        return (shape[0], _product(shape[1:axis]), shape[axis]), 2
    if axis != 1:
        raise InputError(f"{name}: blocks run along axis 1 or the last axis, not axis {axis} of {list(shape)}.")
    return (shape[0], shape[1], _product(shape[2:])), 1


def _product(sizes: tuple[Any, ...]) -> int | None:
    """None where a size is not known."""
    return math.prod(sizes) if all(isinstance(size, int) for size in sizes) else None


def _replace(shape: tuple[object, ...], axis: int, size: int) -> tuple[Any, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])
