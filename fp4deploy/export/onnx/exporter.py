"""torch's ONNX exporter without the work that repeats itself, two thirds of the time of a small export.

* `torch.onnx.export` parses the source of all 500 functions of its table for ATen operators in every call, and takes no
  table from its caller. Nothing of the table depends on the model: copies of one serve a process.
* It then decomposes what torch.export captured by its table, which traces the whole graph again. Here the calls that
  are not in the table, in place, or the short form of a view are replaced one by one (`graph.retraced`), and the graph
  is traced again only where that cannot be done.

Operators with numbers that FP16, or what else the graph is traced in, does not hold become FP32 in between
(`graph.wide`).

The names are private to torch: where a version has others, it works as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from typing import Any

import torch

from fp4deploy.graph.folded import fold_parameters
from fp4deploy.graph.replaced import replaced
from fp4deploy.graph.retraced import decomposed, inline_regions, made_functional
from fp4deploy.graph.wide import keep_wide
from fp4deploy.rest import FP16, Rest

aten = torch.ops.aten
ASSERTIONS = {aten._assert_scalar.default, aten._assert_tensor_metadata.default}  # the exporter removes them


@contextmanager
def short_export(rest: Rest = FP16) -> Iterator[None]:
    """Inside, torch's ONNX exporter reads a copy of one table for each opset and runs a graph again only if it must; in
    this thread. rest: what the graph is traced in.
    """
    with ExitStack() as stack:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter import _fx_passes
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            stack.enter_context(replaced(ONNXRegistry, "from_torchlib", _from_one_table))
            stack.enter_context(replaced(_fx_passes, "decompose_with_registry", partial(_decompose_where_needed, rest)))
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


def _decompose_where_needed(rest: Rest, decompose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def short(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        inline_regions(program)
        fold_parameters(program)
        program = in_known(program, registry)
        keep_wide(program, rest)
        return program

    def in_known(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        known = frozenset(functions[0].fx_target for functions in registry.functions.values() if functions)

        def stays(called: Any) -> bool:
            return called in ASSERTIONS or (called in known and not _is_rewritten(called))

        unknown = any(node.op == "call_function" and not stays(node.target) for node in program.graph.nodes)
        if not unknown:
            return program
        if made_functional(program):
            table = _decompositions(known)
            if decomposed(program, lambda node: not stays(node.target), table, stays):
                return program
        return decompose(program, registry)

    return short


@cache
def _decompositions(known: frozenset[Any]) -> dict[Any, Callable[..., Any]]:
    from torch.onnx._internal.exporter import _decomp

    found: dict[Any, Callable[..., Any]] = _decomp.create_onnx_friendly_decomposition_table(set(known))
    return found


def _is_rewritten(function: Any) -> bool:
    """Whether tracing again makes another call of it: in-place operators, and views that others are short forms of."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    views = any(each.alias_info for each in function._schema.returns)
    return function._schema.is_mutable or (views and function._can_decompose())
