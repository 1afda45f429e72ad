"""torch -> canonical NVFP4 ONNX -> lowered graph -> engine, and the ledger of what runs in which precision.

| package | input -> output |
|---|---|
| `to_onnx` | checkpoint -> verified .onnx files |
| `to_packed` | checkpoint -> verified .fp4 file |
| `onnx` | torch module -> canonical graph -> decomposed graph |
| `verify` | exported graph and torch -> agreement |
| `lowering` | canonical graph -> graph for one compiler, planned precision |
| `engine` | lowered graph -> plan |
| `ledger` | planned precision and list of kernels -> actual precision |

Names are imported when they are first used, so that reading a ledger does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fp4deploy.export.engine.build import BuildResult, build_engine
    from fp4deploy.export.ledger.ledger import Ledger, load_ledger
    from fp4deploy.export.onnx.canonical import read_onnx
    from fp4deploy.export.onnx.decomposed import to_portable
    from fp4deploy.export.onnx.graph import export_graph
    from fp4deploy.export.onnx.layers import OnnxLayer, describe_onnx, inspect_onnx
    from fp4deploy.export.to_onnx import ExportResult, export_checkpoint, export_onnx

_HOMES = {
    "BuildResult": "engine.build",
    "build_engine": "engine.build",
    "export_graph": "onnx.graph",
    "Ledger": "ledger.ledger",
    "load_ledger": "ledger.ledger",
    "ExportResult": "to_onnx",
    "export_checkpoint": "to_onnx",
    "export_onnx": "to_onnx",
    "read_onnx": "onnx.canonical",
    "OnnxLayer": "onnx.layers",
    "describe_onnx": "onnx.layers",
    "inspect_onnx": "onnx.layers",
    "to_portable": "onnx.decomposed",
}

__all__ = [
    "BuildResult",
    "ExportResult",
    "Ledger",
    "OnnxLayer",
    "build_engine",
    "describe_onnx",
    "export_checkpoint",
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
