"""Names that outlive tracing: nodes and values are called after the torch modules they come from.

The node that does a leaf module's work takes the module's own name ("encoder.1.conv2"), others append their operator
("encoder.1.relu", "encoder.1.relu_2"); the output of a node has the name of the node. Engine build logs and ledgers
quote these names. A module that the network holds under several names has the first of them, which plans and
checkpoints of quantised layers use; tracing takes the one by which it was called. Tracing's own metadata goes: it holds
source paths, and the same checkpoint must give the same bytes.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping

import onnx_ir as ir
from torch import nn

from fp4deploy.export.onnx.canonical import GEMM_OPS

_SCOPES = "pkg.torch.onnx.name_scopes"


class NameAfterModules(ir.passes.InPlacePass):
    """Rename nodes, their values and initialisers; `leaves` are the names of modules without children.

    aliases: further names of a module -> the first.
    onnx-ir's `NameFixPass` makes names unique, and knows nothing of modules.
    """

    def __init__(self, leaves: Collection[str], aliases: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.leaves, self.aliases = leaves, aliases or {}

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        for value in list(graph.initializers.values()):
            module, dot, tensor = str(value.name).rpartition(".")
            if module in self.aliases and f"{self.aliases[module]}.{tensor}" not in graph.initializers:
                value.name = f"{self.aliases[module]}{dot}{tensor}"
        kept = {value.name for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
        scopes = {node: self.aliases.get(_scope(node), _scope(node)) for node in graph}
        stand_ins = _stand_ins(scopes, self.leaves)
        taken: set[str | None] = kept | set(self.leaves)
        named: set[str] = set()
        for node in graph:
            scope = scopes[node]
            if node in stand_ins:
                name = _free(scope, named if scope not in named and scope not in kept else taken)
            else:
                name = _free(f"{scope}.{node.op_type.lower()}".lstrip("."), taken)
            taken.add(name)
            named.add(name)
            node.name = name
            for index, value in enumerate(node.outputs):
                if value.name not in kept:
                    value.name = name if index == 0 else f"{name}.{index}"
        return ir.passes.PassResult(model, modified=True)


class ForgetTracing(ir.passes.InPlacePass):
    """Drop metadata and documentation of every node and value.

    onnx-ir's `ClearMetadataAndDocStringPass` leaves those of values and of the model, and torch writes both.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        graph = model.graph
        model.metadata_props.clear()
        model.doc_string = None
        graph.metadata_props.clear()
        graph.doc_string = None
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
            for value in node.outputs:
                value.metadata_props.clear()
        for value in (*graph.inputs, *graph.initializers.values()):
            value.metadata_props.clear()
        return ir.passes.PassResult(model, modified=True)


def _stand_ins(scopes: Mapping[ir.Node, str], leaves: Collection[str]) -> set[ir.Node]:
    """The nodes that stand for a leaf module: its GEMMs, else its last node (a reused module has several)."""
    nodes: dict[str, list[ir.Node]] = {}
    for node, scope in scopes.items():
        if scope in leaves:
            nodes.setdefault(scope, []).append(node)
    chosen: set[ir.Node] = set()
    for group in nodes.values():
        gemms = [node for node in group if node.op_type in GEMM_OPS]
        alike = group if len({node.op_type for node in group}) == 1 else group[-1:]
        chosen.update(gemms or alike)
    return chosen


def aliases_of(model: nn.Module) -> dict[str, str]:
    """Further names of the modules that a network holds under several -> the first.

    >>> layer = nn.Linear(2, 2)
    >>> aliases_of(nn.ModuleDict({"first": layer, "again": nn.Sequential(layer)}))
    {'again.0': 'first'}
    """
    first: dict[int, str] = {}
    named = model.named_modules(remove_duplicate=False)
    return {name: first[id(module)] for name, module in named if first.setdefault(id(module), name) != name}


def _scope(node: ir.Node) -> str:
    """Name of the innermost module a node was traced in, "" for the model itself."""
    scopes = ast.literal_eval(node.metadata_props.get(_SCOPES, "['', '']"))
    return str(scopes[-2]) if len(scopes) > 1 else ""


def _free(name: str, taken: Collection[str | None]) -> str:
    number, candidate = 1, name
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate
