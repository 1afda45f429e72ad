"""A black, a white and a constant image, besides the real ones: where a quotient has nothing to divide by.

Real images never reach the numbers that keep code finite, `x / (x.sum() + 1e-8)` or `scores.masked_fill(m, -1e9)`. On
an image without contrast a file that lost such a number answers NaN. All pixels of such an image are equal, so classes
are ties and one code of FP4 that differs moves every pixel: values are compared, not classes, and coarsely where the
model is quantised. Where they differ by more all the same, the layers decide, each with reference inputs, as for real
images: a deep network with norms turns last bits into other images (an autoencoder of diffusers in FP4 with random
weights moves by 80 % of its largest value when what its layers read moves by 2^-24 of its amax). Equal pixels that are
normalised leave nothing but last bits; how far torch moves by these is measured then (`last_bits`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fp4deploy.export.verify.last_bits import movements, settled
from fp4deploy.graph.capture import Inputs
from fp4deploy.models.card import ModelCard
from fp4deploy.qat import quantized_layers

PLAIN, QUANTIZED = 0.01, 0.5  # of the largest value of these images
Run = Callable[[Inputs], list[torch.Tensor]]


def flat_difference(
    model: nn.Module,
    torch_run: Run,
    file_run: Run,
    batch: Inputs,
    card: ModelCard | None,
    by_layer: Callable[[Inputs], bool],
) -> str:
    """How a file differs from torch on images without contrast, as part of a sentence; "" where it does not.

    Args:
        batch: real inputs, whose sizes and types are taken.
        card: with the mean and standard deviation of a prepared image; without one black is 0 and white is 1.
        by_layer: of a quantised model, which is compared as coarsely as FP4 needs it: whether every layer of the file
            computes on an image what torch's does, given what that reads.
    """
    quantized = bool(quantized_layers(model))
    found = [(name, inputs, torch_run(inputs), file_run(inputs)) for name, inputs in flat_inputs(batch, card)]
    values = [
        y[y.isfinite()].abs().max()
        for _, _, outputs, _ in found
        for y in outputs
        if y.is_floating_point() and y.isfinite().any()
    ]
    largest = max((float(value) for value in values), default=0.0)
    bound = (QUANTIZED if quantized else PLAIN) * largest + 1e-6
    for name, inputs, expected, given in found:
        moved: list[torch.Tensor] | None = None
        for at, (one, other) in enumerate(zip(expected, given, strict=False)):
            if one.shape != other.shape:  # an axis of one sample that torch squeezes, and not of several
                return f"of one sample torch gives {list(one.shape)} and the file {list(other.shape)}"
            if not one.is_floating_point():  # ids of classes: ties, as above
                continue
            finite = one.isfinite()
            apart = (one - other)[finite].abs()
            if not apart.isfinite().all():
                return f"of {name} image the file gives NaN or Inf where torch gives finite numbers"
            if not apart.numel() or apart.max() <= bound or (quantized and by_layer(inputs)):
                continue
            moved = moved or movements(model, torch_run, inputs, expected, lambda each: [0.0] * len(each))
            if (one - settled(one, other, _of_any_pixel(moved[at])))[finite].abs().max() > bound:
                return f"of {name} image values differ by up to {apart.max():.3g}"
    return ""


def _of_any_pixel(moved: torch.Tensor) -> torch.Tensor:
    """The largest movement of a channel: without contrast no pixel differs from the next but by its last bits."""
    return moved.amax(tuple(range(2, moved.ndim)), keepdim=True) if moved.ndim > 2 else moved


def flat_inputs(batch: Inputs, card: ModelCard | None) -> Iterator[tuple[str, Inputs]]:
    """One sample of a batch with every feature map [N, C, H, W] black, white, and of its mean colour."""

    def filled(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x[:1]
        if x.ndim < 3 or not x.is_floating_point():
            return x
        colour = x.mean(tuple(range(2, x.ndim)), keepdim=True)
        if name != "a constant":
            level = torch.full_like(colour, float(name == "a white"))
            colour = (level - _per_channel(card, "mean", level, 0.0)) / _per_channel(card, "std", level, 1.0)
        return colour.expand_as(x).clone()

    for name in ("a black", "a white", "a constant"):
        yield name, tree_map(lambda x, name=name: filled(x, name), dict(batch) if isinstance(batch, Mapping) else batch)


def _per_channel(card: ModelCard | None, name: str, like: torch.Tensor, default: float) -> torch.Tensor:
    """A number for each channel, of a card's colours if there are as many."""
    values: Any = getattr(card, name, ())
    if len(values) != like.shape[1]:
        return torch.full_like(like, default)
    return torch.tensor(list(values), dtype=like.dtype).view(1, -1, *[1] * (like.ndim - 2))
