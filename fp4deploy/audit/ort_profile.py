"""A profile of ONNX Runtime (`SessionOptions.enable_profiling`): which operators ran, on what, in which type.

The file is a Chrome trace: one event a kernel call, `cat` "Node", `name` NODE_kernel_time, `dur` in microseconds.
`args` has the operator, the execution provider, and the types and shapes of its inputs.
"""

from __future__ import annotations

import re
from typing import Any

from fp4deploy.audit.operands import FORMATS, INTEGER_OPS
from fp4deploy.export.onnx.canonical import GEMM_OPS

_SUFFIX = "_kernel_time"
_FUSED = re.compile(r"_token_\d+$")  # ONNX Runtime's mark on a node that an optimisation made of another
_TYPES = {"float": "FP32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8", "uint8": "INT8", "double": "FP64"}
MULTIPLYING = (*GEMM_OPS, *INTEGER_OPS, "FusedConv", "FusedMatMul", "FusedGemm", "NhwcConv", "MatMulNBits")


def is_profile(document: Any) -> bool:
    """Whether a JSON document is a profile of ONNX Runtime."""
    return isinstance(document, list) and any(_is_kernel(event) for event in document)


def profile_rows(document: list[Any]) -> list[dict[str, Any]]:
    """Nodes that multiply: name, operator, type of their first input, provider, calls and mean milliseconds."""
    rows: dict[str, dict[str, Any]] = {}
    total: dict[str, float] = {}
    for event in document:
        if not _is_kernel(event) or event["args"].get("op_name") not in MULTIPLYING:
            continue
        name = _FUSED.sub("", str(event["name"]).removesuffix(_SUFFIX))
        row = rows.setdefault(name, {"layer": name, "operator": event["args"]["op_name"], "calls": 0})
        row["calls"] += 1
        total[name] = total.get(name, 0.0) + float(event.get("dur", 0))
        row["runs"] = _type(event["args"])
        row["kernel"] = str(event["args"].get("provider", ""))
        row["onnx_nodes"] = [name]
        row["ms"] = total[name] / row["calls"] / 1000
    return list(rows.values())


def _is_kernel(event: Any) -> bool:
    if not isinstance(event, dict) or event.get("cat") != "Node" or not isinstance(event.get("args"), dict):
        return False
    return str(event.get("name", "")).endswith(_SUFFIX)


def _type(arguments: dict[str, Any]) -> str:
    shapes = arguments.get("input_type_shape")
    first = shapes[0] if isinstance(shapes, list) and shapes and isinstance(shapes[0], dict) else {}
    name = next(iter(first), "")
    return _TYPES.get(name, FORMATS.get(name.upper(), name or "unknown"))
