"""Layers of every kind with the shape of an input: what a quantised layer has to get right."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from fp4deploy.qat.computed import quantized_class
from fp4deploy.qat.plan import recipe_of
from fp4deploy.qat.prepare import restore
from fp4deploy.qat.recipes import Recipe, find_recipe

LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(48, 32), (37, 48)),
    "linear ragged, 3-D": (lambda: nn.Linear(40, 10), (2, 7, 40)),
    "linear without bias, 4-D": (lambda: nn.Linear(16, 24, bias=False), (2, 3, 2, 16)),
    "conv": (lambda: nn.Conv2d(32, 24, 3, padding=1), (2, 32, 6, 5)),
    "conv 1x1": (lambda: nn.Conv2d(33, 16, 1), (2, 33, 4, 4)),
    "conv stride 2, dilation 2": (lambda: nn.Conv2d(32, 8, 3, stride=2, dilation=2), (2, 32, 10, 9)),
    "conv uneven everything": (lambda: nn.Conv2d(16, 8, (2, 3), (2, 1), (1, 2), (3, 1)), (1, 16, 9, 7)),
    "conv groups": (lambda: nn.Conv2d(64, 32, 3, groups=2, stride=2, padding=1), (2, 64, 5, 6)),
    "conv ragged groups": (lambda: nn.Conv2d(60, 36, 3, groups=3, padding=1), (2, 60, 4, 5)),
    "conv same": (lambda: nn.Conv2d(20, 17, (2, 4), padding="same", dilation=(1, 3)), (2, 20, 6, 11)),
    "conv same, odd": (lambda: nn.Conv2d(20, 17, 3, padding="same"), (2, 20, 5, 5)),
    "conv valid": (lambda: nn.Conv2d(20, 17, 3, padding="valid"), (2, 20, 5, 5)),
    "conv reflect": (lambda: nn.Conv2d(24, 16, 3, 2, (1, 2), padding_mode="reflect"), (2, 24, 6, 7)),
    "conv circular": (lambda: nn.Conv2d(24, 16, 3, padding=1, padding_mode="circular"), (2, 24, 5, 4)),
    "conv ragged, no bias": (lambda: nn.Conv2d(17, 9, 3, bias=False), (2, 17, 5, 5)),
    "conv unbatched": (lambda: nn.Conv2d(32, 16, 3, padding=1), (32, 5, 4)),
    "conv channels_last": (lambda: nn.Conv2d(32, 16, 3).to(memory_format=torch.channels_last), (2, 32, 6, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 12, 2, stride=2), (2, 32, 4, 3)),
    "transposed output padding": (lambda: nn.ConvTranspose2d(24, 16, 3, 2, 1, output_padding=1), (2, 24, 3, 4)),
    "transposed pointwise, output padding": (
        lambda: nn.ConvTranspose2d(16, 16, 1, dilation=2, output_padding=1),
        (2, 16, 5, 5),
    ),
    "transposed, one column": (
        lambda: nn.ConvTranspose2d(16, 16, (3, 1), (1, 2), (1, 0), (0, 1)),
        (2, 16, 5, 1),
    ),
    "transposed groups, dilation": (
        lambda: nn.ConvTranspose2d(48, 20, 3, (2, 1), 1, (1, 0), groups=2, dilation=(2, 1)),
        (2, 48, 3, 4),
    ),
    "transposed overlapping, no bias": (lambda: nn.ConvTranspose2d(16, 32, 4, 2, 1, bias=False), (1, 16, 4, 4)),
    "transposed unbatched": (lambda: nn.ConvTranspose2d(32, 16, 2, stride=2), (32, 3, 3)),
}


def quantized(layer: nn.Module, recipe: str | Recipe) -> nn.Sequential:
    """A network of this layer, quantised also where no file holds the blocks, as of groups that do not fill them."""
    model = restore(nn.Sequential(layer))
    layer.__class__ = quantized_class(layer)
    layer.attach(recipe_of(find_recipe(recipe), "0", layer), None)  # type: ignore[operator]
    return model  # type: ignore[return-value]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make(name: str) -> tuple[nn.Module, torch.Tensor]:
    """The layer, with the same parameters at every call, and an input that wants a gradient."""
    build, shape = LAYERS[name]
    torch.manual_seed(3)
    layer = build()
    x = torch.randn(shape, generator=generator(4))
    if "channels_last" in name:
        x = x.contiguous(memory_format=torch.channels_last)
    return layer, x.requires_grad_()
