"""A module traced by torch's ONNX exporter (`trace`), without the two thirds of the work that repeat themselves.

* `torch.onnx.export` parses the source of all 500 functions of its table for ATen operators in every call, and takes no
  table from its caller. Nothing of the table depends on the model: copies of one serve a process.
* It then decomposes what torch.export captured by its table, which traces the whole graph again. Here the calls that
  are not in the table, in place, or the short form of a view are replaced one by one (`graph.rewrites`), and the graph
  is traced again only where that cannot be done.

Operators with numbers that FP16, or what else the graph is traced in, does not hold become FP32 in between
(`graph.wide`).

The names are private to torch: where a version has others, it works as before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, partial
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.attention import four_axes, regular_attention
from fp4deploy.export.onnx.canonical import OPSET
from fp4deploy.export.onnx.floor import TRANSLATIONS
from fp4deploy.export.onnx.mixed_types import MIXED_TYPES
from fp4deploy.export.onnx.pooling import DIVISORS
from fp4deploy.export.onnx.qdq import MARKER_DOMAIN
from fp4deploy.graph.capture import (
    argument_names,
    file_names,
    fixes_an_axis,
    output_names,
    place_of,
    quiet,
    why_not_captured,
)
from fp4deploy.graph.finite import finite
from fp4deploy.graph.fixed_axes import Specializing, specializing, watched
from fp4deploy.graph.folding import fold_parameters
from fp4deploy.graph.growth import BoundedSizes, undecided, unsettled
from fp4deploy.graph.open_axes import divided
from fp4deploy.graph.replacement import Rewriting, replaced
from fp4deploy.graph.rewrites import decomposed, inline_regions, made_functional
from fp4deploy.graph.unpooling import unpooling
from fp4deploy.graph.wide import keep_wide
from fp4deploy.rest import FP16, Rest
from fp4deploy.tracing import make_no_folder

ATTENTION_AXES = "only 4D query, key, and value are supported"  # says torch's exporter
NO_VIEW = "Cannot view a tensor"
INPUT, OUTPUT, BATCH = "image", "logits", "N"
NUMBERS = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
LITTLE = 1e-6
Examples = tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]  # positional, by name
OpenAxes = dict[str, dict[int, Any]]  # input -> open axis -> what torch.export calls it

aten = torch.ops.aten
ASSERTIONS = {aten._assert_scalar.default, aten._assert_tensor_metadata.default}  # the exporter removes them


def trace(model: nn.Module, examples: Examples, open_axes: OpenAxes, dynamic_size: bool, rest: Rest) -> ir.Model:
    positional, named = examples
    tensors = (*positional, *named.values())
    shapes: Any = open_axes if named else tuple(open_axes.values())

    make_no_folder()

    def export() -> torch.onnx.ONNXProgram:
        program = torch.onnx.export(
            model,
            positional,
            kwargs=named or None,
            dynamo=True,
            opset_version=OPSET,
            input_names=input_names(model, positional, named),
            custom_translation_table=TRANSLATIONS,
            dynamic_shapes=shapes,
            verbose=False,
            optimize=False,
        )
        assert program is not None
        return program

    bound, attention = BoundedSizes(), F.scaled_dot_product_attention
    try:
        with (
            watched() as fixed,
            quiet(),
            short_export(rest),
            bound if dynamic_size else nullcontext(),
            Rewriting(divided(), unpooling(), finite(), MIXED_TYPES, DIVISORS, {attention: regular_attention}),
        ):
            try:
                program = export()
            except Exception as error:
                causes = " ".join(map(str, _chain(error)))
                if ATTENTION_AXES not in causes and NO_VIEW not in causes:
                    raise
                again = Rewriting({attention: four_axes}) if ATTENTION_AXES in causes else reshaped_views()
                with again:
                    program = export()
            with _not_folded(program.model):
                program.optimize()
    except Exception as error:
        if isinstance(error, InputError):
            raise
        unsolved = undecided(error) if dynamic_size else None
        if ended := bound.error or unsolved:
            advice = "Export it for one image size, without --dynamic-size (dynamic_size=False)."
            raise unsettled(type(model).__name__, place_of(ended), advice, ended is not unsolved) from error
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        refused = next((each for each in _chain(error) if isinstance(each, InputError)), None)
        if refused is not None:  # by the network itself
            raise InputError(str(refused)) from error
        given = ", ".join(f"[N, {', '.join(map(str, x.shape[1:]))}]" for x in tensors)
        why = why_not_captured(model, cause, partial(specializing, model, positional, named))
        if "sizes of tensors" in why.lower():
            why += " Check the image size too (a UNet needs multiples of 16)."
        raise InputError(f"torch could not trace {type(model).__name__} with an input {given}: {why}") from error
    _require_free(
        program.model.graph,
        type(model).__name__,
        open_axes,
        fixed[-1],
        partial(specializing, model, positional, named),
    )
    _name_outputs(program)
    return program.model


def _require_free(
    graph: ir.Graph, kind: str, open_axes: OpenAxes, fixed: str, watched_again: Callable[[], Specializing]
) -> None:
    """Refuse a network that needs one size of an axis: torch's exporter fixes the axis, or not even that, in silence.

    fixed: what `fixed_axes.fixed_axis` gives of the program that was exported. watched_again: traces once more.
    """
    if fixed:
        raise InputError(fixes_an_axis(kind, fixed, watched_again()))
    for value in graph.inputs:
        assert value.shape is not None
        for axis, size in enumerate(value.shape):
            if isinstance(size, int) and axis in open_axes[str(value.name)]:
                name = f"axis {axis} of {value.name}" if axis else BATCH
                raise InputError(fixes_an_axis(kind, name, watched_again()))


def input_names(model: nn.Module, positional: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> list[str]:
    if named:
        return list(named)
    if len(positional) == 1:
        return [INPUT]
    return argument_names(model, len(positional))


def _name_outputs(program: torch.onnx.ONNXProgram) -> None:
    """ "logits" for a single output; the keys of a dict; else "output_0", "output_1.0" of a tuple in a tuple."""
    outputs = program.model.graph.outputs
    exported: Any = program.exported_program
    names = output_names(exported, len(exported.graph_signature.user_outputs))
    if len(names) != len(outputs):
        raise InputError("The module returns something that is no tensor. Return tensors, or a tuple or dict of them.")
    inputs = [str(value.name) for value in program.model.graph.inputs]
    for value, name in zip(outputs, file_names(names, inputs, OUTPUT), strict=True):
        value.name = name


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


@contextmanager
def _not_folded(model: ir.Model) -> Iterator[None]:
    """Hide from the exporter's optimizer BatchNormalization, and sums with a number that it takes for 0."""
    nodes = [node for node in model.graph if node.op_type == "BatchNormalization" or _adds_little(node)]
    for node in nodes:
        node.domain = MARKER_DOMAIN
    yield
    for node in nodes:
        node.domain = ""


def _adds_little(node: ir.Node) -> bool:
    """Whether one operand of a sum or difference is a number next to 0: onnxscript leaves out up to 1e-8."""
    tensors = [None if value is None else ir.convenience.get_const_tensor(value) for value in node.inputs]
    numbers = [float(tensor.numpy().item()) for tensor in tensors if tensor is not None and tensor.size == 1]
    return node.op_type in ("Add", "Sub") and any(0 < abs(number) < LITTLE for number in numbers)


@contextmanager
def short_export(rest: Rest = FP16) -> Iterator[None]:
    """Inside, torch's ONNX exporter reads a copy of one table for each opset and runs a graph again only if it must; in
    this thread. rest: what the graph is traced in.
    """
    with ExitStack() as stack:
        with suppress(ImportError, AttributeError):
            from torch.onnx._internal.exporter import _fx_passes
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            stack.enter_context(replaced(ONNXRegistry, "from_torchlib", lambda make: partial(_copied, make)))
            promote = replaced(_fx_passes, "insert_type_promotion_nodes", lambda insert: partial(_promoted, insert))
            stack.enter_context(promote)
            stack.enter_context(replaced(_fx_passes, "decompose_with_registry", partial(_decompose_where_needed, rest)))
        yield


@contextmanager
def reshaped_views() -> Iterator[None]:
    """Inside, views are reshapes: the exporter calls operators again, whose results may lie in memory otherwise, as
    attention's. Reshapes of ONNX take an axis of 0 elements for one that stays, so that views are kept where they can.
    """
    from torch.onnx._internal.exporter import _fx_passes

    with replaced(_fx_passes, "decompose_with_registry", _with_reshapes):
        yield


def _with_reshapes(decompose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def reshaped(program: torch.export.ExportedProgram, registry: object) -> torch.export.ExportedProgram:
        program = decompose(program, registry)
        for node in program.graph.nodes:
            if node.target is aten.view.default:
                node.target = aten.reshape.default
        program.graph_module.recompile()
        return program

    return reshaped


@cache
def _table(make: Callable[..., object], *arguments: object, **options: object) -> Any:
    return make(*arguments, **options)


def _copied(make: Callable[..., object], *arguments: object, **options: object) -> object:
    table = copy.copy(_table(make, *arguments, **options))
    table.functions = {name: list(functions) for name, functions in table.functions.items()}
    return table


def _promoted(insert: Callable[[fx.GraphModule], None], module: fx.GraphModule) -> None:
    """Insert casts to one type where calls read or give several: torch runs the whole graph again for it."""
    called = [each for each in module.graph.nodes if each.op == "call_function" and each.target not in ASSERTIONS]
    values = tree_leaves([each.meta.get("val") for node in called for each in (node, *node.all_input_nodes)])
    types = {getattr(each, "dtype", each) for each in values if not isinstance(each, NUMBERS)}
    if (types - {torch.float16} and types - {torch.float32}) or [*module.children()]:
        insert(module)


def _decompose_where_needed(rest: Rest, decompose: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def short(program: torch.export.ExportedProgram, registry: object) -> torch.export.ExportedProgram:
        inline_regions(program)
        fold_parameters(program)
        program = in_known(program, registry)
        keep_wide(program, rest)
        return program

    def in_known(program: torch.export.ExportedProgram, registry: Any) -> torch.export.ExportedProgram:
        known = frozenset(functions[0].fx_target for functions in registry.functions.values() if functions)

        def stays(called: object) -> bool:
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


def _is_rewritten(function: object) -> bool:
    """Whether tracing again makes another call of it: in-place operators, and views that others are short forms of."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    views = any(each.alias_info for each in function._schema.returns)
    return function._schema.is_mutable or (views and function._can_decompose())
