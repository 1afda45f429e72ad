"""Which FP4 convolutions can be a plugin, and the activations that they read before quantisation.

In the canonical graph a layer's input is quantised whole, right before it is read. A plugin needs the value
above: the activation without the zeros that fill its last block (kernels add them), and for a concatenation its two
inputs.

    a, b -> Concat -> (Pad) -> (Reshape) -> TRT_FP4DynamicQuantize        parts (a, b), path [Concat, Pad, Reshape]
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fp4deploy.export.lowering.gemm import geometry, is_upsampling
from fp4deploy.export.lowering.pattern import Fp4Layer, attribute, constant_ints
from fp4deploy.export.lowering.plan import known_shape
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.gemm.dispatch import TAPS


@dataclass(frozen=True)
class Source:
    """What a plugin needs to know of a layer, beyond its constants.

    parts: one or two activations [N,C,H,W] and their channels, in the order in which they are concatenated.
    path: the nodes between them and the quantiser, which are not needed where all that reads them is a plugin.
    """

    parts: tuple[tuple[ir.Value, int], ...]
    path: tuple[ir.Node, ...]
    stride: int = 1
    padding: int = 0
    dilation: int = 1


def read_source(layer: Fp4Layer) -> Source | None:
    """How a plugin computes this layer; None where it cannot, and TensorRT gets the layer as it is.

    A plugin takes convolutions of one group with the same stride, dilation and padding along both axes, up to 7x7, and
    transposed ones of 2x2 with stride 2; biases are constants.
    """
    if layer.shape is None or not _constant_bias(layer.compute):
        return None
    numbers = (1, 0, 1) if is_upsampling(layer) else _same_both_ways(layer)
    if numbers is None:
        return None
    parts, path = _parts(layer, layer.shape[0])
    if layer.kind == "ConvTranspose2d" and len(parts) > 1:
        parts, path = ((path[-1].outputs[0], sum(channels for _, channels in parts)),), path[:-1]
    return Source(parts, path, *numbers)


def scalar(value: ir.Value | None) -> float:
    """A constant of one element, such as a global scale; FP32 values are exact in Python's floats."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    assert tensor is not None
    return float(tensor.numpy().reshape(-1)[0])


def _constant_bias(node: ir.Node) -> bool:
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    return bias is None or ir.convenience.get_const_tensor(bias) is not None


def _same_both_ways(layer: Fp4Layer) -> tuple[int, int, int] | None:
    """(stride, padding, dilation) of a convolution that has one of each."""
    plan = geometry(layer)
    if plan is None or layer.kernel[0] * layer.kernel[1] > TAPS:
        return None
    if len(set(plan.strides)) > 1 or len(set(plan.pads)) > 1 or len(set(plan.dilations)) > 1:
        return None
    return plan.strides[0], plan.pads[0], plan.dilations[0]


def _parts(layer: Fp4Layer, padded: int) -> tuple[tuple[tuple[ir.Value, int], ...], tuple[ir.Node, ...]]:
    """(activations and their channels, the nodes below them, nearest the quantiser first)."""
    reshape = layer.quantize.inputs[0].producer() if layer.quantize.inputs[0] is not None else None
    path = [reshape] if reshape is not None and reshape.op_type == "Reshape" else []
    value, channels = layer.source, padded
    node = value.producer()
    if node is not None and node.op_type == "Pad" and (filled := _filled_channels(node)) is not None:
        assert node.inputs[0] is not None
        path.append(node)
        value, channels = node.inputs[0], padded - filled
        node = value.producer()
    halves = _halves(node, channels) if node is not None and node.op_type == "Concat" else None
    if node is None or halves is None:
        return ((value, channels),), tuple(path)
    return halves, (*path, node)


def _filled_channels(node: ir.Node) -> int | None:
    """How many channels of zeros a Pad adds behind the others; None where it does anything else."""
    pads = constant_ints(node.inputs[1]) if len(node.inputs) == 2 else None
    if pads is None or len(pads) != 8 or attribute(node, "mode", "constant") != "constant":
        return None
    return pads[5] if sum(map(abs, pads)) == pads[5] < NVFP4_BLOCK else None


def _halves(node: ir.Node, channels: int) -> tuple[tuple[ir.Value, int], ...] | None:
    """The two inputs of a concatenation along channels, the first in whole blocks."""
    if len(node.inputs) != 2 or attribute(node, "axis", 1) not in (1, -3):
        return None
    first, second = node.inputs
    shape = known_shape(first)
    if first is None or second is None or shape is None or len(shape) != 4:
        return None
    size = shape[1]
    if not isinstance(size, int) or size % NVFP4_BLOCK or not 0 < size < channels:
        return None
    return (first, size), (second, channels - size)
