"""What a plugin hands to TensorRT for one node: asked for as TensorRT asks, from the stand-in or from the real module.

The first extent of every image is the batch, which has a name and no value while the engine is built; grid and integers
are expressions of it, and `Offer.launch` evaluates them as TensorRT does when the engine runs.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from fp4deploy.plugins.tensorrt import PLUGINS, Plugin, register_plugins
from fp4deploy.plugins.tensorrt.kernels import Compile, compile_plugin
from tests.plugins.tensorrt import tensorrt_plugin
from tests.plugins.tensorrt.tensorrt_native import (
    DataType,
    DynamicDescriptor,
    ExprBuilder,
    TensorFormat,
    extent,
    native_module,
)

Size = int | str
TYPES = {"FP16": DataType.HALF, "FP32": DataType.FLOAT, "INT8": DataType.INT8}


@dataclass(frozen=True)
class Offer:
    """Kernel and launch of one node and one tactic; expressions are `Extent`s."""

    name: bytes
    ptx: bytes
    grid: tuple[Any, ...]
    block: tuple[Any, ...]
    shared: Any
    integers: tuple[Any, ...]
    shapes: tuple[tuple[Any, ...], ...]
    types: tuple[DataType, ...]
    tactics: tuple[int, ...]
    combination: tuple[DataType, ...]

    def launch(self, **environment: int) -> Launched:
        """Everything as numbers, for images of a batch."""

        def at(values: Sequence[Any]) -> tuple[int, ...]:
            return tuple(int(value.at(environment)) for value in values)

        shapes = tuple(at(shape) for shape in self.shapes)
        (shared,) = at((self.shared,))
        return Launched(at(self.grid), at(self.block), shared, at(self.integers), shapes)


@dataclass(frozen=True)
class Launched:
    """An `Offer` for shapes that are known."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    integers: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]


Ask = Callable[[Plugin, Sequence[Sequence[Size]], dict[str, list[int]], int], Offer]


def symbolic(plugin: Plugin, shapes: Sequence[Sequence[int]]) -> list[tuple[Size, ...]]:
    """Shapes of inputs with a batch that is not known: the first extent of each image and its block scales."""
    images = ("x", "x_scales", "x2", "x2_scales")
    return [
        ("batch", *shape[1:]) if name in images else tuple(shape)
        for name, shape in zip(plugin.inputs, shapes, strict=True)
    ]


def stand_in(arch: str, compile_kernel: Compile = compile_plugin) -> Ask:
    """Register with the stand-in; returns what asks it."""
    trtp: Any = tensorrt_plugin.module()
    register_plugins(native_module(), trtp, arch, compile_kernel)

    def ask(plugin: Plugin, shapes: Sequence[Sequence[Size]], attributes: dict[str, list[int]], tactic: int) -> Offer:
        definition = trtp.definitions[plugin.identifier]
        arrays = {name: np.array(value, np.int32) for name, value in attributes.items()}
        types = [TYPES[kind] for kind in plugin.types()]
        ranks = [[tensorrt_plugin.SymInt32(fake=True) for _ in shape] for shape in shapes]
        unknown = [trtp.TensorDesc(rank, kind) for rank, kind in zip(ranks, types, strict=False)]
        kinds = tuple(each.dtype for each in _list(definition.register(*unknown, **arrays)))
        inputs = [
            trtp.TensorDesc([extent(size) for size in shape], kind) for shape, kind in zip(shapes, types, strict=False)
        ]
        outputs = _list(definition.register(*inputs, **arrays))
        (combination,) = definition.autotune(*inputs, *arrays.values(), outputs)
        found = definition.aot_impl(*inputs, *arrays.values(), outputs, tactic)
        name, ptx, launch, integers = found
        assert isinstance(name, bytes)
        assert isinstance(ptx, bytes)
        return Offer(
            name,
            ptx,
            tuple(getattr(launch, f"grid_{axis}").expr for axis in "xyz"),
            tuple(getattr(launch, f"block_{axis}").expr for axis in "xyz"),
            launch.shared_mem.expr,
            tuple(value.expr for value in integers.values),
            tuple(tuple(size.expr for size in each.shape_expr) for each in outputs),
            kinds,
            tuple(combination.tactics),
            tuple(combination.types),
        )

    return ask


def _list(found: Any) -> list[Any]:
    return list(found) if isinstance(found, tuple) else [found]


def real_sources() -> Path | None:
    """The folder of TensorRT's own `plugin` package; its native library is not needed."""
    named = os.environ.get("FP4DEPLOY_TENSORRT_PLUGIN")
    if named:
        return Path(named)
    for package in ("tensorrt_bindings", "tensorrt", "tensorrt_lean_bindings"):
        found = importlib.util.find_spec(package)
        folder = Path(found.origin).parent / "plugin" if found is not None and found.origin else None
        if folder is not None and folder.is_dir():
            return folder
    return None


@contextmanager
def real(arch: str, compile_kernel: Compile = compile_plugin, native: Any = None) -> Iterator[Ask]:
    """Register with TensorRT's own Python sources, over `native` or the stand-in for its native part."""
    with own_package(native if native is not None else native_module()) as (native, trtp):
        register_plugins(native, trtp, arch, compile_kernel)
        yield lambda *question: _ask_real(native, *question)


@contextmanager
def own_package(native: Any) -> Iterator[tuple[Any, Any]]:
    """TensorRT's own Python sources of `tensorrt.plugin`, over a native module; nothing stays registered after it."""
    folder = real_sources()
    if folder is None:
        pytest.skip("TensorRT's bindings are not installed, and FP4DEPLOY_TENSORRT_PLUGIN names no folder of them")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in sys.modules if name.partition(".")[0] == "tensorrt"]:
            patch.delitem(sys.modules, name)
        native.__spec__ = importlib.util.spec_from_loader("tensorrt", None)  # others look for it while this is imported
        patch.setitem(sys.modules, "tensorrt", native)
        spec = importlib.util.spec_from_file_location(
            "tensorrt.plugin", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        trtp = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "tensorrt.plugin", trtp)
        native.plugin = trtp
        spec.loader.exec_module(trtp)
        try:
            yield native, trtp
        finally:
            registry = native.get_plugin_registry()
            for plugin in PLUGINS.values():
                creator = registry.get_creator(plugin.name, "1", "fp4deploy")
                if creator is not None:
                    registry.deregister_creator(creator)
            for name in [name for name in sys.modules if name.startswith("tensorrt.plugin.")]:
                del sys.modules[name]


def create(native: Any, plugin: Plugin, attributes: dict[str, list[int]], request: str = "STRICT_AOT") -> Any:
    """A plugin made by its creator from fields, as the ONNX parser does."""
    creator = native.get_plugin_registry().get_creator(plugin.name, "1", "fp4deploy")
    assert [field.name for field in creator.field_names] == list(plugin.attributes)  # the parser's order
    kind = native.PluginFieldType.INT32
    fields = [native.PluginField(name, np.array(value, np.int32), kind) for name, value in attributes.items()]
    collection, phase = native.PluginFieldCollection(fields), native.TensorRTPhase.BUILD
    asked = getattr(native.QuickPluginCreationRequest, request)
    return creator.create_plugin(plugin.name, "fp4deploy", collection, phase, asked)


def _ask_real(
    native: Any, plugin: Plugin, shapes: Sequence[Sequence[Size]], attributes: dict[str, list[int]], tactic: int
) -> Offer:
    """The calls that TensorRT makes, from the ONNX parser to the kernel."""
    made: Any = create(native, plugin, attributes)
    count = len(plugin.inputs)
    types = [getattr(native.DataType, TYPES[kind].name) for kind in plugin.types()]
    kinds = made.get_output_data_types(types[:count], [len(shape) for shape in shapes])
    builder = ExprBuilder()
    inputs = [[extent(size) for size in shape] for shape in shapes]
    outputs = made.get_output_shapes(inputs, [], builder)
    known = [tuple(-1 if isinstance(size, str) else size for size in shape) for shape in shapes]
    known += [tuple(size.at({"batch": 1}) for size in shape) for shape in outputs]
    tensors = [DynamicDescriptor(shape, kind, TensorFormat.LINEAR) for shape, kind in zip(known, types, strict=True)]
    supported = made.get_supported_format_combinations(tensors, count)
    assert all(each.format is TensorFormat.LINEAR for each in supported)
    made.configure_plugin(tensors[:count], tensors[count:])
    tactics = made.get_valid_tactics()
    made.set_tactic(tactic)
    launch, integers = SimpleNamespace(), _Setter()
    made.get_launch_params(inputs, tensors, count, launch, integers, builder)
    assert all(value.dtype == native.PluginArgDataType.INT32 for value in integers.values())
    name, ptx = made.get_kernel([each.desc for each in tensors[:count]], [each.desc for each in tensors[count:]])
    return Offer(
        name,
        ptx,
        tuple(getattr(launch, f"grid_{axis}").expr for axis in "xyz"),
        tuple(getattr(launch, f"block_{axis}").expr for axis in "xyz"),
        launch.shared_mem.expr,
        tuple(integers[position].expr for position in range(integers.nbSymExprs)),
        tuple(tuple(shape) for shape in outputs),
        tuple(DataType[kind.name] for kind in kinds),
        tuple(sorted(tactics)),
        tuple(DataType[each.type.name] for each in supported),
    )


class _Setter(dict[int, Any]):
    """Takes the integers, as `ISymExprs` does."""

    nbSymExprs = 0


assert set(TYPES) == {kind for plugin in PLUGINS.values() for kind in plugin.types()}
