"""The gate between torch and a packed network, on the CPU: it must answer as the model it was made from.

First both run freely on the same real images, as `verify` does for ONNX. FP4 amplifies last bits, so that a large model
differs from itself when anything adds in another order (see `synchronised`). Where the free comparison fails, every
step is computed once more from what torch has at that place, and compared with what torch makes of it. Of a packed
image at most 0.1 % of the elements may differ, of a plain one the norm by 0.1 %, of the logits the class of 0.1 % of
the pixels.
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
from fp4deploy.packed.graph import INPUT, Concat, GroupNormReLU, Head, Step, outputs_of

Image = torch.Tensor | Nvfp4Tensor


@dataclass(frozen=True)
class PackedAgreement:
    """How far the packed network and torch agree.

    images, pixels: how much was compared. differing: pixels on which they say something else, running freely.
    steps: the error of each step fed by torch, by layer; None where running freely was enough.
    """

    images: int
    pixels: int
    differing: int
    steps: dict[str, float] | None = None
    head: InstanceHead | None = None

    @property
    def share(self) -> float:
        """Share of pixels on which both say the same, 0..1; 0 where nothing was compared."""
        return 1 - self.differing / self.pixels if self.pixels else 0.0

    def sentence(self) -> str:
        """How far both agree, in words."""
        text = f"{compared(self.head)} equal to torch on {100 * self.share:.3f} % of pixels"
        if self.steps is None:
            return text
        worst = max(self.steps.values(), default=0.0)
        return f"{text} running freely, where FP4 amplifies last bits; fed by torch no step is off by {worst:.2g}"


@torch.inference_mode()
def verify_packed(model: nn.Module, file: PackedFile, images: Iterable[torch.Tensor]) -> PackedAgreement:
    """Compare freely on `images` (float32 [N, 3, H, W] each); where that is not enough, step by step as well."""
    network, kept, head = PackedNetwork(file), list(images), file.card.head
    count = pixels = differing = 0
    for batch in kept:
        same = agreeing(model(batch), network(batch), head)
        count, pixels, differing = count + len(batch), pixels + same.numel(), differing + int((~same).sum())
    found = PackedAgreement(count, pixels, differing, head=head)
    if found.share >= REQUIRED_AGREEMENT or not kept:
        return found
    steps: dict[str, float] = {}
    for batch in kept:
        for name, error in compare_steps(model, network, batch, head).items():
            steps[name] = max(steps.get(name, 0.0), error)
    return PackedAgreement(count, pixels, differing, steps, head)


def require_packed(found: PackedAgreement, name: str) -> None:
    """Let a network through only if it computes what torch computes.

    Raises:
        GateError: more differs than FP4 explains, or nothing was compared.
    """
    if found.share >= REQUIRED_AGREEMENT:
        return
    wrong = [(step, error) for step, error in (found.steps or {}).items() if not error <= ALLOWED_ELEMENTS]
    if found.steps and not wrong:
        return
    cause = "there was nothing to compare" if not found.pixels else f"{100 * (1 - found.share):.3f} % of the pixels"
    if wrong:
        cause += f", and fed by torch the first step to differ is {wrong[0][0]}, by {wrong[0][1]:.2g}"
    raise GateError(
        f"{name}: the packed network and torch disagree: {cause}. Nothing was written; to look at the file all the "
        "same, export with --no-verify."
    )


def compare_steps(
    model: nn.Module, network: PackedNetwork, batch: torch.Tensor, head: InstanceHead | None = None
) -> dict[str, float]:
    """The error of each step, fed with what torch has in its place: by layer, in the order of the graph."""
    seen, images = _outputs(model, batch), network.graph.images
    held: dict[str, Image] = {INPUT: network.read(batch)}
    amaxes = {name: None if image.amax is None else model.get_buffer(image.amax) for name, image in images.items()}
    errors: dict[str, float] = {}
    for step in network.graph.steps:
        got = network.run_step(step, [held[name] for name in step.inputs])
        if isinstance(step, Concat):
            held[step.output] = got[0]
            continue
        expected = _expected(step, seen[step.layer], model.get_submodule(step.layer), network, amaxes)
        if isinstance(step, Head):
            errors[step.layer] = _disagreement(got[0], expected[0], head)
            continue
        errors[step.layer] = max(_error(*pair) for pair in zip(got, expected, strict=True))
        held.update(zip(outputs_of(step), expected, strict=False))
    return errors


def _expected(
    step: Step, x: torch.Tensor, layer: nn.Module, network: PackedNetwork, amaxes: dict[str, torch.Tensor | None]
) -> list[Image]:
    """What the step should write, from the output of torch's layer; `amaxes`: what torch quantises each image with."""
    if isinstance(step, Head):
        return [x]
    if isinstance(step, GroupNormReLU):
        y = x.relu()
        pooled = nn.functional.max_pool2d(y.permute(0, 3, 1, 2), 2).permute(0, 2, 3, 1)
        return [network.form(pooled if form.pooled else y, amaxes[form.output]) for form in step.outputs]
    bias = cast(Any, layer).bias
    if bias is not None and cast(Any, step).bias is None:  # the normalisation adds it
        x = x - bias
    return [network.form(x, amaxes[cast(Any, step).output])]


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


def _disagreement(got: Image, expected: Image, head: InstanceHead | None) -> float:
    """Share of pixels on which two outputs [N, H, W, channels] say something else."""
    given, wanted = (cast(torch.Tensor, image).permute(0, 3, 1, 2) for image in (got, expected))
    return float((~agreeing(wanted, given, head)).float().mean())


def _error(got: Image, expected: Image) -> float:
    if isinstance(got, Nvfp4Tensor) and isinstance(expected, Nvfp4Tensor):
        return float((got.dequantize() != expected.dequantize()).float().mean())
    got, expected = cast(torch.Tensor, got), cast(torch.Tensor, expected)
    return float((got - expected).norm() / expected.norm().clamp(min=1e-30))
