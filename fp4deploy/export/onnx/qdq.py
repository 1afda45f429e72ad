"""Quantise/dequantise nodes of the canonical graph.

A quantised layer computes in FP16 what its Q/DQ nodes leave of its operands:

    x [N,C,H,W] -> (Pad C to 16s) -> Reshape [N,C,HW] -> TRT_FP4DynamicQuantize(., s) -> codes E2M1, scales E4M3
        DequantizeLinear(scales, s) -> DequantizeLinear(codes, that, axis=1, block_size=16) -> Cast -> Reshape [N,C,H,W]
    codes [O, KH*KW*C] E2M1, scales [O, KH*KW*C/16] E4M3, global scale []
        DequantizeLinear twice likewise -> Cast -> Reshape [O,KH,KW,C] -> Transpose -> Conv | ConvTranspose | MatMul
        (a 1x1 kernel has no taps to move past: another Reshape, [O,C,1,1], in place of the Transpose)

Why so: TensorRT's quantiser takes at most three axes and wants the blocked one last or second to last; its FP4
constants must be 2-D for a convolution to build; E4M3 may not be the scale of an FP4 DequantizeLinear, hence two. The
weights stay in OHWI order, so that a block never crosses a tap. Channels beyond C are zeros on both sides, so padding
does not change the result.

Tracing leaves two markers a layer, ActivationQuantize and WeightQuantize; `LowerMarkers` puts these nodes in their
place.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import LayerConstants
from fp4deploy.export.onnx.quantize_function import QUANTIZE_OP, TRT_DOMAIN, dynamic_quantize_function
from fp4deploy.formats import NVFP4_BLOCK, global_scale

MARKER_DOMAIN = "fp4deploy"
ACTIVATION_MARKER = "ActivationQuantize"
WEIGHT_MARKER = "WeightQuantize"


class LowerMarkers(ir.passes.InPlacePass):
    """Replace every marker that tracing left by its Q/DQ nodes; precondition: `layers` has each marked layer."""

    def __init__(self, layers: dict[str, LayerConstants]) -> None:
        super().__init__()
        self.layers = layers

    def requires(self, model: ir.Model) -> None:
        unknown = {_layer_of(node) for node in _markers(model)} - set(self.layers)
        if unknown:
            raise ir.passes.PreconditionError(f"no constants for {sorted(unknown)}")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        markers = _markers(model)
        for node in markers:
            name = _layer_of(node)
            lower = _lower_activation if node.op_type == ACTIVATION_MARKER else _lower_weight
            nodes = lower(model.graph, name, self.layers[name], node)
            ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, node.outputs, nodes[-1].outputs)
            nodes[-1].outputs[0].name = nodes[-1].name
        if markers:
            del model.graph.opset_imports[MARKER_DOMAIN]
            model.graph.opset_imports[TRT_DOMAIN] = 1
            function = cast(ir.Function, ir.from_proto(dynamic_quantize_function()))
            model.functions[function.identifier()] = function
        return ir.passes.PassResult(model, modified=bool(markers))


def _markers(model: ir.Model) -> list[ir.Node]:
    return [node for node in model.graph if node.domain == MARKER_DOMAIN]


def _layer_of(node: ir.Node) -> str:
    return node.attributes["layer"].as_string()


def _lower_activation(graph: ir.Graph, name: str, layer: LayerConstants, marker: ir.Node) -> list[ir.Node]:
    """x -> Pad -> Reshape -> quantise -> dequantise -> Cast -> Reshape; layout operators only where they are needed."""
    (x,) = marker.inputs
    assert x is not None
    assert x.shape is not None
    writer = _NodeWriter(graph, f"{name}.input")
    axis = layer.channel_axis % len(x.shape)
    padded = _replace(tuple(x.shape), axis, layer.channels)
    value = x
    if x.shape[axis] != layer.channels:
        value = writer.pad(value, axis, layer.channels, padded)
    flat, flat_axis = _at_most_three(padded, axis, name)
    whole = value
    if flat != padded:
        value = writer.reshape(value, "flat", flat)
    scale = writer.constant("global_scale", np.array(global_scale(layer.input_amax)))
    blocks = _replace(flat, flat_axis, layer.channels // NVFP4_BLOCK)
    codes, scales = writer.add(
        QUANTIZE_OP,
        [value, scale],
        [("codes", ir.DataType.FLOAT4E2M1, flat), ("scales", ir.DataType.FLOAT8E4M3FN, blocks)],
        {"axis": flat_axis, "block_size": NVFP4_BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)},
        domain=TRT_DOMAIN,
        name="quantize",
    )
    value = writer.dequantize(codes, scales, scale, flat_axis)
    if flat != padded and all(isinstance(size, int) for size in padded[1:]):
        writer.reshape(value, "image", padded)
    elif flat != padded:
        writer.reshape_like(value, "image", whole, padded)
    return writer.nodes


def _lower_weight(graph: ir.Graph, name: str, layer: LayerConstants, marker: ir.Node) -> list[ir.Node]:
    """codes, scales -> dequantise -> Cast -> Reshape OHWI -> Transpose."""
    writer = _NodeWriter(graph, f"{name}.weight")
    rows, width = layer.codes.shape[0], 2 * layer.codes.shape[1]
    packed = ir.PackedTensor(layer.codes, ir.DataType.FLOAT4E2M1, shape=ir.Shape((rows, width)))
    codes = writer.constant("codes", packed)
    scales = writer.constant("scales", layer.scales)
    scale = writer.constant("global_scale", np.array(global_scale(layer.weight_amax, layer.e4m3_max)))
    value = writer.dequantize(codes, scales, scale, 1)
    shape = tuple(layer.shape[axis] for axis in layer.order)
    if layer.shape != (rows, width):
        value = writer.reshape(value, "ohwi", layer.shape)
    if layer.shape[1:3] == (1, 1) and layer.order[0] == 0:
        writer.reshape(value, "oihw", shape)  # no byte moves, and TensorRT-RTX does not compile this transpose
    else:
        writer.transpose(value, "transposed", layer.order)
    return writer.nodes


class _NodeWriter:
    """A sequence of nodes, each named after its layer and its role; constants are added to the graph at once."""

    def __init__(self, graph: ir.Graph, prefix: str) -> None:
        self.graph, self.prefix = graph, prefix
        self.nodes: list[ir.Node] = []

    def constant(self, role: str, array: NDArray[Any] | ir.TensorProtocol) -> ir.Value:
        tensor = ir.tensor(array) if isinstance(array, np.ndarray) else array
        name, number = f"{self.prefix}.{role}", 1
        while name in self.graph.initializers:  # a module used twice shares its constants, unless they differ
            known = self.graph.initializers[name]
            if known.const_value is not None and known.const_value.tobytes() == tensor.tobytes():
                return known
            number += 1
            name = f"{self.prefix}.{role}_{number}"
        tensor.name = name
        value = ir.val(name, tensor.dtype, tensor.shape.numpy(), const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def add(
        self,
        op: str,
        inputs: list[ir.Value],
        outputs: list[tuple[str, ir.DataType, tuple[Any, ...]]],
        attributes: dict[str, Any] | None = None,
        domain: str = "",
        name: str = "",
    ) -> Any:
        values = [ir.val(f"{self.prefix}.{role}", dtype, ir.Shape(shape)) for role, dtype, shape in outputs]
        label = f"{self.prefix}.{name or outputs[0][0]}"
        self.nodes.append(ir.node(op, inputs, attributes or {}, domain=domain, outputs=values, name=label))
        return values if len(values) > 1 else values[0]

    def reshape(self, x: ir.Value, role: str, shape: tuple[Any, ...]) -> ir.Value:
        target = [size if isinstance(size, int) else 0 if index == 0 else -1 for index, size in enumerate(shape)]
        constant = self.constant(f"{role}_shape", np.array(target, np.int64))
        return cast(ir.Value, self.add("Reshape", [x, constant], [(role, ir.DataType.FLOAT16, shape)]))

    def reshape_like(self, x: ir.Value, role: str, like: ir.Value, shape: tuple[Any, ...]) -> ir.Value:
        """Reshape to the shape that `like` has while the model runs."""
        extents = self.add("Shape", [like], [(f"{role}_shape", ir.DataType.INT64, (len(shape),))])
        return cast(ir.Value, self.add("Reshape", [x, extents], [(role, ir.DataType.FLOAT16, shape)]))

    def transpose(self, x: ir.Value, role: str, order: tuple[int, ...]) -> ir.Value:
        assert x.shape is not None
        shape = tuple(x.shape[axis] for axis in order)
        outputs = [(role, ir.DataType.FLOAT16, shape)]
        return cast(ir.Value, self.add("Transpose", [x], outputs, {"perm": list(order)}))

    def pad(self, x: ir.Value, axis: int, extent: int, shape: tuple[Any, ...]) -> ir.Value:
        assert x.shape is not None
        pads = np.zeros(2 * len(shape), np.int64)
        pads[len(shape) + axis] = extent - cast(int, x.shape[axis])
        constant = self.constant("pads", pads)
        return cast(ir.Value, self.add("Pad", [x, constant], [("padded", ir.DataType.FLOAT16, shape)]))

    def dequantize(self, codes: ir.Value, scales: ir.Value, scale: ir.Value, axis: int) -> ir.Value:
        assert codes.shape is not None
        assert scales.shape is not None
        shape, blocks = tuple(codes.shape), tuple(scales.shape)
        wide = ir.DataType.FLOAT
        block_steps = self.add("DequantizeLinear", [scales, scale], [("scales_dequantized", wide, blocks)])
        attributes = {"axis": axis, "block_size": NVFP4_BLOCK}
        value = self.add("DequantizeLinear", [codes, block_steps], [("dequantized", wide, shape)], attributes)
        half = ir.DataType.FLOAT16
        return cast(ir.Value, self.add("Cast", [value], [("half", half, shape)], {"to": int(half)}))


def _at_most_three(shape: tuple[Any, ...], axis: int, name: str) -> tuple[tuple[Any, ...], int]:
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


def _replace(shape: tuple[Any, ...], axis: int, size: int) -> tuple[Any, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])
