"""Registering the plugins with TensorRT: three functions for each, generated from the definitions.

    register    shapes and types of the outputs
    autotune    all tensors LINEAR, types as defined, tiles as tactics that TensorRT times
    aot_impl    kernel name, PTX, grid and block, integers; TensorRT stores them in the engine

TensorRT reads a function's *signature* (`inspect.signature`) to learn a plugin's tensors and attributes, so each
generated function gets a signature of its own. TensorRT checks that the names agree in all three, in order, that
annotations are its own classes, and that attributes are typed. It calls `register` with attributes by name and the
other two by position. `aot_impl` must name every attribute, because it is called with all of them.

An exception in `aot_impl` would pass through native code. Only compilation can fail there, so that the engine builder
compiles the kernels first (`kernels.node_kernels`); `aot_impl` then reads them from the cache.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fp4deploy.errors import UnavailableError
from fp4deploy.plugins.aot.store import supported
from fp4deploy.plugins.tensorrt.definitions import PLUGINS, Attributes, Plugin
from fp4deploy.plugins.tensorrt.kernels import (
    Compile,
    compile_plugin,
    grid,
    integers,
    plugin_launch,
    tactics,
)

NEEDED = ("register", "autotune", "aot_impl", "KernelLaunchParams", "SymIntExprs")
INTEGERS = npt.NDArray[np.int32]
_TYPES = {"FP16": "HALF", "FP32": "FLOAT", "INT8": "INT8"}


def register_plugins(trt: object, trtp: object, arch: str, compile_kernel: Compile = compile_plugin) -> None:
    """Register every plugin, once a process.

    Args:
        trt: the module `tensorrt`.
        trtp: the module `tensorrt.plugin`.
        arch: the GPU present, which the kernels are compiled for; such as "sm100".
        compile_kernel: compiles a kernel.

    Raises:
        InputError: there are no kernels for this architecture.
        UnavailableError: this TensorRT has no ahead-of-time plugins.
    """
    supported(arch)
    missing = [name for name in NEEDED if not hasattr(trtp, name)]
    if missing:
        raise UnavailableError(
            f"TensorRT {getattr(trt, '__version__', '')} has no ahead-of-time plugins (tensorrt.plugin lacks "
            f"{', '.join(missing)}). Install a newer one: pip install --upgrade tensorrt"
        )
    compile_once = lru_cache(maxsize=None)(compile_kernel)
    for plugin in PLUGINS.values():
        _register(trt, trtp, plugin, arch, compile_once)


def _register(trt: Any, trtp: Any, plugin: Plugin, arch: str, compile_kernel: Compile) -> None:
    inputs, tiles = len(plugin.inputs), tactics(plugin, arch)
    types = plugin.types()

    def describe(*tensors: Any, **attributes: Any) -> Any:
        shapes = [tensor.shape_expr for tensor in tensors]
        computed = plugin.output_shapes(shapes, _plain(plugin, [attributes[name] for name in plugin.attributes]))
        kinds = [getattr(trt.DataType, _TYPES[kind]) for kind in types[inputs:]]
        found = tuple(trtp.from_shape_expr(shape, kind) for shape, kind in zip(computed, kinds, strict=True))
        return found if len(found) > 1 else found[0]

    def tune(*arguments: Any) -> Any:
        numbers = list(range(1, len(tiles) + 1))
        return [trtp.AutoTuneCombination(", ".join(types), "LINEAR", numbers)]

    def implement(*arguments: Any) -> Any:
        tensors, values = arguments[:inputs], arguments[inputs:-2]
        tactic = arguments[-1]
        tile = tiles[tactic - 1] if 1 <= tactic <= len(tiles) else tiles[0]
        attributes = _plain(plugin, values)
        shapes = [tensor.shape_expr for tensor in tensors]
        kernel = compile_kernel(plugin_launch(plugin, attributes, tile, arch), arch)
        launch = trtp.KernelLaunchParams()
        launch.grid_x, launch.grid_y = grid(plugin, shapes, attributes, tile, trtp.cdiv)
        launch.block_x = kernel.threads
        launch.shared_mem = kernel.shared
        numbers = integers(plugin, shapes, attributes)
        extra = trtp.SymIntExprs(len(numbers))
        for position, number in enumerate(numbers):
            extra[position] = trtp.SymInt32(number)
        return kernel.name.encode(), kernel.ptx.encode(), launch, extra

    tensor = trtp.TensorDesc
    results: Any = tuple.__class_getitem__(tuple(tensor for _ in plugin.outputs))
    fields = [*((name, tensor) for name in plugin.inputs), *((name, INTEGERS) for name in plugin.attributes)]
    outputs = ("outputs", results)
    returned = tuple[bytes, bytes, trtp.KernelLaunchParams, trtp.SymIntExprs]
    trtp.register(plugin.identifier)(_signed(describe, fields, results if len(plugin.outputs) > 1 else tensor))
    trtp.autotune(plugin.identifier)(_signed(tune, [*fields, outputs], list[trtp.AutoTuneCombination]))
    trtp.aot_impl(plugin.identifier)(_signed(implement, [*fields, outputs, ("tactic", int)], returned))


def _signed(function: Callable[..., object], fields: list[tuple[str, object]], returned: object) -> Callable[..., Any]:
    """The function with a signature of these parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in fields]
    function.__signature__ = inspect.Signature(parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return function


def _plain(plugin: Plugin, values: Iterable[Any]) -> Attributes:
    """Attributes as lists of integers; the ONNX parser gives them in the order in which they are registered."""
    return {name: [int(item) for item in value] for name, value in zip(plugin.attributes, values, strict=True)}
