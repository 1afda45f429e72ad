"""Layer information of a TensorRT engine, as its inspector or `trtexec --exportLayerInfo` writes it in JSON.

    {"Layers": [{"Name", "LayerType", "Inputs": [{"Name", "Dimensions", "Format/Datatype"}], "Constants", "Outputs",
                 "TacticName", "Metadata": "[ONNX Layer: a]\\x1f[ONNX Layer: b]"}, ...], "Bindings": [...]}

"Format/Datatype" is a data type ("Half", "FP8E4M3") or a sentence that ends in one ("Row major linear FP16 format").
Engines built with less than detailed verbosity list only names, which tell nothing about precision.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.export.ledger.build_log import MULTIPLYING, PRECISIONS

_TYPES = re.compile(
    r"FP4E2M1|FP4|FP8E4M3|FP8|BFloat16|BF16|Half|FP16|Float|FP32|Int8|INT8|Int4|INT4|TF32", re.IGNORECASE
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_NAMES = {
    **{name.lower(): label for name, label in PRECISIONS.items()},
    **{label.lower(): label for label in ("FP4", "FP8", "FP16", "BF16", "FP32", "INT8", "INT4", "TF32")},
}
_WIDTH = ("FP4", "INT4", "FP8", "INT8", "FP16", "BF16", "TF32", "FP32")


def is_engine_info(document: Any) -> bool:
    """Whether a JSON document is layer information."""
    return isinstance(document, dict) and isinstance(document.get("Layers"), list)


def engine_rows(document: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Layers that multiply: name, operator, precision of the operands, kernel and the ONNX nodes it came from.

    Raises:
        InputError: the engine was not built with detailed profiling verbosity.
    """
    layers = document["Layers"]
    if not layers or not all(isinstance(layer, dict) for layer in layers):
        raise InputError(
            f"{path} lists the names of layers alone. Build the engine with profilingVerbosity=detailed "
            "(trtexec --profilingVerbosity=detailed), and export its layer information again."
        )
    rows = []
    for layer in layers:
        kind = str(layer.get("LayerType", ""))
        if not _multiplies(kind, str(layer.get("TacticName", ""))):
            continue
        operands = [_precision(each) for part in ("Inputs", "Constants") for each in _tensors(layer, part)]
        found = [operand for operand in operands if operand]
        rows.append(
            {
                "layer": str(layer.get("Name", "")),
                "operator": kind,
                "runs": min(found, key=_WIDTH.index) if found else "unknown",
                "operands": ", ".join(dict.fromkeys(found)),
                "kernel": str(layer.get("TacticName", "")),
                "onnx_nodes": _NODE.findall(str(layer.get("Metadata", ""))),
            }
        )
    return rows


def _multiplies(kind: str, tactic: str) -> bool:
    lowered = kind.lower()
    return (
        lowered in MULTIPLYING
        or any(word in lowered for word in ("conv", "gemm", "matrix"))
        or "gemm" in tactic.lower()
    )


def _tensors(layer: dict[str, Any], part: str) -> list[dict[str, Any]]:
    tensors = layer.get(part)
    return [each for each in tensors if isinstance(each, dict)] if isinstance(tensors, list) else []


def _precision(tensor: dict[str, Any]) -> str:
    text = str(tensor.get("Format/Datatype") or tensor.get("Datatype") or "")
    found = _TYPES.findall(text)
    return _NAMES.get(found[-1].lower(), "") if found else ""
