"""The native part of TensorRT, as far as plugins written in Python use it: a stand-in, and that of TensorRT Lean.

TensorRT Lean (`tensorrt-lean-cu13-bindings`, `-libs`) is TensorRT's runtime; it imports without a GPU. Real are then
the plugin registry, the classes of creators and plugins with their capability interfaces, attributes (`PluginField`),
data types and requests. `LACKED_BY_LEAN` stays a stand-in: Lean has no `TensorFormat` and no `ITensor`, and what only
the engine builder creates (`IDimensionExpr`, `ISymExpr`, `DimsExprs`) or describes with a format (`PluginTensorDesc`)
cannot be made.

Extents of tensors are expressions: constants, and the batch, which has no value before the engine runs. Asking for it
is an error here, so that whoever needs to know it while the engine is built fails.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

Environment = Mapping[str, int]

DimensionOperation = Enum("DimensionOperation", "SUM SUB PROD FLOOR_DIV CEIL_DIV MAX MIN EQUAL LESS")
DataType = Enum("DataType", "FLOAT HALF INT8 INT32 INT64 UINT8 BOOL FP8 BF16 FP4")
TensorFormat = Enum("TensorFormat", "LINEAR HWC CHW32")
Request = Enum("QuickPluginCreationRequest", "UNKNOWN PREFER_JIT PREFER_AOT STRICT_JIT STRICT_AOT")
FieldType = Enum("PluginFieldType", "INT8 INT16 INT32 INT64 FLOAT16 FLOAT32 FLOAT64 CHAR UNKNOWN")

_COMPUTE: dict[DimensionOperation, Callable[[int, int], int]] = {
    DimensionOperation.SUM: operator.add,
    DimensionOperation.SUB: operator.sub,
    DimensionOperation.PROD: operator.mul,
    DimensionOperation.FLOOR_DIV: operator.floordiv,
    DimensionOperation.CEIL_DIV: lambda a, b: -(-a // b),
    DimensionOperation.MAX: max,
    DimensionOperation.MIN: min,
    DimensionOperation.EQUAL: operator.eq,
    DimensionOperation.LESS: operator.lt,
}


class Extent:
    """TensorRT's `IDimensionExpr`: `at` gives its value for the shapes of one execution."""

    def __init__(self, at: Callable[[Environment], int], constant: bool) -> None:
        self.at, self.constant = at, constant

    def is_constant(self) -> bool:
        return self.constant

    def get_constant_value(self) -> int:
        assert self.constant, "this extent is known only when the engine runs"
        return self.at({})


class ExprBuilder:
    """TensorRT's `IExprBuilder`."""

    def constant(self, value: int) -> Extent:
        return Extent(lambda _: value, True)

    def operation(self, kind: DimensionOperation, first: Extent, second: Extent) -> Extent:
        assert isinstance(first, Extent), f"{first} is no expression"
        assert isinstance(second, Extent), f"{second} is no expression"
        compute = _COMPUTE[DimensionOperation[kind.name]]  # `kind` may be the real enumeration
        return Extent(lambda env: compute(first.at(env), second.at(env)), first.constant and second.constant)


def extent(size: int | str) -> Extent:
    """A constant, or an extent with a name."""
    return Extent(lambda env: env[size] if isinstance(size, str) else size, not isinstance(size, str))


class PluginField:
    """An attribute on its way from the ONNX parser to a plugin."""

    def __init__(self, name: str, data: Any = None, type: Any = None) -> None:
        self.name, self.data, self.type = name, data, type


class Registry:
    """Creators of plugins by name, version and namespace."""

    def __init__(self) -> None:
        self.creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, namespace: str = "") -> bool:
        self.creators[creator.name, creator.plugin_version, namespace] = creator
        return True

    def deregister_creator(self, creator: Any) -> bool:
        self.creators = {key: each for key, each in self.creators.items() if each is not creator}
        return True

    def get_creator(self, name: str, version: str, namespace: str) -> Any:
        return self.creators.get((name, version, namespace))


class Dims(tuple):
    """A shape, at most eight axes."""

    MAX_DIMS = 8


class Descriptor:
    """`PluginTensorDesc`, and under `desc` what `DynamicPluginTensorDesc` wraps around one."""

    def __init__(self) -> None:
        self.type: Any = None
        self.format: Any = None
        self.scale = 1.0
        self.dims: tuple[int, ...] = ()


class DynamicDescriptor:
    def __init__(self, dims: tuple[int, ...], type: Any, format: Any) -> None:
        self.desc = Descriptor()
        self.desc.dims, self.desc.type, self.desc.format = dims, type, format
        self.min = self.max = self.opt = dims


LACKED_BY_LEAN = (
    *("TensorFormat", "ITensor", "IDimensionExpr", "ISymExpr", "DimsExprs"),
    *("PluginTensorDesc", "DynamicPluginTensorDesc"),
)


def lean_module() -> ModuleType | None:
    """A module `tensorrt` of TensorRT Lean, with stand-ins for `LACKED_BY_LEAN`; None where Lean is not installed."""
    try:
        lean = importlib.import_module("tensorrt_lean_bindings")
    except ImportError:
        return None
    found, stand_in = ModuleType("tensorrt"), native_module()
    vars(found).update({name: value for name, value in vars(lean).items() if not name.startswith("__")})
    vars(found).update({name: getattr(stand_in, name) for name in LACKED_BY_LEAN})
    vars(found).update({"__version__": lean.__version__})
    return found


def native_module() -> ModuleType:
    """A module `tensorrt` with a registry of its own."""
    found: Any = ModuleType("tensorrt")
    registry = Registry()
    found.__version__ = "0.stand-in"
    found.get_plugin_registry = lambda: registry
    found.DataType, found.TensorFormat, found.DimensionOperation = DataType, TensorFormat, DimensionOperation
    found.QuickPluginCreationRequest, found.PluginFieldType = Request, FieldType
    found.int32, found.float32 = DataType.INT32, DataType.FLOAT
    found.IDimensionExpr, found.PluginField, found.PluginFieldCollection = Extent, PluginField, list
    found.Dims, found.DimsExprs = Dims, lambda count: [None] * count
    found.PluginTensorDesc, found.DynamicPluginTensorDesc = Descriptor, DynamicDescriptor
    found.PluginArgType = SimpleNamespace(INT="int")
    found.PluginArgDataType = SimpleNamespace(INT8="int8", INT16="int16", INT32="int32")
    found.TensorRTPhase = SimpleNamespace(BUILD="build")
    found.Logger = type("Logger", (), {"WARNING": "warning", "log": lambda *_: None})
    for name in ("IPluginV3", "IPluginV3QuickCore", "IPluginV3QuickBuild", "IPluginV3QuickRuntime"):
        setattr(found, name, type(name, (), {}))
    for name in ("IPluginV3QuickAOTBuild", "IPluginCreatorV3Quick", "ISymExpr", "ITensor"):
        setattr(found, name, type(name, (), {}))
    return found
