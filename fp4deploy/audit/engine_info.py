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

from pydantic import BaseModel, Field

from fp4deploy.errors import InputError
from fp4deploy.export.ledger.build_log import MULTIPLYING, PRECISIONS, EngineLayer, Tensor
from fp4deploy.system.schema import validated

_TYPES = re.compile(
    r"FP4E2M1|FP4|FP8E4M3|FP8|BFloat16|BF16|Half|FP16|Float|FP32|Int8|INT8|Int4|INT4|TF32", re.IGNORECASE
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_NAMES = {
    **{name.lower(): label for name, label in PRECISIONS.items()},
    **{label.lower(): label for label in ("FP4", "FP8", "FP16", "BF16", "FP32", "INT8", "INT4", "TF32")},
}
_WIDTH = ("FP4", "INT4", "FP8", "INT8", "FP16", "BF16", "TF32", "FP32")


class _Tensor(BaseModel):
    Name: str = ""
    Dimensions: list[int] = []
    format: str = Field("", alias="Format/Datatype")
    Datatype: str = ""

    def tensor(self) -> Tensor:
        """As a ledger reads it; precision "" where the name of the type is unknown."""
        found = _TYPES.findall(self.format or self.Datatype)
        return Tensor(self.Name, tuple(self.Dimensions), _NAMES.get(found[-1].lower(), "") if found else "")


class _Layer(BaseModel):
    """What is read of one layer, under the inspector's names."""

    Name: str = ""
    LayerType: str = ""
    Inputs: list[_Tensor] = []
    Constants: list[_Tensor] = []
    Outputs: list[_Tensor] = []
    TacticName: str = ""
    Metadata: str = ""


def is_engine_info(document: object) -> bool:
    """Whether a JSON document is layer information."""
    return isinstance(document, dict) and isinstance(document.get("Layers"), list)


def engine_rows(document: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Layers that multiply: name, operator, precision of the operands, kernel and the ONNX nodes it came from.

    Raises:
        InputError: the engine was not built with detailed profiling verbosity, or a field has another type.
    """
    layers = document["Layers"]
    if not layers or not all(isinstance(layer, dict) for layer in layers):
        raise InputError(
            f"{path} lists the names of layers alone. Build the engine with profilingVerbosity=detailed "
            "(trtexec --profilingVerbosity=detailed), and export its layer information again."
        )
    rows = []
    for number, entry in enumerate(layers):
        layer = validated(_Layer, entry, f"{path}: layer {number}")
        if not _multiplies(layer.LayerType, layer.TacticName):
            continue
        nodes = tuple(_NODE.findall(layer.Metadata))
        listed = (layer.Inputs, layer.Constants, layer.Outputs)
        inputs, constants, outputs = (tuple(each.tensor() for each in given) for given in listed)
        operands = EngineLayer(layer.Name, layer.LayerType, inputs, constants, outputs, nodes).operands
        known = [each.precision for each in operands if each.precision]
        rows.append(
            {
                "layer": layer.Name,
                "operator": layer.LayerType,
                "runs": max(known, key=_WIDTH.index, default="unknown"),  # the narrower operand is decoded
                "operands": ", ".join(
                    dict.fromkeys(each.precision for each in (*inputs, *constants) if each.precision)
                ),
                "kernel": layer.TacticName,
                "onnx_nodes": list(nodes),
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
