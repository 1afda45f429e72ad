"""torch -> canonical NVFP4 ONNX -> lowered graph -> engine, and the ledger of what runs in which precision.

Names are imported when they are first used, so that reading a ledger does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4deploy.export.engine import BuildResult, build_engine
    from fp4deploy.export.graph import export_graph
    from fp4deploy.export.ledger import Ledger, load_ledger
    from fp4deploy.export.onnx_file import ExportResult, export_onnx, read_onnx
    from fp4deploy.export.onnx_layers import OnnxLayer, describe_onnx, inspect_onnx
    from fp4deploy.export.portable import to_portable

_HOMES = {
    "BuildResult": "engine",
    "build_engine": "engine",
    "export_graph": "graph",
    "Ledger": "ledger",
    "load_ledger": "ledger",
    "ExportResult": "onnx_file",
    "export_onnx": "onnx_file",
    "read_onnx": "onnx_file",
    "OnnxLayer": "onnx_layers",
    "describe_onnx": "onnx_layers",
    "inspect_onnx": "onnx_layers",
    "to_portable": "portable",
}

__all__ = [
    "BuildResult",
    "ExportResult",
    "Ledger",
    "OnnxLayer",
    "build_engine",
    "describe_onnx",
    "export_graph",
    "export_onnx",
    "inspect_onnx",
    "load_ledger",
    "read_onnx",
    "to_portable",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
