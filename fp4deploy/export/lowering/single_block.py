"""FP4 weights of a single block of 16, decoded to FP16: one output of at most 16 channels, such as an attention gate.

Such a weight has one block scale, [1, 1], which TensorRT-RTX 1.7 takes for the scale of a whole tensor and refuses
("ScaleMode is illegal"). The decoded weight has the values that the codes stand for, the input is quantised as before,
and 16 products a pixel are no loss.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from fp4deploy.export.lowering.fp8 import decoded_weight
from fp4deploy.export.lowering.pattern import Fp4Layer, LowerNamedLayers
from fp4deploy.export.onnx.writer import NodeWriter

SINGLE_BLOCK = "its weight is a single block, whose scale TensorRT-RTX takes for that of a tensor: decoded to FP16"


def is_single_block(layer: Fp4Layer) -> bool:
    """Whether the weight has one block scale."""
    return layer.scales.const_value is not None and layer.scales.const_value.size == 1


class DecodeSingleBlocks(LowerNamedLayers):
    """Decode the weights of the named FP4 layers."""

    def lower(self, graph: ir.Graph, layer: Fp4Layer) -> None:
        writer = NodeWriter(graph, layer.name, before=layer.compute)
        values = decoded_weight(layer).reshape(layer.out_channels, -1).astype(np.float16)
        layer.half.replace_all_uses_with(writer.constant("weight", values))
