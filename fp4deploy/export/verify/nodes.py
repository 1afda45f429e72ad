"""The nodes of a packed network one by one, on the CPU, with reference inputs from torch.

What a layer of torch computes is compared with what the layer's node writes, and replaces it for the nodes that follow,
so that FP4 amplifies nothing (`layerwise` says why). A node quantises what the operators before it compute, in their
own last bits: one element at a rounding boundary of E2M1 is another code, and every channel of its pixels differs. Such
elements are what last bits decide about (`last_bits`); by the same rule as everywhere in the gate they are left out
where noise on what torch's layer reads moves torch's own output as far, and a fault is what it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fp4deploy.export.verify.agreement import unsettled
from fp4deploy.export.verify.last_bits import movements, settled
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor, pad_to_blocks
from fp4deploy.packed import PackedNetwork
from fp4deploy.packed.graph import GroupNormReLU, Layer, Node
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.qat import QuantizedLayer

Activation = torch.Tensor | Nvfp4Tensor
Calls = dict[str, list[torch.Tensor]]  # layer, by every name that it has -> its output at each call
LAYERS = (
    nn.modules.conv._ConvNd, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase,
)  # fmt: skip


@dataclass(frozen=True)
class NodeComparison:
    """errors: of each node that is a layer of torch, by layer, in their order. outputs: as the last nodes give them.

    moved: how far torch's own outputs move by last bits; None where that was not measured.
    """

    errors: dict[str, float]
    outputs: list[torch.Tensor]
    moved: list[torch.Tensor] | None = None

    @property
    def wrong(self) -> dict[str, float]:
        """The nodes that differ by more than is allowed."""
        return {node: error for node, error in self.errors.items() if not error <= ALLOWED_ELEMENTS}


@dataclass(frozen=True)
class _Call:
    """One call of a layer: what its node wrote, and should have; `forms`: what it should of an output of the layer."""

    layer: str
    at: int
    forms: Callable[[torch.Tensor], list[Activation]]
    given: Sequence[Activation]
    expected: Sequence[Activation]

    @property
    def name(self) -> str:
        return self.layer if self.at == 0 else f"{self.layer} (call {self.at + 1})"

    def error(self, moved: Sequence[torch.Tensor] | None = None) -> float:
        """Of the form that differs most, without elements that last bits move as far."""
        moves = [None] * len(self.expected) if moved is None else moved
        return largest(*map(_error, self.given, self.expected, moves))


def compare_nodes(
    model: nn.Module,
    network: PackedNetwork,
    *inputs: torch.Tensor,
    forward: Callable[..., object] | None = None,
    last_bits: float = 0.0,
) -> NodeComparison:
    """Compare each node that is a layer of torch; those without parameters (add, resize, ...) are torch's operators.

    Args:
        forward: calls the model.
        last_bits: leave out what differs where these decide, if it is this share, 0..1, of a node or output at most.
    """
    graph, run = network.graph, partial(_run_torch, model, forward or model)
    outputs, seen = run(inputs)
    calls = dict[str, int]()
    sizes = {f"{each.name}.{axis}": size for each, x in zip(graph.inputs, inputs, strict=True)
             for axis, size in enumerate(x.shape)}  # fmt: skip
    live: dict[str, Activation] = {}
    for each, x in zip(graph.inputs, inputs, strict=True):
        live.update(zip([form.name for form in each.outputs], network.read_input(each, x), strict=True))
    buffers = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    amaxes = {name: buffers[form.amax] for name, form in graph.forms().items() if form.amax}
    ends = {each.activation for each in graph.outputs}
    written = {name: value for name, value in live.items() if name in ends}
    found: list[_Call] = []
    for node in graph.nodes:
        got = network.run_node(node, [live[name] for name in node.inputs], sizes)
        names = [form.name for form in node.outputs]
        written |= {name: value for name, value in zip(names, got, strict=True) if name in ends}
        layer = str(getattr(node, "layer", None) or "")
        at = calls[layer] = calls.get(layer, -1) + 1 if layer else 0
        if not layer or at >= len(seen.get(layer, [])):
            live.update(zip(names, got, strict=True))
            continue
        forms = partial(_expected, node, layer=model.get_submodule(layer), amaxes=amaxes)
        found.append(_Call(layer, at, forms, got, forms(seen[layer][at])))
        live.update(zip(names, found[-1].expected, strict=True))
    given = [cast(torch.Tensor, written[each.activation]) for each in graph.outputs]
    compared = NodeComparison({each.name: each.error() for each in found}, given)
    if not last_bits:
        return compared
    wrong = [each for each in found if each.name in compared.wrong]
    expected = [*outputs, *(_values(x) for each in wrong for x in each.expected)]

    def with_references(inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        own = run(inputs, seen)[1]  # of what follows from the reference outputs of the layers before
        found = run(inputs, own)[0]
        with torch._C.DisableTorchFunction():  # formulas of the format have no noise
            return found + [_values(x) for each in wrong for x in each.forms(own[each.layer][each.at])]

    moved = movements(model, with_references, inputs, expected, partial(unsettled, expected), last_bits)
    of_wrong = iter(moved[len(outputs) :])
    settled_errors = {each.name: each.error([next(of_wrong) for _ in each.expected]) for each in wrong}
    return NodeComparison(compared.errors | settled_errors, given, moved[: len(outputs)])


def largest(*errors: float) -> float:
    """The largest number; NaN where one is."""
    return float(np.max(errors))


def _expected(node: Node, x: torch.Tensor, layer: nn.Module, amaxes: Mapping[str, torch.Tensor]) -> list[Activation]:
    """What the node should write, from the output of torch's layer; `amaxes`: what torch quantises with."""
    bias = cast(Any, layer).bias if isinstance(node, Layer) else None
    if bias is not None and cast(Layer, node).bias is None:  # the normalisation adds it
        x = x - bias.view(-1, 1, 1)
    if isinstance(node, GroupNormReLU) or getattr(node, "relu", False):
        x = x.relu()
    found: list[Activation] = []
    for form in node.outputs:
        y = nn.functional.max_pool2d(x, 2) if form.pooled else x
        axis = 1 if form.axis == "channels" else -1
        found.append(quantize_nvfp4(y.movedim(axis, -1), amax=amaxes[form.name]) if form.amax else y)
    return found


def _run_torch(
    model: nn.Module, forward: Callable[..., object], inputs: Sequence[torch.Tensor], replaced: Calls | None = None
) -> tuple[list[torch.Tensor], Calls]:
    """The outputs, and those of every layer with weights; `replaced`: what is passed on in place of these."""
    layers = _layers(model)
    found: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in layers.values()}
    seen = {name: found[module] for name, module in layers.items()}

    def keep(outputs: list[torch.Tensor], others: list[torch.Tensor] | None) -> Any:
        def hook(_layer: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor | None:
            outputs.append(output.clone())
            return others[len(outputs) - 1].clone() if others is not None else None

        return hook

    by_module = {layers[name]: others for name, others in (replaced or {}).items()}
    handles = [module.register_forward_hook(keep(outputs, by_module.get(module))) for module, outputs in found.items()]
    try:
        return leaves(forward(*(x.clone() for x in inputs))), seen
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with weights whose nodes are compared, by every name that they have."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, LAYERS) and _plain(module)}


def _plain(module: nn.Module) -> bool:
    """Whether a layer's forward is torch's or a quantised one: that of a subclass may do more than the layer's node."""
    return isinstance(module, QuantizedLayer) or type(module).forward.__module__.startswith("torch.nn.")


def _values(x: Activation) -> torch.Tensor:
    return x.dequantize() if isinstance(x, Nvfp4Tensor) else x


def _error(got: Activation, expected: Activation, moved: torch.Tensor | None) -> float:
    given, reference = _values(got), _values(expected)
    if moved is not None:
        given = settled(reference, given, moved)
    if not isinstance(expected, Nvfp4Tensor):
        return float((given - reference).norm() / reference.norm().clamp(min=1e-30))
    if not bool(given.isfinite().all()):
        return math.nan
    differs = given != reference
    blocks = pad_to_blocks(differs, (differs.ndim - 1,)).unflatten(-1, (-1, NVFP4_BLOCK)).any(-1).sum()
    return float(differs.float().mean()) if blocks > 1 else 0.0  # a last bit of its amax can change a block's scale
