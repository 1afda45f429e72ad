"""The gate between torch and a packed network, on the CPU: both must give the same classes.

First both run end to end on the same real images, as `verify.outputs` does for ONNX. FP4 amplifies last bits, so that a
large model differs from itself when a sum is accumulated in another order (see `verify.layerwise`). Where the
end-to-end comparison fails, every node is compared alone, with reference inputs from torch. At most 0.1 % of the
elements of a packed activation may differ or those of one block, 0.1 % of the norm of a plain one, and the class of
0.1 % of the pixels of the logits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.errors import GateError
from fp4deploy.export.verify.flat import flat_difference
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS, NOTHING_WRITTEN, REQUIRED_AGREEMENT
from fp4deploy.export.verify.tensors import leaves, same_outputs
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor, pad_to_blocks
from fp4deploy.graph.capture import Inputs
from fp4deploy.models.heads import Head, agreeing, compared, counted_unit
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.packed.graph import GroupNormReLU, Layer, Node
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4
from fp4deploy.qat import QuantizedLayer, quantized_layers
from fp4deploy.qat.ranges import Ranges
from fp4deploy.rest import FP16, Rest, rest_of

Activation = torch.Tensor | Nvfp4Tensor
LAYERS = (
    nn.modules.conv._ConvNd, nn.Linear, nn.GroupNorm, nn.LayerNorm, nn.modules.batchnorm._NormBase,
)  # fmt: skip


@dataclass(frozen=True)
class PackedAgreement:
    """How far the packed network and torch agree.

    images, pixels: how much was compared. differing: pixels on which they disagree, end to end. nodes: the error of
    each node with reference inputs from torch, by layer; None where the end-to-end comparison passed. flat: how they
    differ on a black, a white or a constant image (`flat`); "" where they do not. ranges: the largest magnitude of what
    a GPU computes in the rest's precision, by place (`qat.ranges`).
    """

    images: int
    pixels: int
    differing: int
    nodes: dict[str, float] | None = None
    head: Head | None = None
    flat: str = ""
    ranges: Mapping[str, float] = field(default_factory=dict)
    rest: Rest = FP16

    @property
    def share(self) -> float:
        """Share of pixels on which both agree, 0..1; 0 where nothing was compared."""
        return 1 - self.differing / self.pixels if self.pixels else 0.0

    @property
    def wrong(self) -> list[tuple[str, float]]:
        """The nodes that compute something else with reference inputs, in their order, with their errors."""
        return [(node, error) for node, error in (self.nodes or {}).items() if not error <= ALLOWED_ELEMENTS]

    @property
    def passed(self) -> bool:
        """Whether the difference is within the limits of this module."""
        if self.flat or self.rest.beyond(self.ranges):
            return False
        return self.share >= REQUIRED_AGREEMENT or (bool(self.nodes) and not self.wrong)

    def sentence(self) -> str:
        """The agreement as a sentence."""
        text = f"{compared(self.head)} equal to torch on {100 * self.share:.3f} % of {counted_unit(self.head)}"
        if self.nodes is None:
            return text
        worst = max(self.nodes.values(), default=0.0)
        return f"{text} end to end, where FP4 amplifies last bits; no node differs by more than {worst:.2g}"


@torch.no_grad()
def verify_packed(model: nn.Module, file: PackedFile, inputs: Iterable[Inputs]) -> PackedAgreement:
    """Compare end to end on `inputs` (images float32 [N, 3, H, W] each); where that fails, node by node as well."""
    network, kept = PackedNetwork(file), [positional(each, file) for each in inputs]
    head = file.card.head if file.card else None
    count = pixels = differing = 0
    ranges = Ranges(model, rest_of(file.graph))
    for batch in kept:
        with ranges:
            expected = leaves(model(*_copies(batch)))
        for same in same_outputs(expected, leaves(network(*_copies(batch))), head):
            pixels, differing = pixels + same.numel(), differing + int((~same).sum())
        count += len(batch[0])
    found = PackedAgreement(count, pixels, differing, head=head, ranges=ranges.largest, rest=ranges.rest)
    if found.share < REQUIRED_AGREEMENT and kept:
        nodes: dict[str, float] = {}
        for batch in kept:
            for name, error in compare_nodes(model, network, *_copies(batch), head=head).items():
                nodes[name] = max(nodes.get(name, 0.0), error)
        found = replace(found, nodes=nodes)
    if not found.passed:
        return found
    runs = (lambda x: leaves(model(*_copies(x))), lambda x: leaves(network(*_copies(x))))
    return replace(found, flat=flat_difference(*runs, kept[0], file.card, bool(quantized_layers(model))))


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


def require_packed(found: PackedAgreement, name: str) -> None:
    """Pass a network only if it computes what torch computes.

    Raises:
        GateError: more differs than FP4 explains, or nothing was compared.
    """
    if found.passed:
        return
    if beyond := found.rest.beyond(found.ranges):
        raise GateError(f"{name}: {beyond} {NOTHING_WRITTEN}")
    cause = found.flat or (
        "there was nothing to compare"
        if not found.pixels
        else f"{100 * (1 - found.share):.3f} % of the {counted_unit(found.head)}"
    )
    if found.wrong:
        node, error = found.wrong[0]
        cause += f", and with reference inputs the first node to differ is {node}, by {error:.2g}"
    raise GateError(f"{name}: the packed network and torch disagree: {cause}. {NOTHING_WRITTEN}")


def compare_nodes(
    model: nn.Module, network: PackedNetwork, *inputs: torch.Tensor, head: Head | None = None
) -> dict[str, float]:
    """The error of each node that is a layer of torch, with reference inputs from torch: by layer, in their order.

    Nodes without parameters (add, resize, ...) are torch's own operators, and run on the reference inputs.
    """
    graph = network.graph
    seen, calls = _outputs(model, *_copies(inputs)), dict[str, int]()
    sizes = {f"{each.name}.{axis}": size for each, x in zip(graph.inputs, inputs, strict=True)
             for axis, size in enumerate(x.shape)}  # fmt: skip
    live: dict[str, Activation] = {}
    for each, x in zip(graph.inputs, inputs, strict=True):
        live.update(zip([form.name for form in each.outputs], network.read_input(each, x), strict=True))
    buffers = dict(model.named_buffers(remove_duplicate=False)) | dict(model.named_parameters(remove_duplicate=False))
    amaxes = {name: buffers[form.amax] for name, form in graph.forms().items() if form.amax}
    ends = {each.activation for each in graph.outputs}
    errors: dict[str, float] = {}
    for node in graph.nodes:
        got = network.run_node(node, [live[name] for name in node.inputs], sizes)
        names = [form.name for form in node.outputs]
        layer = str(getattr(node, "layer", None) or "")
        at = calls[layer] = calls.get(layer, -1) + 1 if layer else 0
        if not layer or at >= len(seen.get(layer, [])):
            live.update(zip(names, got, strict=True))
            continue
        expected = _expected(node, seen[layer][at], model.get_submodule(layer), amaxes)
        key = layer if at == 0 else f"{layer} (call {at + 1})"
        if ends & set(names) and isinstance(expected[0], torch.Tensor) and expected[0].ndim == 4:
            errors[key] = _disagreement(got[0], expected[0], head)
        else:
            errors[key] = max(_error(*pair) for pair in zip(got, expected, strict=True))
        live.update(zip(names, expected, strict=True))
    return errors


def packed_values(file: PackedFile, inputs: Inputs) -> list[torch.Tensor]:
    """Every tensor that a packed network without quantised layers computes; those before a node that does not run."""
    network, given = PackedNetwork(file), positional(inputs, file)
    live: dict[str, Any] = {}
    sizes = network.sizes(given)
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


def _outputs(model: nn.Module, *inputs: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """The outputs of every layer with weights, one for each call."""
    seen: dict[str, list[torch.Tensor]] = {}

    def keep(name: str) -> Any:
        return lambda _layer, _inputs, output: seen.setdefault(name, []).append(output.clone())

    layers = {name: module for name, module in model.named_modules() if isinstance(module, LAYERS) and _plain(module)}
    handles = [module.register_forward_hook(keep(name)) for name, module in layers.items()]
    try:
        model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _plain(module: nn.Module) -> bool:
    """Whether a layer's forward is torch's or a quantised one: that of a subclass may do more than the layer's node."""
    return isinstance(module, QuantizedLayer) or type(module).forward.__module__.startswith("torch.nn.")


def _disagreement(got: Activation, expected: Activation, head: Head | None) -> float:
    """Share of pixels on which two outputs [N, channels, H, W] disagree."""
    return float((~agreeing(cast(torch.Tensor, expected), cast(torch.Tensor, got), head)).float().mean())


def _error(got: Activation, expected: Activation) -> float:
    if isinstance(got, Nvfp4Tensor) and isinstance(expected, Nvfp4Tensor):
        differs = got.dequantize() != expected.dequantize()
        blocks = pad_to_blocks(differs, (differs.ndim - 1,)).unflatten(-1, (-1, NVFP4_BLOCK)).any(-1).sum()
        return float(differs.float().mean()) if blocks > 1 else 0.0  # a last bit of its amax can change a block's scale
    got, expected = cast(torch.Tensor, got), cast(torch.Tensor, expected)
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
