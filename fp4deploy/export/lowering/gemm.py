"""Lower FP4 convolutions to FP4 GEMMs, the only operation that TensorRT runs on FP4 tensor cores.

A convolution contracts over taps and input channels, K = KH*KW*C, so it is a GEMM once the pixels that one output reads
are one column:

    1x1               y[N,P,O] = x[N,P,C] . W[O,C]^T                      P = H*W, nothing is copied
    ConvTranspose 2x2 y[N,P,4*O] = x[N,P,C] . W[4*O,C]^T, then DepthToSpace: the four taps never overlap at stride 2
    KxK (im2col)      y[N,P,O] = columns(x)[N,P,KH*KW*C] . W[O,KH*KW*C]^T

Weights are stored [O, KH*KW*C] in OHWI order with blocks along C, so **no code or scale changes**: the im2col form
takes them as they are, and [O, 4*C] is the same bytes as [4*O, C] (DepthToSpace mode CRD reads the taps in that
order). Activations are quantised in blocks of 16 channels of one tap; quantising after im2col gives the same codes as
before it, because the blocks are the same ones and padding is zero. The results differ from the convolution's by
accumulation order alone.

Trade-off: im2col writes KH*KW copies of the activation before the quantiser reads them, about 46 bytes an element for
3x3, so `auto` leaves 3x3 as a convolution with FP4 weights and `gemm` is for layers with many channels and few pixels.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import PassResult

from fp4deploy.export.lowering.pattern import OPEN, SCALE_TYPE_E4M3, Fp4Layer, NamedLayers, attribute, find_fp4_layers
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import NVFP4_BLOCK


@dataclass(frozen=True)
class Geometry:
    """Strides, dilations, paddings (top, left, bottom, right) and output size of a convolution, in pixels."""

    strides: tuple[int, int]
    dilations: tuple[int, int]
    pads: tuple[int, int, int, int]
    size: tuple[int, int]


def geometry(layer: Fp4Layer) -> Geometry | None:
    """Geometry of a convolution that is one GEMM: one group, explicit padding; else None."""
    node = layer.compute
    plain = attribute(node, "group", 1) == 1 and attribute(node, "auto_pad", "NOTSET") == "NOTSET"
    if layer.kind != "Conv2d" or layer.shape is None or not plain:
        return None
    strides, dilations = integers_of(node, "strides", [1, 1]), integers_of(node, "dilations", [1, 1])
    top, left, bottom, right = integers_of(node, "pads", [0, 0, 0, 0])
    if layer.is_open:  # one tap at every pixel, or nothing: only then no size is needed
        simple = (layer.kernel, strides, dilations) == ((1, 1), [1, 1], [1, 1]) and not any((top, left, bottom, right))
        return Geometry((1, 1), (1, 1), (0, 0, 0, 0), (OPEN, OPEN)) if simple else None
    padded = (layer.shape[1] + top + bottom, layer.shape[2] + left + right)
    reach = [(taps - 1) * step + 1 for taps, step in zip(layer.kernel, dilations, strict=True)]
    rows, columns = ((padded[i] - reach[i]) // strides[i] + 1 for i in range(2))
    return Geometry((strides[0], strides[1]), (dilations[0], dilations[1]), (top, left, bottom, right), (rows, columns))


def integers_of(node: ir.Node, name: str, default: list[int]) -> list[int]:
    """An attribute that is a list of integers."""
    found = attribute(node, name, default)
    assert isinstance(found, list)
    return found


def is_pointwise(layer: Fp4Layer) -> bool:
    """1x1 of any stride: one tap, so at most a strided slice comes before the GEMM."""
    return layer.kernel == (1, 1) and geometry(layer) is not None


def is_upsampling(layer: Fp4Layer) -> bool:
    """ConvTranspose 2x2 stride 2: every output pixel reads one tap."""
    if layer.kind != "ConvTranspose2d" or layer.kernel != (2, 2) or layer.shape is None:
        return False
    node = layer.compute
    plain = attribute(node, "group", 1) == 1 and attribute(node, "dilations", [1, 1]) == [1, 1]
    unpadded = attribute(node, "pads", [0] * 4) == [0] * 4 and attribute(node, "output_padding", [0, 0]) == [0, 0]
    return plain and unpadded and attribute(node, "strides", [1, 1]) == [2, 2]


def replace_layer(writer: NodeWriter, layer: Fp4Layer, result: ir.Value) -> None:
    """Let every user of the convolution read `result`, and remove the convolution."""
    writer.replace(layer.compute.outputs[0], result)
    writer.graph.remove(layer.compute, safe=True)


def _gemm(
    writer: NodeWriter,
    layer: Fp4Layer,
    activation: ir.Value,
    weight: ir.Value,
    size: tuple[int, ...],
    bias_repeat: int = 1,
) -> ir.Value:
    """[N,C,P] activation, P = H*W of `size`, and [M,C] weight -> [N,M,P], bias added; both are dequantised."""
    shape = (None, math.prod(size) or None, bias_repeat * layer.out_channels)
    columns = writer.add("Transpose", "columns", activation, perm=[0, 2, 1])
    contracted = writer.add("Transpose", "weight", weight, perm=[1, 0])
    result = writer.add("MatMul", "matmul", columns, contracted, dtype=layer.half.dtype, shape=shape)
    node = layer.compute
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        if bias_repeat > 1 and bias.const_value is not None:
            bias = writer.constant("bias", np.repeat(bias.const_value.numpy(), bias_repeat))
        result = writer.add("Add", "biased", result, bias)
    return writer.add("Transpose", "rows", result, perm=[0, 2, 1])


def _lower_pointwise(writer: NodeWriter, layer: Fp4Layer) -> None:
    assert layer.shape is not None
    result = _gemm(writer, layer, layer.dequantized, layer.half, layer.shape[1:])
    shape = _image_shape(writer, layer, layer.out_channels)
    replace_layer(writer, layer, writer.add("Reshape", "image", result, shape))


def _image_shape(writer: NodeWriter, layer: Fp4Layer, channels: int) -> ir.Value:
    """[0, channels, H, W] of the layer's input; H and W are read when the engine runs where they are open."""
    assert layer.shape is not None
    if not layer.is_open:
        return writer.integers("image_shape", 0, channels, *layer.shape[1:])
    image = layer.compute.inputs[0]
    assert image is not None
    size = writer.add("Shape", "image_size", image, dtype=ir.DataType.INT64, start=2)
    head = writer.integers("image_channels", 0, channels)
    return writer.add("Concat", "image_shape", head, size, dtype=ir.DataType.INT64, axis=0)


def reshape_storage(value: ir.Value, shape: tuple[int, int], stored: NDArray[np.uint8] | None = None) -> None:
    """Give a packed initialiser a new shape over the same bytes, or over these."""
    tensor = value.const_value
    assert tensor is not None
    assert tensor.dtype is not None
    raw = np.frombuffer(tensor.tobytes(), np.uint8) if stored is None else stored.reshape(-1)
    storage = (
        ir.PackedTensor(raw, tensor.dtype, shape=ir.Shape(shape), name=value.name)
        if tensor.dtype == ir.DataType.FLOAT4E2M1
        else ir.Tensor(raw.view(tensor.numpy().dtype).reshape(shape), dtype=tensor.dtype, name=value.name)
    )
    value.const_value, value.shape = storage, ir.Shape(shape)


def forget_shapes(layer: Fp4Layer) -> None:
    """Drop the shapes recorded for the dequantised weight, which the new storage contradicts."""
    node = layer.half.producer()
    while node is not None:
        for value in node.outputs:
            value.shape = None
        above = node.inputs[1] if node.op_type == "DequantizeLinear" and node.inputs[1] is not None else None
        if above is not None:
            above.shape = None
        first = node.inputs[0]
        node = first.producer() if first is not None else None


def _lower_upsampling(writer: NodeWriter, layer: Fp4Layer) -> None:
    assert layer.shape is not None
    channels = layer.shape[0]
    rows = 4 * layer.out_channels
    reshape_storage(layer.codes, (rows, channels))
    reshape_storage(layer.scales, (rows, channels // NVFP4_BLOCK))
    forget_shapes(layer)
    result = _gemm(writer, layer, layer.dequantized, layer.half, layer.shape[1:], bias_repeat=4)
    taps = writer.add("Reshape", "image", result, _image_shape(writer, layer, rows))
    replace_layer(writer, layer, writer.add("DepthToSpace", "spread", taps, blocksize=2, mode="CRD"))


def _im2col(writer: NodeWriter, layer: Fp4Layer, plan: Geometry) -> ir.Value:
    """[N,C,H,W] -> [N, KH*KW*C, rows*columns], taps outermost as in OHWI weights."""
    assert layer.shape is not None
    source, channels = layer.source, layer.shape[0]
    if any(plan.pads):
        top, left, bottom, right = plan.pads
        source = writer.add("Pad", "padded", source, writer.integers("pads", 0, 0, top, left, 0, 0, bottom, right))
    axes, steps = writer.integers("axes", 2, 3), writer.integers("steps", *plan.strides)
    taps = []
    for row in range(layer.kernel[0]):
        for column in range(layer.kernel[1]):
            start = (row * plan.dilations[0], column * plan.dilations[1])
            end = tuple(first + (plan.size[i] - 1) * plan.strides[i] + 1 for i, first in enumerate(start))
            window = [
                writer.integers(f"start{row}{column}", *start),
                writer.integers(f"end{row}{column}", *end),
                axes,
                steps,
            ]
            taps.append(writer.add("Slice", f"tap{row}{column}", source, *window))
    size = len(taps) * channels
    stacked = writer.add("Concat", "taps", *taps, axis=1) if len(taps) > 1 else taps[0]
    return writer.add("Reshape", "flat", stacked, writer.integers("flat_shape", 0, size, plan.size[0] * plan.size[1]))


def multiply_columns(writer: NodeWriter, layer: Fp4Layer, plan: Geometry, repeat: int = 1) -> ir.Value:
    """The product [N, M, rows*columns] of a layer's weight [M, K] with the quantised windows of its input, bias added.

    repeat: rows of the weight for each output channel, M = repeat * out_channels.
    """
    scale = layer.quantize.inputs[1]
    assert scale is not None
    codes, scales = writer.add_node(
        QUANTIZE_OP,
        "quantize",
        [_im2col(writer, layer, plan), scale],
        [writer.value("quantize.0"), writer.value("quantize.1")],
        {"axis": 1, "block_size": NVFP4_BLOCK, "scale_type": SCALE_TYPE_E4M3},
        domain=layer.quantize.domain,
    )
    block = writer.add("DequantizeLinear", "scales_dequantized", scales, scale)
    value = writer.add("DequantizeLinear", "dequantized", codes, block, axis=1, block_size=NVFP4_BLOCK)
    half = writer.add("Cast", "half", value, to=int(layer.dtype))
    return _gemm(writer, layer, half, layer.half, plan.size, repeat)


def _lower_im2col(writer: NodeWriter, layer: Fp4Layer, plan: Geometry) -> None:
    result = multiply_columns(writer, layer, plan)
    shape = writer.integers("image_shape", 0, layer.out_channels, *plan.size)
    replace_layer(writer, layer, writer.add("Reshape", "image", result, shape))


class ConvToGemm(NamedLayers):
    """Lower the named FP4 layers; layers of another form than the three above are not changed."""

    def call(self, model: ir.Model) -> PassResult:
        modified, uses = False, Counter[str]()
        for layer in find_fp4_layers(model):
            if layer.name not in self.names:
                continue
            uses[layer.name] += 1
            number = f"_{uses[layer.name]}" if uses[layer.name] > 1 else ""
            writer = NodeWriter(model.graph, f"{layer.name}.gemm{number}", before=layer.compute)
            plan = geometry(layer)
            if is_pointwise(layer) and plan is not None and plan.strides == (1, 1) and not any(plan.pads):
                _lower_pointwise(writer, layer)
            elif is_upsampling(layer):
                _lower_upsampling(writer, layer)
            elif plan is not None:
                _lower_im2col(writer, layer, plan)
            else:
                continue
            modified = True
        return PassResult(model, modified)
