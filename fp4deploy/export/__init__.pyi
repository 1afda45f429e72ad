from .engine.build import BuildResult, build_engine
from .ledger.ledger import Ledger, load_ledger
from .onnx.canonical import read_onnx
from .onnx.decomposed import to_portable
from .onnx.graph import export_graph
from .onnx.layers import OnnxLayer, describe_onnx, inspect_onnx
from .to_onnx import ExportResult, export_checkpoint, export_onnx

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
