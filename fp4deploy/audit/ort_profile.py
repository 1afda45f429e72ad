"""A profile of ONNX Runtime (`SessionOptions.enable_profiling`): which operators ran, on what, in which type.

The file is a Chrome trace: one event a kernel call, `cat` "Node", `name` NODE_kernel_time, `dur` in microseconds.
`args` has the operator, the execution provider, and the types and shapes of its inputs.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx
from pydantic import BaseModel

from fp4deploy.audit.operands import FORMATS, INTEGER_OPS
from fp4deploy.export.onnx.canonical import GEMM_OPS
from fp4deploy.system.schema import Count, Float, validated

_SUFFIX = "_kernel_time"
_FUSED = re.compile(r"(_token_\d+|_nchwc)+$")  # ONNX Runtime's marks on a node that an optimisation made of another
_TYPES = {"float": "FP32", "float16": "FP16", "bfloat16": "BF16", "int8": "INT8", "uint8": "INT8", "double": "FP64"}
FUSED_AFTER = ("Add", "BatchNormalization", "Clip", "HardSigmoid", "LeakyRelu", "Mul", "Relu", "Sigmoid", "Tanh")
MULTIPLYING = (*GEMM_OPS, *INTEGER_OPS, "FusedConv", "FusedMatMul", "FusedGemm", "NhwcConv", "MatMulNBits")


def is_profile(document: object) -> bool:
    """Whether a JSON document is a profile of ONNX Runtime."""
    return isinstance(document, list) and any(_is_kernel(event) for event in document)


class _Arguments(BaseModel):
    op_name: str = ""
    provider: str = ""
    input_type_shape: list[dict[str, Any]] = []


class _Event(BaseModel):
    """What is read of one kernel call."""

    name: str
    dur: Float | Count = 0
    args: _Arguments


def profile_rows(document: list[Any], path: Path) -> list[dict[str, Any]]:
    """Nodes that multiply: name, operator, type of their first input, provider, calls and mean milliseconds.

    Raises:
        InputError: a field of a kernel call has another type.
    """
    rows: dict[str, dict[str, Any]] = {}
    total: dict[str, float] = {}
    for number, entry in enumerate(document):
        if not _is_kernel(entry) or entry["args"].get("op_name") not in MULTIPLYING:
            continue
        event = validated(_Event, entry, f"{path}: event {number}")
        name = _FUSED.sub("", event.name.removesuffix(_SUFFIX))
        row = rows.setdefault(name, {"layer": name, "operator": event.args.op_name, "calls": 0})
        row["calls"] += 1
        total[name] = total.get(name, 0.0) + event.dur
        row["runs"] = _type(event.args)
        row["kernel"] = event.args.provider
        row["onnx_nodes"] = [name]
        row["ms"] = total[name] / row["calls"] / 1000
    return list(rows.values())


def with_nodes(rows: list[dict[str, Any]], nodes: set[str], model: onnx.ModelProto) -> list[dict[str, Any]]:
    """The rows, each with the node of `nodes` that it was made of.

    ONNX Runtime calls a convolution in blocked layout, or with what follows fused into it, after the value it writes.
    """
    writers = _writers(model)
    taken = {row["layer"] for row in rows} & nodes
    for row in sorted(rows, key=lambda each: len(writers.get(each["layer"], ()))):
        free = [name for name in writers.get(row["layer"], ()) if name in nodes and name not in taken]
        if row["layer"] not in nodes and free:
            row["onnx_nodes"] = free[:1]  # a sum of two convolutions is fused into one of them
            taken.add(free[0])
    return rows


def _writers(model: onnx.ModelProto) -> dict[str, list[str]]:
    """Value -> the GEMM nodes that write it, with the operators fused into them."""
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    found: dict[str, list[str]] = {}
    for number, node in enumerate(model.graph.node):
        value = node.output[0] if node.op_type in GEMM_OPS and node.output else ""
        while value:
            found.setdefault(value, []).append(node.name or f"{node.op_type}_{number}")
            after = readers.get(value, [])
            value = after[0].output[0] if len(after) == 1 and after[0].op_type in FUSED_AFTER else ""
    return found


def _is_kernel(event: object) -> bool:
    if not isinstance(event, dict) or event.get("cat") != "Node" or not isinstance(event.get("args"), dict):
        return False
    return str(event.get("name", "")).endswith(_SUFFIX)


def _type(arguments: _Arguments) -> str:
    name = next((name for shape in arguments.input_type_shape[:1] for name in shape), "")
    return _TYPES.get(name, FORMATS.get(name.upper(), name or "unknown"))
