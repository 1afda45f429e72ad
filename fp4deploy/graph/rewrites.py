"""Calls of an exported program in another form, without running the network again.

`ExportedProgram.run_decompositions` traces the whole program anew, whatever it has to change, and takes longer than the
export before. Here only what changes is touched:

* `made_functional`: a call in place becomes the call that returns a new tensor, and what reads the changed one later
  reads that. Which tensors are one is known from their storage, which torch.export keeps for every value.
* `decomposed`: each call is traced alone with a table of decompositions and torch's rules for composite operators;
  calls of one operator on like tensors once.

Both say False, with a program that computes the same as before, where they cannot do it: views that are read after
their base was changed, changed inputs, control flow, regions with an autocast of their own. `run_decompositions` is for
those. Names that are private to torch may be missing in a version; then it is False, too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.experimental.proxy_tensor import make_fx

OF_THE_VALUE = ("val", "tensor_meta", "original_aten", "eager_input_vals")  # meta that a new node does not take over
Table = Mapping[Any, Callable[..., Any]]


def made_functional(program: torch.export.ExportedProgram) -> bool:
    """Replace all calls in place; False: none is left to do so safely, and the program is as it was."""
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    if any(isinstance(node.target, HigherOrderOperator) for node in order):  # calls in a graph of its own
        return False
    calls = [node for node in order if changes_in_place(node)]
    if not calls:
        return True
    groups: dict[int, list[fx.Node]] = {}
    for node in order:
        for storage in _storages(node):
            groups.setdefault(storage, []).append(node)
    new = {node: _functional(node) for node in calls}
    if None in new.values() or not all(_is_safe(node, groups[_storages(node)[0]], order) for node in calls):
        return False
    for node in calls:
        changed = cast(fx.Node, node.args[0])
        node.target, node.meta["val"] = cast("tuple[OpOverload, torch.Tensor]", new[node])
        changed.replace_all_uses_with(node, delete_user_cb=lambda user, at=order[node]: order[user] > at)  # type: ignore[misc]
        _rename_output(program, changed, node)
    program.graph_module.recompile()
    return True


def inline_regions(program: torch.export.ExportedProgram) -> None:
    """Put the calls of regions without gradients, or without autocast, into the graph around them.

    torch.export keeps such a region as one call of a graph of its own. An exported program has neither gradients nor,
    outside of regions, autocast, so that its calls mean the same without it.
    """
    for node in list(program.graph.nodes):
        body = _region(program, node)
        if body is None:
            continue
        read = node.args[-len(_placeholders(body)) :] if _placeholders(body) else ()
        of: dict[fx.Node, Any] = dict(zip(_placeholders(body), read, strict=True))
        with program.graph.inserting_before(node):
            for each in body.nodes:
                if each.op == "call_function":
                    of[each] = program.graph.node_copy(each, of.__getitem__)
        results = _result(body)
        for user in list(node.users):
            found = of[results[user.args[1]]]
            user.replace_all_uses_with(found)
            _rename_output(program, user, found)
            program.graph.erase_node(user)
        program.graph.erase_node(node)
    program.graph.eliminate_dead_code()
    program.graph_module.delete_all_unused_submodules()
    program.graph_module.recompile()


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [each for each in graph.nodes if each.op == "placeholder"]


def _region(program: torch.export.ExportedProgram, node: fx.Node) -> fx.Graph | None:
    """The graph of a region that can be inlined; None for any other node."""
    name = node.target.name() if isinstance(node.target, HigherOrderOperator) else ""
    inlined = name == "wrap_with_set_grad_enabled" or (name == "wrap_with_autocast" and node.args[2] is False)
    if not inlined or any(user.target is not operator.getitem for user in node.users):
        return None
    graphs = [each for each in node.all_input_nodes if each.op == "get_attr"]
    body = getattr(program.graph_module, str(graphs[0].target)).graph
    several = isinstance(_result(body), (list, tuple)) and all(isinstance(each, fx.Node) for each in _result(body))
    return body if several and not any(each.op == "get_attr" for each in body.nodes) else None


def changes_in_place(node: fx.Node) -> bool:
    """Whether a node is a call that changes one of its arguments."""
    return node.op == "call_function" and bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _storages(node: fx.Node) -> list[int]:
    value = node.meta.get("val")
    tensors = value if isinstance(value, (list, tuple)) else [value]
    return list(dict.fromkeys(each.untyped_storage()._cdata for each in tensors if isinstance(each, torch.Tensor)))


def _functional(node: fx.Node) -> tuple[OpOverload, torch.Tensor] | None:
    """The operator that returns what this one writes, and its result; None where there is none of the same type."""
    schema = node.target._schema  # type: ignore[union-attr]
    first, *rest = schema.arguments
    space, _, name = schema.name.partition("::")
    packet = getattr(getattr(torch.ops, space), name.removesuffix("_"), None)
    written = first.alias_info is not None and first.alias_info.is_write
    if not name.endswith("_") or not written or any(each.alias_info for each in rest) or len(schema.returns) != 1:
        return None
    if not isinstance(node.args[0] if node.args else None, fx.Node) or schema.overload_name not in _overloads(packet):
        return None
    found = getattr(packet, schema.overload_name or "default")
    own, others = ([(each.name, str(each.type)) for each in one.arguments[1:]] for one in (schema, found._schema))
    if own != others:
        return None
    arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    with torch.no_grad(), detect_fake_mode(arguments) or nullcontext():
        value = found(*arguments, **named)
    return (found, value) if value.dtype == node.meta["val"].dtype else None


def _rename_output(program: torch.export.ExportedProgram, old: fx.Node, new: fx.Node) -> None:
    """The signature names the nodes that are returned."""
    for spec in program.graph_signature.output_specs:
        argument: Any = spec.arg
        if getattr(argument, "name", None) == old.name:
            argument.name = new.name


def _overloads(packet: Any) -> set[str]:
    names = packet.overloads() if packet is not None else []
    return {"" if name == "default" else name for name in names}


def _is_safe(node: fx.Node, group: list[fx.Node], order: dict[fx.Node, int]) -> bool:
    """Whether all that reads the storage `group` after `node` reads the tensor that it changes, as a whole.

    A composite operator may return its argument and not say so in its schema, as dropout does: its result counts as a
    view.
    """
    at, base = order[node], group[0]
    whole = [base, *(each for each in group if changes_in_place(each))]
    if base.op != "call_function" or changes_in_place(base) or node.args[0] not in whole:
        return False
    views = [each for each in group if each not in whole]
    views += [user for each in whole for user in each.users if _may_return_its_argument(user)]
    return not any(order[each] < at and any(order[user] > at for user in each.users) for each in views)


def _may_return_its_argument(node: fx.Node) -> bool:
    called = node.target
    return isinstance(called, OpOverload) and not called._schema.is_mutable and called._can_decompose()


def decomposed(
    program: torch.export.ExportedProgram,
    chosen: Callable[[fx.Node], bool],
    table: Table,
    accepted: Callable[[object], bool] = lambda _: True,
) -> bool:
    """Replace the chosen calls by their decompositions; False: it cannot be done, and the program is as it was.

    Args:
        program: without calls in place.
        chosen: which nodes.
        table: decompositions by operator; composite operators that it lacks stay as they are, as in torch.export.
        accepted: of each operator of a decomposition, whether it may be in the program.
    """
    calls = [node for node in program.graph.nodes if node.op == "call_function" and chosen(node)]
    if not calls:
        return True
    found: dict[str, fx.Graph | None] = {}
    places: list[tuple[fx.Node, fx.Graph]] = []
    try:
        with _rules(table) as own:
            for node in calls:
                key = _alike(node)
                if key not in found:
                    found[key] = _traced(node, own)
                traced = found[key]
                if traced is None or not _is_placed(node, traced) or not all(map(accepted, _targets(traced))):
                    return False
                places.append((node, traced))
    except (ImportError, AttributeError):  # private names of torch
        return False
    order = {node: at for at, node in enumerate(program.graph.nodes)}
    sizes: dict[object, fx.Node] = {}
    replaced = set(calls)
    for node in order:
        if node not in replaced and isinstance(node.meta.get("val"), torch.SymInt):
            sizes.setdefault(node.meta["val"].node.expr, node)
    for node, traced in places:
        _place(program, node, traced, {size: of for size, of in sizes.items() if order[of] < order[node]})
    program.graph_module.recompile()
    return True


@contextmanager
def _rules(table: Table) -> Iterator[Table]:
    """Composite operators behave as in `run_decompositions(table)`; gives the rest of the table."""
    from torch._dispatch.python import enable_python_dispatcher
    from torch.export import exported_program as private

    composite, own = private._split_decomp_table_to_cia_and_python_decomp(dict(table))
    # Most rules of torch's table are what an operator does without one, and each costs twenty registrations.
    rules = {each: rule for each, rule in composite.items() if getattr(rule, "keywords", {}).get("kernel") is not each}
    with private._override_composite_implicit_decomp(rules), enable_python_dispatcher(), torch.no_grad():
        yield own


def _alike(node: fx.Node) -> str:
    """The same for calls that have the same decomposition."""
    numbers = {each: at for at, each in enumerate(node.all_input_nodes)}

    def described(each: fx.Node) -> tuple[int, str]:
        value = each.meta["val"]
        kind = [value.dtype, *map(str, (*value.shape, *value.stride()))] if isinstance(value, torch.Tensor) else value
        return numbers[each], str(kind)

    return str((node.target, fx.map_arg((node.args, node.kwargs), described)))


def _traced(node: fx.Node, table: Table) -> fx.Graph | None:
    """The graph of one call, whose placeholders are the nodes that it reads; None where it is no single call."""
    called, read = node.target, node.all_input_nodes
    if not isinstance(called, OpOverload):
        return None

    def call(*values: Any) -> Any:
        of = dict(zip(read, values, strict=True))
        arguments, named = fx.map_arg((node.args, node.kwargs), lambda each: of[each])
        return called(*arguments, **named)

    values = [each.meta["val"] for each in read]
    try:
        with detect_fake_mode([node.meta.get("val"), *values]) or nullcontext():  # torch.eye reads none
            traced = make_fx(call, decomposition_table=dict(table))(*values).graph
    except Exception:  # tracing the whole program works, or says what is wrong
        return None
    traced.eliminate_dead_code()
    changing = any(changes_in_place(each) for each in traced.nodes)
    return None if changing or any(each.op == "get_attr" for each in traced.nodes) else traced


def _targets(traced: fx.Graph) -> list[object]:
    return [each.target for each in traced.nodes if each.op == "call_function"]


def _result(traced: fx.Graph) -> Any:
    return traced.output_node().args[0]


def _is_placed(node: fx.Node, traced: fx.Graph) -> bool:
    """Whether `_place` knows what takes the node's place."""
    if isinstance(_result(traced), fx.Node):
        return True
    several = isinstance(_result(traced), (list, tuple))
    return several and all(user.target is operator.getitem for user in node.users)


def _place(
    program: torch.export.ExportedProgram, node: fx.Node, traced: fx.Graph, sizes: Mapping[object, fx.Node]
) -> None:
    """Put a graph into the place of a node; sizes: nodes before it that have them, as a whole trace reads each once."""
    graph = program.graph
    meta = {key: value for key, value in node.meta.items() if key not in OF_THE_VALUE}
    of = dict(zip((each for each in traced.nodes if each.op == "placeholder"), node.all_input_nodes, strict=True))
    with graph.inserting_before(node):
        for each in traced.nodes:
            size = each.meta.get("val")
            if isinstance(size, torch.SymInt) and size.node.expr in sizes:
                of[each] = sizes[size.node.expr]
            elif each.op == "call_function":
                of[each] = graph.node_copy(each, of.__getitem__)
                of[each].meta.update(meta)

    def replace(old: fx.Node, new: fx.Node) -> None:
        old.replace_all_uses_with(new)
        _rename_output(program, old, new)
        graph.erase_node(old)

    result = _result(traced)
    if isinstance(result, fx.Node):
        replace(node, of[result])
        return
    for user in list(node.users):
        replace(user, of[result[user.args[1]]])
    graph.erase_node(node)
