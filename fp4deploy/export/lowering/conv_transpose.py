"""Transposed convolutions of any kernel as one FP4 GEMM.

    y[o] = sum_k x[(o + p - k) / s] w[k],  over the k for which the division has no rest          stride s, padding p

With o + p = s u + r, 0 <= r < s, these are k = r + s t, and x is read at u - t: every phase r is a convolution of T =
ceil(K / s) taps over the same windows, and the s*s phases are the rows of one GEMM

    z[N, P, s*s*O] = columns(x)[N, P, T*T*C] . W'[s*s*O, T*T*C]^T,   W'[o, r, a] = w[o, r + s (T - 1 - a)]

over P = (H + T - 1)(W + T - 1) windows of `x` with a padding of T - 1; DepthToSpace puts the phases beside one another,
and the first p rows and columns and what is beyond the output's size are cut off. Blocks run along the channels of one
tap, so **no code or scale changes**; taps that a phase does not have (a kernel that is no multiple of the stride) are
blocks of zeros.

Trade-off: beside the windows at the edge, a 4x4 kernel of stride 2 costs no multiplication more than the convolution, a
3x3 one 16/9 as many.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray
from onnx_ir.passes import PassResult

from fp4deploy.export.lowering.gemm import (
    Geometry,
    forget_shapes,
    integers_of,
    multiply_columns,
    replace_layer,
    reshape_storage,
)
from fp4deploy.export.lowering.pattern import Fp4Layer, NamedLayers, attribute, find_fp4_layers
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import NVFP4_BLOCK


@dataclass(frozen=True)
class Phases:
    """stride: of both axes. taps: of each phase, along both axes. begin: rows and columns that are cut off before the
    output. size: of the output.
    """

    stride: int
    taps: tuple[int, int]
    begin: tuple[int, int]
    size: tuple[int, int]


def phases(layer: Fp4Layer) -> Phases | None:
    """The phases of a transposed convolution of one group, one stride above 1 and a known size; else None."""
    node = layer.compute
    if layer.kind != "ConvTranspose2d" or layer.shape is None or layer.is_open:
        return None
    plain = attribute(node, "group", 1) == 1 and attribute(node, "auto_pad", "NOTSET") == "NOTSET"
    strides, dilations = integers_of(node, "strides", [1, 1]), integers_of(node, "dilations", [1, 1])
    if (
        not plain
        or dilations != [1, 1]
        or len(set(strides)) != 1
        or strides[0] < 2
        or "output_shape" in node.attributes
    ):
        return None
    pads, extra = integers_of(node, "pads", [0] * 4), integers_of(node, "output_padding", [0, 0])
    stride = strides[0]
    size = [
        stride * (layer.shape[1 + axis] - 1) + layer.kernel[axis] - pads[axis] - pads[axis + 2] + extra[axis]
        for axis in range(2)
    ]
    reach = [max(layer.kernel[axis], layer.kernel[axis] - pads[axis + 2] + extra[axis]) for axis in range(2)]
    taps = [-(-each // stride) for each in reach]
    return Phases(stride, (taps[0], taps[1]), (pads[0], pads[1]), (size[0], size[1]))


class TransposedToGemm(NamedLayers):
    """Lower the named transposed convolutions."""

    def call(self, model: ir.Model) -> PassResult:
        uses = Counter[str]()
        for layer in find_fp4_layers(model):
            plan = phases(layer) if layer.name in self.names else None
            if plan is None:
                continue
            uses[layer.name] += 1
            number = f"_{uses[layer.name]}" if uses[layer.name] > 1 else ""
            _lower(NodeWriter(model.graph, f"{layer.name}.gemm{number}", before=layer.compute), layer, plan)
        return PassResult(model, bool(uses))


def _lower(writer: NodeWriter, layer: Fp4Layer, plan: Phases) -> None:
    assert layer.shape is not None
    rows, channels = plan.stride**2 * layer.out_channels, layer.shape[0]
    taps = plan.taps[0] * plan.taps[1]
    if layer.codes.const_value is not None and layer.codes.const_value.shape.numpy()[0] == layer.out_channels:
        _rearrange(layer, layer.codes, channels // 2, plan, (rows, taps * channels))
        _rearrange(layer, layer.scales, channels // NVFP4_BLOCK, plan, (rows, taps * channels // NVFP4_BLOCK))
        forget_shapes(layer)
    high, wide = (extent + each - 1 for extent, each in zip(layer.shape[1:], plan.taps, strict=True))
    around = (plan.taps[0] - 1, plan.taps[1] - 1)
    windows = Geometry((1, 1), (1, 1), (*around, *around), (high, wide))
    product = multiply_columns(writer, replace(layer, kernel=plan.taps), windows, plan.stride**2)
    image = writer.add("Reshape", "image", product, writer.integers("image_shape", 0, rows, high, wide))
    spread = writer.add("DepthToSpace", "spread", image, blocksize=plan.stride, mode="CRD")
    end = [first + extent for first, extent in zip(plan.begin, plan.size, strict=True)]
    bounds = [writer.integers("first", *plan.begin), writer.integers("end", *end), writer.integers("image_axes", 2, 3)]
    replace_layer(writer, layer, writer.add("Slice", "cut", spread, *bounds))


def _rearrange(layer: Fp4Layer, value: ir.Value, width: int, plan: Phases, shape: tuple[int, int]) -> None:
    """Store a weight's codes or scales, `width` bytes a tap, in the order W' of the module's docstring."""
    tensor = value.const_value
    assert tensor is not None
    stored = np.frombuffer(tensor.tobytes(), np.uint8).reshape(layer.out_channels, *layer.kernel, width)
    reshape_storage(value, shape, _phase_major(stored, plan))


def _phase_major(stored: NDArray[np.uint8], plan: Phases) -> NDArray[np.uint8]:
    """[O, KH, KW, bytes] -> [O, s, s, TH, TW, bytes], zeros where a phase has no such tap."""
    out, high, wide, width = stored.shape
    stride, (rows, columns) = plan.stride, plan.taps
    whole = np.zeros((out, rows * stride, columns * stride, width), np.uint8)
    whole[:, :high, :wide] = stored
    taps = whole.reshape(out, rows, stride, columns, stride, width)[:, ::-1, :, ::-1]
    return np.ascontiguousarray(taps.transpose(0, 2, 4, 1, 3, 5))
