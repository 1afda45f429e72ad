"""A stand-in for `tensorrt.plugin` that is as strict as the real module is about what it is given.

What the real module checks was learnt from its sources (bindings 10.13 and 11.4), and `test_tensorrt_plugins` runs the
same tests against those where they are at hand. Checked here:

* `register`: parameters by keyword, each annotated, no defaults; tensors first, then attributes, which are
  `numpy.typing.NDArray[T]` or plain types; the result is a TensorDesc or a tuple of them; names are taken once.
* `autotune`, `aot_impl`: the same names in the same order, then `outputs` (and `tactic`); annotations, where there are
  any, are those of `register`; `aot_impl` says that it returns name, PTX, parameters of the launch and integers.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing

from tests.plugins.tensorrt.tensorrt_native import DataType, DimensionOperation, ExprBuilder, Extent, TensorFormat

RESERVED = ("outputs", "stream", "tactic")
_builder = ExprBuilder()


class SymInt32:
    """A symbolic integer; `fake` where shapes are not known, and only types are asked for."""

    def __init__(self, value: Any = None, fake: bool = False) -> None:
        if isinstance(value, SymInt32):
            value, fake = value.expr, value.fake
        assert not isinstance(value, bool | float | np.generic), f"{value!r} is neither an int nor an expression"
        self.expr: Any = _builder.constant(value) if isinstance(value, int) else value
        self.fake = fake
        assert fake or isinstance(self.expr, Extent), f"{value!r} is neither an int nor an expression"

    def combine(self, kind: DimensionOperation, other: Any) -> SymInt32:
        if self.fake or (isinstance(other, SymInt32) and other.fake):
            return type(self)(fake=True)
        return type(self)(_builder.operation(kind, self.expr, SymInt32(other).expr))

    def __add__(self, other: Any) -> SymInt32:
        return self.combine(DimensionOperation.SUM, other)

    def __sub__(self, other: Any) -> SymInt32:
        return self.combine(DimensionOperation.SUB, other)

    def __mul__(self, other: Any) -> SymInt32:
        return self.combine(DimensionOperation.PROD, other)

    def __floordiv__(self, other: Any) -> SymInt32:
        return self.combine(DimensionOperation.FLOOR_DIV, other)

    def __bool__(self) -> bool:
        raise RuntimeError("a symbolic expression has no truth value")

    __eq__ = None  # type: ignore[assignment]  # an expression too; nothing here may ask
    __hash__ = None  # type: ignore[assignment]


class TensorDesc:
    """A tensor: its symbolic shape and its type."""

    def __init__(self, shape_expr: Any, dtype: DataType) -> None:
        self.shape_expr = [size if isinstance(size, SymInt32) else SymInt32(size) for size in shape_expr]
        self.dtype = dtype


class SymIntExprs:
    """A list of integers of a fixed length."""

    def __init__(self, length: int) -> None:
        self.values: list[SymInt32 | None] = [None] * length

    def __setitem__(self, index: int, value: Any) -> None:
        assert isinstance(value, SymInt32), "only 32-bit integers reach a kernel"
        self.values[index] = value

    def __len__(self) -> int:
        return len(self.values)


class KernelLaunchParams:
    """Grid, block and shared memory."""

    NAMES = ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared_mem")

    def __init__(self) -> None:
        for name in self.NAMES:
            setattr(self, name, 0 if name == "shared_mem" else 1)

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.NAMES:
            raise AttributeError(name)
        self.__dict__[name] = SymInt32(value)


class AutoTuneCombination:
    """Types and layouts of all inputs and outputs, and tactics."""

    def __init__(self, io_types: str, layouts: str, tactics: list[int]) -> None:
        self.types = [_type(text.strip()) for text in io_types.split(",")]
        self.layouts = [TensorFormat[text.strip()] for text in layouts.split(",")]
        assert all(isinstance(tactic, int) and tactic > 0 for tactic in tactics), "tactics are positive"
        assert len(self.layouts) in (1, len(self.types))
        self.tactics = tactics


def _type(text: str) -> DataType:
    return DataType[{"FP32": "FLOAT", "FP16": "HALF"}.get(text, text)]


def cdiv(first: Any, second: Any) -> SymInt32:
    if isinstance(first, int) and isinstance(second, int):
        raise ValueError("one of the two has to be symbolic")
    return SymInt32(first).combine(DimensionOperation.CEIL_DIV, second)


def from_shape_expr(shape_expr: Any, dtype: DataType) -> TensorDesc:
    assert isinstance(shape_expr, tuple)
    return TensorDesc(shape_expr, dtype)


def module() -> ModuleType:
    """A module `tensorrt.plugin` in which nothing is registered."""
    found: Any = ModuleType("tensorrt.plugin")
    found.definitions = {}
    for each in (SymInt32, TensorDesc, SymIntExprs, KernelLaunchParams, AutoTuneCombination, cdiv, from_shape_expr):
        setattr(found, each.__name__, each)

    def register(plugin_id: str, lazy_register: bool = False) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            namespace, name = plugin_id.split("::")
            assert "." not in namespace + name
            assert namespace not in ("", "trt", "tensorrt", "std")
            if plugin_id in found.definitions:
                raise ValueError(f"there is a definition of {plugin_id} already")
            found.definitions[plugin_id] = _Definition(function)
            return function

        return decorate

    def add(kind: str) -> Callable[[str], Callable[[Any], Any]]:
        def named(plugin_id: str) -> Callable[[Any], Any]:
            return lambda function: found.definitions[plugin_id].add(kind, function)

        return named

    found.register, found.autotune, found.aot_impl = register, add("autotune"), add("aot_impl")
    return found


class _Definition:
    """What is registered of one plugin."""

    def __init__(self, function: Any) -> None:
        self.register = function
        self.tensors: list[str] = []
        self.attributes: dict[str, Any] = {}
        signature = inspect.signature(function)
        for name, parameter in signature.parameters.items():
            assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY), name
            assert parameter.default is parameter.empty, f"{name} has a default"
            assert parameter.annotation is not parameter.empty, f"{name} has no annotation"
            if parameter.annotation is TensorDesc:
                assert not self.attributes, "tensors come before attributes"
                self.tensors.append(name)
            else:
                assert name not in RESERVED, name
                assert _attribute(parameter.annotation), f"{name}: {parameter.annotation} is no type of an attribute"
                self.attributes[name] = parameter.annotation
        assert self.tensors
        result = signature.return_annotation
        self.outputs = 1 if result is TensorDesc else len(_tuple_of(result, TensorDesc))

    def add(self, kind: str, function: Any) -> Any:
        signature = inspect.signature(function)
        tail = ["outputs", "tactic"] if kind == "aot_impl" else ["outputs"]
        parameters = signature.parameters
        assert list(parameters) == [*self.tensors, *self.attributes, *tail], f"{kind}: {list(parameters)}"
        for name, parameter in parameters.items():
            if parameter.annotation is parameter.empty:
                continue
            if name == "outputs":
                assert len(_tuple_of(parameter.annotation, TensorDesc)) == self.outputs
            elif name == "tactic":
                assert parameter.annotation is int
            else:
                assert parameter.annotation == self.attributes.get(name, TensorDesc), name
        returned = signature.return_annotation
        if kind == "autotune":
            assert typing.get_origin(returned) is list
            assert typing.get_args(returned) == (AutoTuneCombination,)
        else:
            assert _tuple_of(returned) in (
                (bytes, bytes, KernelLaunchParams, SymIntExprs),
                (str, str, KernelLaunchParams, SymIntExprs),
            )
        setattr(self, kind, function)
        return function


def _tuple_of(annotation: Any, kind: Any = None) -> tuple[Any, ...]:
    assert typing.get_origin(annotation) is tuple, annotation
    found = typing.get_args(annotation)
    assert kind is None or all(each is kind for each in found), annotation
    return found


def _attribute(annotation: Any) -> bool:
    if annotation in (int, float, bytes, bool, str):
        return True
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is np.typing.NDArray:  # an alias of its own in newer versions of numpy
        (element,) = arguments
    elif origin is np.ndarray:
        (element,) = typing.get_args(arguments[1])
    else:
        return False
    return element in (np.int8, np.int16, np.int32, np.int64, np.float16, np.float32, np.float64, bool, np.bool_)
