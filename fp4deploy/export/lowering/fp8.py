"""Lower FP4 convolutions to FP8 convolutions, which TensorRT runs on tensor cores (SM89 and SM12x; SM90, SM100).

There is no FP4 convolution in TensorRT: by default it decodes FP4 weights and convolves in FP16. FP8 has twice the FP16
rate, needs no im2col, and its Q/DQ nodes are ONNX's own:

    x -> QuantizeLinear(A / 448) -> DequantizeLinear                 E4M3, one static scale for the tensor
    W -> DequantizeLinear(axis = output channels)                    E4M3, one scale a channel, its amax / 448

A is the static amax that the layer's FP4 activation has already. The activation is not rounded to FP4 first, so it is
closer to the unquantised one than what the model was trained or calibrated with. The weights are the FP4 weights,
decoded and rounded to E4M3 again: a code times a block scale has up to five significant bits, E4M3 has four. They take
twice the bytes. So this form trades the size of the plan and a little rounding for FP8 tensor cores in layers that
would run in FP16; it has been built and inspected, and timed by nobody. Transposed convolutions stay what they are:
TensorRT-RTX 1.7 multiplies them in FP16 whatever their operands are, and so convolutions of more than 32 taps (7x7).

Scales are FP16, as the tensors are; a layer whose scales FP16 could not hold (amax below 0.03) is left as it is, and so
is one whose rest is BF16 or FP32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from fp4deploy.export.lowering.pattern import Fp4Layer, LowerNamedLayers
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.formats.constants import E4M3_MAX, nvfp4_range

NO_TRANSPOSED = "TensorRT-RTX multiplies transposed convolutions in FP16: their weights are decoded"
REASON = "no FP4 convolution in TensorRT: FP4 weights, decoded and rounded to FP8, and FP8 activations"
MAX_TAPS = 32  # of an FP8 convolution, found by building: 4x8 and 31x1 are FP8, 1x33, 5x7, 6x6 and 7x7 are not
TOO_MANY_TAPS = f"TensorRT-RTX has FP8 convolutions of at most {MAX_TAPS} taps: the FP8 weights of this one are decoded"
SMALLEST_SCALE = 2.0**-14  # FP16's smallest normal number


def why_not_fp8(kernel: Sequence[int], transposed: bool, form: str = "FP8") -> str:
    """Why the compiler decodes the weights of a convolution in FP8, or INT8; "" where it multiplies in that."""
    if transposed:
        return NO_TRANSPOSED
    return TOO_MANY_TAPS if form == "FP8" and math.prod(kernel) > MAX_TAPS else ""


def can_be_fp8(layer: Fp4Layer) -> bool:
    """Whether this FP4 layer is a 2-D convolution that the compiler has in FP8, and its scales are numbers of FP16."""
    if (
        layer.dtype != ir.DataType.FLOAT16
        or layer.kind != "Conv2d"
        or layer.shape is None
        or why_not_fp8(layer.kernel, transposed=False)
    ):
        return False
    return activation_scale(layer) >= SMALLEST_SCALE


def activation_scale(layer: Fp4Layer) -> float:
    """A / 448 of the layer's input; its FP4 global scale is A / (6 * 448)."""
    tensor = ir.convenience.get_const_tensor(layer.quantize.inputs[1])  # type: ignore[arg-type]
    assert tensor is not None
    return float(tensor.numpy().reshape(-1)[0]) * nvfp4_range(E4M3_MAX) / E4M3_MAX


def decoded_weight(layer: Fp4Layer) -> NDArray[np.float32]:
    """The FP4 weight [O, KH, KW, C] that the file holds, float32."""
    codes, scales = (_numbers(value) for value in (layer.codes, layer.scales))
    producer = next(use.node for use in layer.scales.uses() if use.node.op_type == "DequantizeLinear")
    global_scale = _numbers(producer.inputs[1]).reshape(-1)[0]
    weight = codes * np.repeat(scales * global_scale, NVFP4_BLOCK, axis=1)
    return weight.reshape(layer.out_channels, *layer.kernel, -1).astype(np.float32)


def to_fp8(weight: NDArray[np.float32]) -> tuple[NDArray[np.generic], NDArray[np.float16]]:
    """(E4M3 values like `weight`, FP16 scale of each of its first axis)."""
    amax = np.abs(weight).reshape(len(weight), -1).max(1)
    scale = np.maximum(amax / E4M3_MAX, SMALLEST_SCALE).astype(np.float16)
    wide = scale.astype(np.float32).reshape(-1, *[1] * (weight.ndim - 1))
    return (weight / wide).clip(-E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn), scale


def _numbers(value: ir.Value | None) -> NDArray[np.float32]:
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    assert tensor is not None
    return np.asarray(tensor.numpy()).astype(np.float32)


class ConvToFp8(LowerNamedLayers):
    """Lower the named FP4 layers."""

    def lower(self, graph: ir.Graph, layer: Fp4Layer) -> None:
        _lower(NodeWriter(graph, f"{layer.name}.fp8", before=layer.compute), layer)


def _lower(writer: NodeWriter, layer: Fp4Layer) -> None:
    codes, scales = to_fp8(decoded_weight(layer))  # [O, KH, KW, C]
    weight = writer.constant("weight", np.ascontiguousarray(codes.transpose(0, 3, 1, 2)), prefix=layer.name)
    scale = writer.constant("weight.scale", scales, prefix=layer.name)
    decoded = writer.add("DequantizeLinear", "weight", weight, scale, axis=0)
    step = writer.constant("scale", np.float16(activation_scale(layer)))
    zero = writer.constant("zero", np.zeros((), ml_dtypes.float8_e4m3fn))
    quantized = writer.add("QuantizeLinear", "quantize", layer.source, step, zero)
    activation = writer.add("DequantizeLinear", "dequantized", quantized, step, zero)
    layer.compute.replace_input_with(0, activation)
    layer.compute.replace_input_with(1, decoded)
