"""Which layers produce the outputs of a network, found without inputs: torch.fx's symbolic tracing.

    y = head(x); return {"classes": y, "depth": sigmoid(depth(x))}        "head", "depth"

Of each output it is the GEMM layer that was called last among those from which the output is reached without another
one. A network of one output is not traced further: its last layer is the one. Where tracing stops (control flow that
asks for a size or a value, an output that is no tensor), that is assumed, with a warning, unless the network names the
layers itself, in `output_layers`.

Tracing calls `forward` with stand-ins for tensors, which a module may keep as an attribute. It therefore works on
copies of the modules, without hooks; the parameters are those of the model.
"""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import lru_cache
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

HOOKS = tuple(name for name in nn.Module().__dict__ if name.endswith("_hooks"))


def output_layers(model: nn.Module, is_gemm: Callable[[nn.Module], bool]) -> tuple[str, ...]:
    """Names of the layers that produce the outputs of a network; of one output the last layer.

    >>> class Two(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.depth, self.head = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 4, 1)
    ...
    ...     def forward(self, x):
    ...         return self.head(x), self.depth(x).sigmoid()
    >>> output_layers(Two(), lambda layer: isinstance(layer, nn.Conv2d))
    ('head', 'depth')
    """
    gemms = [name for name, layer in model.named_modules() if is_gemm(layer)]
    last, named = tuple(gemms[-1:]), getattr(model, "output_layers", None)
    if len(gemms) < 2:
        return last
    if named is not None and not isinstance(named, nn.Module):
        return tuple(named) or last
    try:
        with torch.no_grad(), warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            graph = _Tracer(is_gemm).trace(_copied(model, {}).eval())
    except Exception:  # forward is anyone's code, and runs with stand-ins
        _say_assumed(type(model).__name__, gemms[-1])
        return last
    results = tree_leaves(next(node for node in graph.nodes if node.op == "output").args[0])
    outputs = [each for each in results if isinstance(each, fx.Node)]
    if len(outputs) < 2:
        return last
    modules, order = dict(model.named_modules()), {node: at for at, node in enumerate(graph.nodes)}
    found = (_behind(each, modules, is_gemm) for each in outputs)
    return tuple(dict.fromkeys(str(max(nodes, key=order.__getitem__).target) for nodes in found if nodes))


@lru_cache  # once of each: the filters' own memory is lost by `catch_warnings`
def _say_assumed(network: str, last: str) -> None:
    warnings.warn(
        f"The forward of {network} cannot be traced symbolically: its last layer, {last}, is "
        "taken for the one that produces the output, and stays in FP16. If there are several outputs or another layer "
        'produces it, name the layers in an attribute of the network, output_layers = ("head", "depth"); with '
        "output_layers = () this is not said.",
        stacklevel=3,
    )


class _Tracer(fx.Tracer):
    """Keeps GEMM layers as one node each, also those of classes outside torch."""

    def __init__(self, is_gemm: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._is_gemm = is_gemm

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._is_gemm(m) or super().is_leaf_module(m, module_qualified_name)


def _behind(output: fx.Node, modules: dict[str, nn.Module], is_gemm: Callable[[nn.Module], bool]) -> set[fx.Node]:
    """The GEMM layers from which `output` is reached without another one; modules that hold some are not entered."""
    found, seen, waiting = set(), set(), [output]
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        layer = modules.get(str(node.target)) if node.op == "call_module" else None
        if layer is not None and is_gemm(layer):
            found.add(node)
        elif layer is None or not any(map(is_gemm, layer.modules())):
            waiting.extend(node.all_input_nodes)
    return found


def _copied(module: nn.Module, copies: dict[int, nn.Module]) -> nn.Module:
    """The module and its children as objects of their own without hooks, sharing everything that they hold."""
    if id(module) not in copies:
        copy = copies[id(module)] = module.__class__.__new__(module.__class__)
        copy.__dict__.update(module.__dict__)
        copy.__dict__.update({name: OrderedDict[int, Any]() for name in HOOKS})
        for name in ("_parameters", "_buffers"):
            copy.__dict__[name] = dict(module.__dict__[name])
        copy.__dict__["_modules"] = dict(_children(module, copies))
    return copies[id(module)]


def _children(module: nn.Module, copies: dict[int, nn.Module]) -> Iterable[tuple[str, nn.Module | None]]:
    for name, child in module._modules.items():
        yield name, None if child is None else _copied(child, copies)
