"""The gate between torch and a packed network, on the CPU: outputs must mean the same.

First both run end to end on the same real images, as `verify.outputs` does for ONNX. FP4 amplifies last bits, so that a
large model differs from itself when a sum is accumulated in another order (see `verify.layerwise`). Where the
end-to-end comparison fails, every node is compared alone, with reference inputs from torch. At most 0.1 % of the
elements of a packed activation may differ or those of one block, 0.1 % of the norm of a plain one, and 0.1 % of what
the outputs mean that follow from them (`agreement`), but for what last bits decide there (`last_bits`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from fp4deploy.errors import GateError, InputError
from fp4deploy.export.verify.agreement import Comparison, OutputAgreement, compare_outputs, described, unsettled
from fp4deploy.export.verify.flat import flat_difference
from fp4deploy.export.verify.last_bits import movements
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS, NOTHING_WRITTEN
from fp4deploy.export.verify.tensors import leaves
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor, pad_to_blocks
from fp4deploy.graph.capture import Inputs, file_names, of_batch
from fp4deploy.models.meaning import OutputMeanings, known_outputs
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.packed.graph import GroupNormReLU, Layer, Node
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.qat import QuantizedLayer
from fp4deploy.qat.ranges import Ranges
from fp4deploy.rest import rest_of

Activation = torch.Tensor | Nvfp4Tensor
LAYERS = (
    nn.modules.conv._ConvNd, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase,
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class PackedAgreement(Comparison):
    """How far the packed network and torch agree.

    nodes: the error of each node with reference inputs from torch, by layer, and `referenced` the outputs that follow
    from these; None where the end-to-end comparison passed. Ranges are those of a GPU, which computes in `rest`.
    """

    nodes: dict[str, float] | None = None
    referenced: tuple[OutputAgreement, ...] = ()

    @property
    def passed_with_references(self) -> bool:
        """Whether every node, and every output that follows from its last ones, is within the limits."""
        compared = self.nodes is not None and bool(self.referenced)
        return compared and not self.wrong_nodes and all(each.passed for each in self.referenced)

    @property
    def wrong_nodes(self) -> list[tuple[str, float]]:
        """Nodes that differ by more than is allowed, and by how much, in the order of the graph."""
        return [(node, error) for node, error in (self.nodes or {}).items() if not error <= ALLOWED_ELEMENTS]

    @property
    def place(self) -> str:
        if self.wrong_nodes:
            node, error = self.wrong_nodes[0]
            return f"with reference inputs the first node to differ is {node}, by {error:.2g}"
        wrong = [each for each in self.referenced if not each.passed]
        return f"with reference inputs still {described(wrong, OutputAgreement.difference)}" if wrong else ""

    def sentence(self) -> str:
        text = super().sentence()
        if self.nodes is None:
            return text
        worst = float(np.max(list(self.nodes.values()), initial=0.0))
        text = f"{text} end to end, where FP4 amplifies last bits; no node differs by more than {worst:.2g}"
        undecided = sum(each.undecided for each in self.referenced)
        return f"{text} ({undecided} where last bits of float32 decide)" if undecided else text


@torch.no_grad()
def verify_packed(
    model: nn.Module,
    file: PackedFile,
    inputs: Iterable[Inputs],
    meanings: OutputMeanings | None = None,
    flat: bool = True,
) -> PackedAgreement:
    """Compare end to end on `inputs` (images float32 [N, 3, H, W] each); where that fails, node by node as well.

    meanings: by default as the file's card says; flat: compare images without contrast, too.
    """
    batches = list(inputs)
    network, kept = PackedNetwork(file), [positional(each, file) for each in batches]
    by_name = any(isinstance(each, Mapping) for each in batches)  # the forward may have arguments between them
    forward = partial(_by_name, model, [each.name for each in file.graph.inputs]) if by_name else model
    names = file_names([each.name for each in file.graph.outputs], [each.name for each in file.graph.inputs])
    meanings = known_outputs(file.card) if meanings is None else meanings
    ranges = Ranges(model, rest_of(file.graph))
    count, found = 0, tuple[OutputAgreement, ...]()
    with ranges:
        expected = [leaves(forward(*_copies(batch))) for batch in kept]
    of_file = [leaves(network(*_copies(batch))) for batch in kept]
    for batch, outputs, own in zip(kept, expected, of_file, strict=True):
        found = compare_outputs(outputs, own, names, meanings, found)
        count += len(batch[0])
    agreement = PackedAgreement(count, found, ranges=ranges.largest, rest=ranges.rest)
    if not all(each.passed for each in found):
        nodes: dict[str, float] = {}
        of_nodes: list[list[torch.Tensor]] = []
        for batch in kept:
            errors, given = run_nodes(model, network, *_copies(batch), forward=forward)
            nodes |= {name: largest(nodes.get(name, 0.0), error) for name, error in errors.items()}
            of_nodes.append(given)
        for last_bits in (False, True):
            referenced: tuple[OutputAgreement, ...] = ()
            for batch, outputs, own in zip(kept, expected, of_nodes, strict=True):
                moved = _moved(model, forward, batch, outputs) if last_bits else None
                referenced = compare_outputs(outputs, own, names, meanings, referenced, moved)
            agreement = replace(agreement, nodes=nodes, referenced=referenced)
            if agreement.passed or agreement.wrong_nodes or not all(each.is_near for each in referenced):
                break
    if not (agreement.passed and flat):
        return agreement

    def sized(x: Inputs) -> tuple[torch.Tensor, ...]:
        return _copies(of_batch(cast("tuple[torch.Tensor, ...]", x), file.graph.batch))

    def by_layer(x: Inputs) -> bool:
        return all(
            error <= ALLOWED_ELEMENTS for error in run_nodes(model, network, *sized(x), forward=forward)[0].values()
        )

    runs = (lambda x: leaves(forward(*sized(x))), lambda x: leaves(network(*sized(x))))
    return replace(agreement, flat=flat_difference(model, *runs, kept[0], file.card, by_layer))


def largest(*errors: float) -> float:
    """The largest number; NaN where one is."""
    return float(np.max(errors))


def _copies(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """For a network that may change its input in place."""
    return tuple(x.clone() for x in inputs)


def positional(inputs: Inputs, file: PackedFile) -> tuple[torch.Tensor, ...]:
    """Inputs in the order of the graph."""
    if isinstance(inputs, torch.Tensor):
        return (inputs,)
    if isinstance(inputs, Mapping):
        return tuple(inputs[each.name] for each in file.graph.inputs)
    return tuple(inputs)


def _by_name(model: nn.Module, names: Sequence[str], *inputs: torch.Tensor) -> object:
    return model(**dict(zip(names, inputs, strict=True)))


def require_packed(found: PackedAgreement, name: str) -> None:
    """Pass a network only if it computes what torch computes.

    Raises:
        GateError: more differs than FP4 explains, an output is not finite, or nothing was compared.
    """
    if found.passed:
        return
    if beyond := found.rest.beyond(found.ranges):
        raise GateError(f"{name}: {beyond} {NOTHING_WRITTEN}")
    cause = found.flat or described([each for each in found.outputs if not each.passed], OutputAgreement.difference)
    cause += f", and {found.place}" if found.place else ""
    raise GateError(f"{name}: the packed network and torch disagree: {cause}. {NOTHING_WRITTEN}")


def compare_nodes(model: nn.Module, network: PackedNetwork, *inputs: torch.Tensor) -> dict[str, float]:
    """The error of each node that is a layer of torch, with reference inputs from torch: by layer, in their order.

    Nodes without parameters (add, resize, ...) are torch's own operators, and run on the reference inputs.
    """
    return run_nodes(model, network, *inputs)[0]


def run_nodes(
    model: nn.Module, network: PackedNetwork, *inputs: torch.Tensor, forward: Callable[..., object] | None = None
) -> tuple[dict[str, float], list[torch.Tensor]]:
    """`compare_nodes`, and the outputs as the last nodes give them with reference inputs; forward: calls the model."""
    graph = network.graph
    seen, calls = _outputs(model, forward or model, *_copies(inputs)), dict[str, int]()
    sizes = {f"{each.name}.{axis}": size for each, x in zip(graph.inputs, inputs, strict=True)
             for axis, size in enumerate(x.shape)}  # fmt: skip
    live: dict[str, Activation] = {}
    for each, x in zip(graph.inputs, inputs, strict=True):
        live.update(zip([form.name for form in each.outputs], network.read_input(each, x), strict=True))
    buffers = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    amaxes = {name: buffers[form.amax] for name, form in graph.forms().items() if form.amax}
    ends = {each.activation for each in graph.outputs}
    written = {name: value for name, value in live.items() if name in ends}
    errors: dict[str, float] = {}
    for node in graph.nodes:
        got = network.run_node(node, [live[name] for name in node.inputs], sizes)
        names = [form.name for form in node.outputs]
        written |= {name: value for name, value in zip(names, got, strict=True) if name in ends}
        layer = str(getattr(node, "layer", None) or "")
        at = calls[layer] = calls.get(layer, -1) + 1 if layer else 0
        if not layer or at >= len(seen.get(layer, [])):
            live.update(zip(names, got, strict=True))
            continue
        expected = _expected(node, seen[layer][at], model.get_submodule(layer), amaxes)
        key = layer if at == 0 else f"{layer} (call {at + 1})"
        errors[key] = largest(*(_error(*pair) for pair in zip(got, expected, strict=True)))
        live.update(zip(names, expected, strict=True))
    return errors, [cast(torch.Tensor, written[each.activation]) for each in graph.outputs]


def packed_values(file: PackedFile, inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor that a packed network without quantised layers computes; those before a node that does not run."""
    network, given = PackedNetwork(file), positional(inputs, file)
    live: dict[str, Any] = {}
    try:
        sizes = network.sizes(given)
    except InputError:  # a size that it does not take
        return []
    for each, x in zip(network.graph.inputs, given, strict=True):
        live.update(zip([form.name for form in each.outputs], network.read_input(each, x), strict=True))
    for node in network.graph.nodes:
        try:
            got = network.run_node(node, [live[name] for name in node.inputs], sizes)
        except Exception:  # torch's own, of an operator
            break
        live.update(zip([form.name for form in node.outputs], got, strict=True))
    return [each for each in live.values() if isinstance(each, torch.Tensor)]


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


def _outputs(model: nn.Module, forward: Callable[..., object], *inputs: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The outputs of every layer with weights, one for each call, by every name that the layer has."""

    def keep(outputs: list[torch.Tensor]) -> Any:
        return lambda _layer, _inputs, output: outputs.append(output.clone())

    layers = _layers(model)
    found: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in layers.values()}
    seen = {name: found[module] for name, module in layers.items()}
    handles = [module.register_forward_hook(keep(outputs)) for module, outputs in found.items()]
    try:
        forward(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _moved(
    model: nn.Module,
    forward: Callable[..., Any],
    inputs: tuple[torch.Tensor, ...],
    expected: list[torch.Tensor],
) -> list[torch.Tensor]:
    """How far outputs move by last bits, each layer with reference inputs: FP4 amplifies nothing."""
    kept: dict[nn.Module, list[torch.Tensor]] = {module: [] for module in _layers(model).values()}
    left: dict[nn.Module, Iterator[torch.Tensor]] = {}

    def keep(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        kept[layer] += [x.clone() for x in given[:1]]

    def reference(layer: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        references = [next(left[layer], x).clone() for x in given[:1]]  # with noise, but of a quantised layer
        return *references, *given[1:]

    def run(x: tuple[torch.Tensor, ...], hook: Callable[..., object] = reference) -> list[torch.Tensor]:
        left.update({layer: iter(each) for layer, each in kept.items()})
        handles = [layer.register_forward_pre_hook(hook) for layer in kept]
        try:
            return leaves(forward(*_copies(x)))
        finally:
            for handle in handles:
                handle.remove()

    run(inputs, keep)
    return movements(model, run, inputs, expected, partial(unsettled, expected))


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers with weights whose nodes are compared, by every name that they have."""
    named = model.named_modules(remove_duplicate=False)
    return {name: module for name, module in named if isinstance(module, LAYERS) and _plain(module)}


def _plain(module: nn.Module) -> bool:
    """Whether a layer's forward is torch's or a quantised one: that of a subclass may do more than the layer's node."""
    return isinstance(module, QuantizedLayer) or type(module).forward.__module__.startswith("torch.nn.")


def _error(got: Activation, expected: Activation) -> float:
    if isinstance(got, Nvfp4Tensor) and isinstance(expected, Nvfp4Tensor):
        differs = got.dequantize() != expected.dequantize()
        if not bool(got.dequantize().isfinite().all()):
            return math.nan
        blocks = pad_to_blocks(differs, (differs.ndim - 1,)).unflatten(-1, (-1, NVFP4_BLOCK)).any(-1).sum()
        return float(differs.float().mean()) if blocks > 1 else 0.0  # a last bit of its amax can change a block's scale
    got, expected = cast(torch.Tensor, got), cast(torch.Tensor, expected)
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
