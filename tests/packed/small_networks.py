"""Small UNets as packed networks, each made once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from fp4deploy.export.packing import packed_graph
from fp4deploy.graph import Graph as Captured
from fp4deploy.graph import capture
from fp4deploy.models import ModelCard, build_unet
from fp4deploy.packed import PackedFile, packed_file
from fp4deploy.qat import calibrate, prepare, round_to_deployed
from fp4deploy.rest import rest_of
from tests.shallow import cached

CLASSES = ("sky", "road", "car", "tree", "sign")
SIZE = 32


def images(count: int, seed: int = 1, size: int = SIZE) -> torch.Tensor:
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(seed))


def card(recipe: str | None, scale: float, digits: bool = False) -> ModelCard:
    precision, size, rgb = "nvfp4" if recipe else "fp16", (SIZE, SIZE), ((0.5, 0.5, 0.5), (0.2, 0.2, 0.2))
    return ModelCard(precision, scale, CLASSES, *size, *rgb, False, recipe, digits=digits)


@cached
def captured(scale: float, digits: bool) -> Captured:
    """The graph of a UNet, which does not depend on its weights; with digits it begins after the encoding."""
    model = build_unet(len(CLASSES), scale, digits)
    model.digits = False
    return capture(model, torch.zeros(1, 13 if digits else 3, SIZE, SIZE))


@cached
def packed(
    recipe: str | None = "nvfp4_qat",
    scale: float = 0.25,
    digits: bool = False,
    everything: bool = False,
    rest: str = "fp16",
) -> tuple[nn.Module, PackedFile]:
    """An untrained UNet as it ships, and the network packed from it; not to be changed.

    everything: first and last layer are quantised as well.
    """
    torch.manual_seed(0)
    model = build_unet(len(CLASSES), scale, digits)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.1 * torch.randn(parameter.shape)
    if recipe:
        prepare(model, recipe, include=["*"] if everything else None)
        calibrate(model, [images(2, seed=0)])
    round_to_deployed(model, rest_of(rest))
    graph, tensors = packed_graph(captured(scale, digits), model.eval(), digits, rest=rest_of(rest))
    return model, packed_file(Path("unet.fp4"), replace(card(recipe, scale, digits), rest=rest), graph, tensors)
