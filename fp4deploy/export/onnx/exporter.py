"""torch's ONNX exporter without the work that repeats itself, two thirds of the time of a small export.

* `torch.onnx.export` parses the source of all 500 functions of its table for ATen operators in every call, and takes no
  table from its caller. Nothing of the table depends on the model, and an export without functions of its own only
  reads it: one table serves a process.
* It then decomposes what torch.export captured by its table, which traces the whole graph again. A graph whose calls
  are all in the table, none in place or the short form of a view, comes out as it went in, and is taken as it is. Of
  transposed convolutions and casts the table knows the long form.

The names are private to torch: where a version has others, it works as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from typing import Any, cast
from unittest import mock

import torch

aten = torch.ops.aten
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
CAST = aten.to.dtype
ASSERTIONS = {aten._assert_scalar.default, aten._assert_tensor_metadata.default}  # the exporter removes them


@contextmanager
def short_export() -> Iterator[None]:
    """Inside, torch's ONNX exporter reads a copy of one table for each opset and runs a graph again only if it must."""
    with ExitStack() as patches:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter import _fx_passes
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            one_table = _from_one_table(ONNXRegistry.from_torchlib)
            where_needed = _decompose_where_needed(_fx_passes.decompose_with_registry)
            patches.enter_context(mock.patch.object(ONNXRegistry, "from_torchlib", staticmethod(one_table)))
            patches.enter_context(mock.patch.object(_fx_passes, "decompose_with_registry", where_needed))
        yield


def _from_one_table(make: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: _copied(_table(make, *arguments, **options))


@cache
def _table(make: Any, *arguments: Any, **options: Any) -> Any:
    return make(*arguments, **options)


def _copied(table: Any) -> Any:
    copied = copy.copy(table)
    copied.functions = {name: list(functions) for name, functions in table.functions.items()}
    return copied


def _decompose_where_needed(decompose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def short(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        known = {functions[0].fx_target for functions in registry.functions.values() if functions}
        calls = [node for node in program.graph.nodes if node.op == "call_function"]
        transposed = [node for node in calls if node.target in TRANSPOSED]
        casts = [node for node in calls if _is_cast(node)]
        rest = {node.target for node in calls if not _is_cast(node)} - TRANSPOSED - ASSERTIONS
        if any(each not in known or _is_rewritten(each) for each in rest):
            return decompose(program, registry)
        for node in transposed:
            _as_convolution(node)
        for node in casts:
            node.target, node.args, node.kwargs = aten._to_copy.default, node.args[:1], {"dtype": node.args[1]}
        return program

    return short


def _is_cast(node: torch.fx.Node) -> bool:
    """Whether it is a cast to another type and nothing else."""
    if node.target is not CAST or len(node.args) != 2 or node.kwargs:
        return False
    return cast(torch.fx.Node, node.args[0]).meta["val"].dtype is not node.args[1]


def _is_rewritten(function: Any) -> bool:
    """Whether tracing again makes another call of it: in-place operators, and views that others are short forms of."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    views = any(each.alias_info for each in function._schema.returns)
    return function._schema.is_mutable or (views and function._can_decompose())


def _as_convolution(node: torch.fx.Node) -> None:
    """A transposed convolution as the operator that it is a short form of, which the table has."""
    weight = cast(torch.fx.Node, node.args[1])
    axes = weight.meta["val"].ndim - 2
    defaults = {"bias": None, "stride": 1, "padding": 0, "output_padding": 0, "groups": 1, "dilation": 1}
    given: dict[str, Any] = defaults | dict(zip(defaults, node.args[2:], strict=False)) | dict(node.kwargs)
    stride, padding, dilation, rest = (
        _for_each_axis(given[name], axes) for name in ("stride", "padding", "dilation", "output_padding")
    )
    node.target = aten.convolution.default
    node.args = (*node.args[:2], given["bias"], stride, padding, dilation, True, rest, given["groups"])
    node.kwargs = {}


def _for_each_axis(value: int | Sequence[int], axes: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * axes if len(values) == 1 else values
