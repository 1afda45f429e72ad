"""Elementary operators in the place of whole ones, right before inductor generates kernels.

    patches = {"post_grad_custom_pre_pass": Expand({torch.ops.fp4deploy.nvfp4_values.default: values}, values_module)}

Elementary operators, forty for a quantiser, are what a compiler fuses. But a network of fifty quantisers is traced
several times before kernels are generated, and with them that takes longer than generating them. A whole operator is
one node for as long; what it stands for is traced once for operands of equal shape, strides and dtype. Arguments that
are no tensors come last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch.fx.experimental.proxy_tensor import make_fx

Expansions = Mapping[Any, Callable[..., Any]]


class Expand(CustomGraphPass):
    """A pass after differentiation; inductor caches what it compiles by the source of what operators stand for.

    expansions: operator -> the function in elementary operators. sources: the modules that hold these functions.
    """

    def __init__(self, expansions: Expansions, *sources: ModuleType) -> None:
        self.expansions = expansions
        self.files = (__file__, *(str(module.__file__) for module in sources))

    def __call__(self, graph: fx.Graph) -> None:
        expand(graph, self.expansions)

    def uuid(self) -> object:
        return get_hash_for_files(self.files)


def expand(graph: fx.Graph, expansions: Expansions) -> None:
    """Replace every operator of `expansions` in a graph of aten operators."""
    traced: dict[Any, fx.GraphModule] = {}
    for node in list(graph.nodes):
        function = expansions.get(node.target) if node.op == "call_function" else None
        if function is None:
            continue
        tensors = [each for each in node.args if isinstance(each, fx.Node)]
        values = [each.meta["val"] for each in tensors]
        rest = tuple(each for each in node.args if not isinstance(each, fx.Node))
        key = (node.target, str(rest), *((tuple(v.shape), v.stride(), v.dtype) for v in values))
        if key not in traced:
            traced[key] = _trace(function, values, rest)
        _inline(graph, node, tensors, traced[key])


def _trace(function: Callable[..., object], values: list[torch.Tensor], rest: tuple[object, ...]) -> fx.GraphModule:
    """The graph of a function of tensors, followed by arguments that are none."""
    from torch._inductor.decomposition import select_decomp_table

    mode: Any = getattr(values[0], "fake_mode", None)
    with mode, torch.no_grad():
        found: fx.GraphModule = make_fx(lambda *xs: function(*xs, *rest), decomposition_table=select_decomp_table())(
            *values
        )
    return found


def _inline(graph: fx.Graph, node: fx.Node, tensors: list[fx.Node], module: fx.GraphModule) -> None:
    known: dict[fx.Node, Any] = {}
    inputs = iter(tensors)
    with graph.inserting_before(node):
        for each in module.graph.nodes:
            if each.op == "placeholder":
                known[each] = next(inputs)
            elif each.op == "output":
                results = fx.node.map_arg(each.args[0], known.__getitem__)
            else:
                assert each.op == "call_function"
                known[each] = graph.node_copy(each, known.__getitem__)
                known[each].meta = dict(each.meta)
    if isinstance(results, (tuple, list)):
        for user in list(node.users):
            place = user.args[1]  # of `getitem`
            assert isinstance(place, int)
            user.replace_all_uses_with(results[place])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    graph.erase_node(node)
