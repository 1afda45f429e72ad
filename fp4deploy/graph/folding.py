"""What a network's code computes from its parameters alone, computed once in FP32: constants of an exported program.

    w = (self.weight - mean) * gain; F.conv2d(x, w)           a constant w, rounded to FP16 once

A network in FP16 would compute it in FP16, operator by operator and on every run. `fold_parameters` puts in the place
of such a value a constant of its type, where it is no larger than the parameters that it is made of: a position
embedding of a thousand numbers that is enlarged to each pixel stays code.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from fp4deploy.graph.ir import COMPUTED
from fp4deploy.rest import Rest

CASTS = ("to", "_to_copy", "type_as")
NARROW = (torch.float16, torch.bfloat16)


def fold_parameters(program: torch.export.ExportedProgram) -> None:
    """Replace, in place, what calls compute from parameters and buffers alone."""
    parameters = parameters_of(program)
    made_of: dict[fx.Node, frozenset[fx.Node]] = {node: frozenset({node}) for node in parameters}
    viewed = set(made_of)  # their numbers as they are, in another shape
    for node in program.graph.nodes:
        if _is_computable(node) and all(each in made_of for each in node.all_input_nodes):
            made_of[node] = frozenset().union(*(made_of[each] for each in node.all_input_nodes))
            if _is_view(node) and viewed.issuperset(node.all_input_nodes):
                viewed.add(node)
    values: dict[fx.Node, Any] = {node: _in_fp32(value) for node, value in parameters.items()}
    for node, sources in made_of.items():
        if node in viewed or made_of.keys() >= node.users.keys() or not isinstance(node.meta["val"], torch.Tensor):
            continue
        if 0 < node.meta["val"].numel() <= sum(each.meta["val"].numel() for each in sources):
            _replace(program, node, _typed(_value(node, values), node.meta["val"].dtype))
    program.graph.eliminate_dead_code()
    program.graph_module.recompile()


def parameters_of(program: torch.export.ExportedProgram) -> dict[fx.Node, torch.Tensor]:
    """Placeholder -> the parameter, buffer or constant that it stands for."""
    signature = program.graph_signature
    names: dict[str, str] = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    names |= signature.inputs_to_lifted_tensor_constants
    held = {**program.constants, **program.state_dict}
    placeholders = (node for node in program.graph.nodes if node.op == "placeholder" and node.name in names)
    return {node: held[names[node.name]].detach() for node in placeholders}


def operator_name(called: object) -> str:
    """The name of an operator of ATen, or of another library, in its schema."""
    return str(called._schema.name.partition("::")[2]) if isinstance(called, OpOverload) else ""


def _is_computable(node: fx.Node) -> bool:
    called = node.target
    if called is operator.getitem:  # one of several results: torch.std_mean
        return True
    if node.op != "call_function" or not isinstance(called, OpOverload) or called.namespace != "aten":
        return False
    return not called._schema.is_mutable and torch.Tag.nondeterministic_seeded not in called.tags


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and any(each.alias_info for each in node.target._schema.returns)


def _value(node: fx.Node, values: dict[fx.Node, Any]) -> Any:
    """What a node computes, floating point numbers in FP32."""
    if node not in values:
        for each in node.all_input_nodes:
            _value(each, values)
        arguments, named = fx.map_arg((node.args, node.kwargs), values.__getitem__)
        with torch.no_grad():
            if operator_name(node.target) in CASTS and node.meta["val"].dtype in NARROW:  # as the value is held
                values[node] = values[node.all_input_nodes[0]].float()
            else:
                values[node] = _in_fp32(node.target(*arguments, **named))  # type: ignore[operator]
    return values[node]


def _in_fp32(value: object) -> object:
    if isinstance(value, (tuple, list)):
        return type(value)(_in_fp32(each) for each in value)
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in NARROW else value


def _typed(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A constant in the type that its readers expect, or in FP32 where that would not hold it (`wide`)."""
    return value.to(dtype) if not dtype.is_floating_point or Rest("fp32", dtype).holds_tensor(value) else value


def _replace(program: torch.export.ExportedProgram, node: fx.Node, value: torch.Tensor) -> None:
    """Put a constant in the place of a node."""
    name = f"{COMPUTED}{node.name}"
    signature, graph = program.graph_signature, program.graph
    of_user = [each for each in graph.nodes if each.op == "placeholder"]
    held = [spec for spec in signature.input_specs if spec.kind is not InputKind.USER_INPUT]
    with graph.inserting_before(of_user[len(held)]):
        constant = graph.placeholder(name.replace(".", "_"))
    constant.meta = {"val": node.meta["val"].to(value.dtype)}
    node.replace_all_uses_with(constant)
    spec = InputSpec(InputKind.CONSTANT_TENSOR, TensorArgument(constant.name), name, None)
    signature.input_specs.insert(len(held), spec)
    program.constants[name] = value.contiguous()
