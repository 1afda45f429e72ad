"""FP4 weights that TensorRT-RTX 1.7 does not build, decoded to FP16 or what else the rest is; the input is quantised as
before.

- A single block of 16: one output of at most 16 channels, such as an attention gate. Its one block scale, [1, 1], is
  taken for that of a whole tensor ("ScaleMode is illegal"). 16 products a pixel are no loss.
- A single tap that is no single GEMM: 1x1 in groups, transposed or with automatic padding, 1x1x1 over volumes. The
  compiler moves its blocks to a third-last axis and fails; such a layer would be computed in FP16 anyway.

The decoded weight has the values that the codes stand for.
"""

from __future__ import annotations

import onnx_ir as ir

from fp4deploy.export.lowering.fp8 import decoded_weight
from fp4deploy.export.lowering.pattern import Fp4Layer, LowerNamedLayers
from fp4deploy.export.onnx.writer import NodeWriter

SINGLE_BLOCK = "its weight is a single block, whose scale TensorRT-RTX takes for that of a tensor: decoded"
NO_GEMM = "TensorRT-RTX builds no convolution of one tap with FP4 weights, and this one is not a single GEMM: decoded"


def is_single_block(layer: Fp4Layer) -> bool:
    """Whether the weight has one block scale."""
    return layer.scales.const_value is not None and layer.scales.const_value.size == 1


def why_decoded(layer: Fp4Layer, gemm: str | None) -> str | None:
    """Why a layer's weight is decoded, None where it is not; `gemm`: why the layer becomes a GEMM, if it does."""
    if is_single_block(layer):
        return SINGLE_BLOCK
    return NO_GEMM if gemm is None and layer.kind != "Linear" and {*layer.kernel} == {1} else None


class DecodeWeights(LowerNamedLayers):
    """Decode the weights of the named FP4 layers."""

    def lower(self, graph: ir.Graph, layer: Fp4Layer) -> None:
        writer = NodeWriter(graph, layer.name, before=layer.compute)
        values = decoded_weight(layer).reshape(layer.out_channels, -1).astype(layer.dtype.numpy())
        layer.half.replace_all_uses_with(writer.constant("weight", values))
