"""The gate between torch and a packed network, on the CPU: both must give the same classes.

First both run end to end on the same real images, as `verify.outputs` does for ONNX. FP4 amplifies last bits, so that a
large model differs from itself when a sum is accumulated in another order (see `verify.layerwise`). Where the
end-to-end comparison fails, every node is compared alone, with reference inputs from torch. At most 0.1 % of the
elements of a packed activation may differ, 0.1 % of the norm of a plain one, and the class of 0.1 % of the pixels of
the logits.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.errors import GateError
from fp4deploy.export.verify.outputs import ALLOWED_ELEMENTS, REQUIRED_AGREEMENT, compared
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.models.heads import InstanceHead, agreeing
from fp4deploy.packed import PackedFile, PackedNetwork
from fp4deploy.packed.graph import INPUT, Concat, GroupNormReLU, Head, Node, outputs_of

Activation = torch.Tensor | Nvfp4Tensor


@dataclass(frozen=True)
class PackedAgreement:
    """How far the packed network and torch agree.

    images, pixels: how much was compared. differing: pixels on which they disagree, end to end. nodes: the error of
    each node with reference inputs from torch, by layer; None where the end-to-end comparison passed.
    """

    images: int
    pixels: int
    differing: int
    nodes: dict[str, float] | None = None
    head: InstanceHead | None = None

    @property
    def share(self) -> float:
        """Share of pixels on which both agree, 0..1; 0 where nothing was compared."""
        return 1 - self.differing / self.pixels if self.pixels else 0.0

    def sentence(self) -> str:
        """The agreement as a sentence."""
        text = f"{compared(self.head)} equal to torch on {100 * self.share:.3f} % of pixels"
        if self.nodes is None:
            return text
        worst = max(self.nodes.values(), default=0.0)
        return f"{text} end to end, where FP4 amplifies last bits; no node differs by more than {worst:.2g}"


@torch.inference_mode()
def verify_packed(model: nn.Module, file: PackedFile, images: Iterable[torch.Tensor]) -> PackedAgreement:
    """Compare end to end on `images` (float32 [N, 3, H, W] each); where that fails, node by node as well."""
    network, kept, head = PackedNetwork(file), list(images), file.card.head
    count = pixels = differing = 0
    for batch in kept:
        same = agreeing(model(batch), network(batch), head)
        count, pixels, differing = count + len(batch), pixels + same.numel(), differing + int((~same).sum())
    found = PackedAgreement(count, pixels, differing, head=head)
    if found.share >= REQUIRED_AGREEMENT or not kept:
        return found
    nodes: dict[str, float] = {}
    for batch in kept:
        for name, error in compare_nodes(model, network, batch, head).items():
            nodes[name] = max(nodes.get(name, 0.0), error)
    return PackedAgreement(count, pixels, differing, nodes, head)


def require_packed(found: PackedAgreement, name: str) -> None:
    """Pass a network only if it computes what torch computes.

    Raises:
        GateError: more differs than FP4 explains, or nothing was compared.
    """
    if found.share >= REQUIRED_AGREEMENT:
        return
    wrong = [(node, error) for node, error in (found.nodes or {}).items() if not error <= ALLOWED_ELEMENTS]
    if found.nodes and not wrong:
        return
    cause = "there was nothing to compare" if not found.pixels else f"{100 * (1 - found.share):.3f} % of the pixels"
    if wrong:
        cause += f", and with reference inputs the first node to differ is {wrong[0][0]}, by {wrong[0][1]:.2g}"
    raise GateError(
        f"{name}: the packed network and torch disagree: {cause}. Nothing was written; to write the file all the "
        "same, export with --no-verify."
    )


def compare_nodes(
    model: nn.Module, network: PackedNetwork, batch: torch.Tensor, head: InstanceHead | None = None
) -> dict[str, float]:
    """The error of each node with reference inputs from torch: by layer, in the order of the graph."""
    seen, activations = _outputs(model, batch), network.graph.images
    live: dict[str, Activation] = {INPUT: network.read(batch)}
    amaxes = {name: model.get_buffer(form.amax) if form.amax else None for name, form in activations.items()}
    errors: dict[str, float] = {}
    for node in network.graph.steps:
        got = network.run_node(node, [live[name] for name in node.inputs])
        if isinstance(node, Concat):
            live[node.output] = got[0]
            continue
        expected = _expected(node, seen[node.layer], model.get_submodule(node.layer), network, amaxes)
        if isinstance(node, Head):
            errors[node.layer] = _disagreement(got[0], expected[0], head)
            continue
        errors[node.layer] = max(_error(*pair) for pair in zip(got, expected, strict=True))
        live.update(zip(outputs_of(node), expected, strict=False))
    return errors


def _expected(
    node: Node, x: torch.Tensor, layer: nn.Module, network: PackedNetwork, amaxes: dict[str, torch.Tensor | None]
) -> list[Activation]:
    """What the node should write, from the output of torch's layer; `amaxes`: what torch quantises with."""
    if isinstance(node, Head):
        return [x]
    if isinstance(node, GroupNormReLU):
        y = x.relu()
        pooled = nn.functional.max_pool2d(y.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
        return [network.form(pooled if form.pooled else y, amaxes[form.output]) for form in node.outputs]
    bias = cast(Any, layer).bias
    if bias is not None and cast(Any, node).bias is None:  # the normalisation adds it
        x = x - bias
    return [network.form(x, amaxes[cast(Any, node).output])]


def _outputs(model: nn.Module, batch: torch.Tensor) -> dict[str, torch.Tensor]:
    """NHWC output of every layer with weights."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _layer, _inputs, output: seen.__setitem__(name, output.permute(0, 2, 3, 1))

    kinds = (nn.Conv2d, nn.ConvTranspose2d, nn.GroupNorm)
    handles = [m.register_forward_hook(keep(name)) for name, m in model.named_modules() if isinstance(m, kinds)]
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _disagreement(got: Activation, expected: Activation, head: InstanceHead | None) -> float:
    """Share of pixels on which two outputs [N, H, W, channels] disagree."""
    given, requested = (cast(torch.Tensor, logits).permute(0, 3, 1, 2) for logits in (got, expected))
    return float((~agreeing(requested, given, head)).float().mean())


def _error(got: Activation, expected: Activation) -> float:
    if isinstance(got, Nvfp4Tensor) and isinstance(expected, Nvfp4Tensor):
        return float((got.dequantize() != expected.dequantize()).float().mean())
    got, expected = cast(torch.Tensor, got), cast(torch.Tensor, expected)
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
