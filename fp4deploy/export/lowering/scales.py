"""Let layers of equal shape share their decoding kernels in a TensorRT-RTX plan.

A convolution that computes in FP16 decodes both operands, value = FP16(global scale * block scale * code), in one
generated kernel an operand, and the plan keeps the CUDA source of every kernel, 130 to 145 kB each. A scalar global
scale is an argument stored with the kernel, so that layers of equal shape still have a kernel each. A vector is a
constant outside the kernel, and then they share one. DequantizeLinear takes either:

    scalar s:               s    * block scale[.., i, ..]
    vector v, v[i] = s:     v[i] * block scale[.., i, ..]      the same FP32 product, so no value changes

The vector lies along the output channels of a weight ([O]) and the blocks of an activation ([C/16]). Measured with
TensorRT-RTX 1.7.1 on the scale 1.0 UNet at 352x480: the plan shrinks from 29.59 to 28.48 MB.

FP4 GEMMs keep the scalar: their kernel reads codes and block scales as they are and multiplies its result by
it. The quantiser keeps it too, because its scale must be one constant.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.export.lowering.pattern import Fp4Layer, attribute, find_fp4_layers
from fp4deploy.formats import NVFP4_BLOCK


class RepeatGlobalScales(InPlacePass):
    """Write the global scales of FP4 layers that stay convolutions as vectors of one repeated value."""

    def call(self, model: ir.Model) -> PassResult:
        layers = find_fp4_layers(model)
        in_gemms = {value for layer in layers if layer.kind == "Linear" for value in _block_scales(layer)}
        modified = False
        for layer in layers:
            for value, (axis, extent) in _block_scales(layer).items():
                if value not in in_gemms:
                    modified |= _repeat(model.graph, value, axis, extent)
        return PassResult(model, modified)


def _block_scales(layer: Fp4Layer) -> dict[ir.Value, tuple[int, int]]:
    """Block scales of a layer's weight and input, each with (axis, extent) of the vector that fits them."""
    axis = attribute(layer.quantize, "axis", -1)
    assert isinstance(axis, int)
    blocks = layer.shape[0] // NVFP4_BLOCK if layer.shape is not None else 0
    weight = {layer.scales: (0, layer.out_channels)}
    return {**weight, layer.quantize.outputs[1]: (axis, blocks)} if blocks else weight


def _repeat(graph: ir.Graph, scales: ir.Value, axis: int, extent: int) -> bool:
    modified = False
    for node in [user for user, index in scales.uses() if user.op_type == "DequantizeLinear" and index == 0]:
        scalar = ir.convenience.get_const_tensor(node.inputs[1]) if node.inputs[1] is not None else None
        if scalar is None or len(scalar.shape):
            continue
        name = f"{node.name}.global_scale"
        array = np.full(extent, scalar.numpy())
        vector = ir.val(name, ir.DataType.from_numpy(array.dtype), array.shape, const_value=ir.tensor(array, name=name))
        graph.register_initializer(vector)
        node.replace_input_with(1, vector)
        node.attributes["axis"] = ir.AttrInt64("axis", axis)
        modified = True
    return modified
