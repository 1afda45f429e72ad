"""Where Q/DQ nodes stand, and what each layer's quantiser reads: the column `input` of the ledger.

| at | rule | because |
|---|---|---|
| a quantised layer | one quantiser right before it, after everything else | the GEMM reads codes |
| a skip connection | joined in FP16, quantised once after Concat | one scale for what one GEMM contracts |
| a residual | added in FP16, quantised after Add | quantised addends would be rounded twice |
| pooling | pooled in FP16, quantised after MaxPool | a quarter of the elements |
| an activation of several readers | quantised by each reader | each layer has its own scale |
| a transposed convolution | its input like any other, its output not | its reader quantises after Concat |
| the output of any layer | never quantised | the next operation reads FP16 |

`fp4deploy.export.onnx` writes graphs by these rules; a file of another tool may not, and the ledger shows what it has.
"""

from __future__ import annotations

import onnx_ir as ir

from fp4deploy.export.lowering.pattern import layer_name, weight_initializer
from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.export.onnx.quantize_function import DEQUANTIZE_OPS, QUANTIZE_OP, STATIC_QUANTIZE_OPS

_QUANTIZERS = (QUANTIZE_OP, *STATIC_QUANTIZE_OPS)
_AROUND = (*DEQUANTIZE_OPS, "Cast", "Reshape", "Pad", "Transpose", "Identity", *_QUANTIZERS)
IMAGE = "input"


def quantized_after(model: ir.Model) -> dict[str, str]:
    """Quantised layer -> the operator whose result its quantiser reads; "input" for one of the graph's inputs."""
    found: dict[str, list[str]] = {}
    for node in model.graph:
        if node.op_type not in GEMM_OPS or weight_initializer(node) is None:
            continue
        producer = _producer(node.inputs[0])
        if producer is not None:
            found.setdefault(layer_name(node, weight_initializer(node)), []).append(producer)
    return {name: ", ".join(dict.fromkeys(producers)) for name, producers in found.items()}


def _producer(value: ir.Value | None) -> str | None:
    """Of a quantised operand; None where no quantiser is passed."""
    passed = False
    while value is not None:
        above = value.producer()
        if above is None or above.op_type not in _AROUND:
            return None if not passed else IMAGE if above is None else above.op_type
        passed = passed or above.op_type in _QUANTIZERS
        value = above.inputs[0] if above.inputs else None
    return None
