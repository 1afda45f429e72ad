"""From an FP16 checkpoint to an NVFP4 one: calibration images, quantisation, the card."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4deploy.data.sample import TRAIN
from fp4deploy.errors import InputError
from fp4deploy.models import ModelCard, load_weights, read_card, save_checkpoint
from fp4deploy.models.checkpoint import network_of
from fp4deploy.models.spec import UNET
from fp4deploy.precisions import LAYER_FORMATS
from fp4deploy.ptq.forward import deployed_in
from fp4deploy.ptq.quantize import Result, quantize
from fp4deploy.qat.selection import Selection
from fp4deploy.qat.sensitive import with_sensitive
from fp4deploy.rest import rest_of
from fp4deploy.tasks import image_batches, images_for


def calibration_images(checkpoint: Path, data: Path, count: int, batch: int = 4) -> Iterator[Tensor]:
    """`count` images of the training split, evenly spaced, sized and normalised as the checkpoint's card says.

    Calibration sees no image that the result is measured on. A plain folder of images will do (`data.photos`).

    Raises:
        InputError: not a checkpoint, or data that does not fit it.
    """
    card = read_card(checkpoint)
    return image_batches(card, images_for(card, data, TRAIN, known=True), count, batch)


def quantize_checkpoint(
    checkpoint: Path,
    images: Iterable[Tensor],
    out: Path,
    method: str = "gptq",
    device: str = "cpu",
    digits: bool = False,
    rest: str | None = None,
    target: str | None = None,
    **options: Any,
) -> Result:
    """Quantise an FP16 checkpoint and write the NVFP4 one, with its card; options as of `quantize`.

    digits: a UNet that reads RGB gets the multi-term FP4 input encoding first, its weights as they are.
    rest: what is not quantised is deployed in, and the network run in on a GPU meanwhile (`fp4deploy.rest`); None: as
        the checkpoint's card says.
    target: kept in the card (`ModelCard.target`): the engine that the option `fp8` was chosen for.

    Raises:
        InputError: it is not an FP16 checkpoint, `digits` of another network, or as `quantize`; `out` cannot be
            written.
    """
    card = read_card(checkpoint)
    if card.precision != "fp16":
        raise InputError(f"{checkpoint} is {card.precision} already. Give the FP16 checkpoint it was made of.")
    chosen = {name: options.get(name) for name in ("include", "exclude", *LAYER_FORMATS)}
    quantized = quantized_card(card, "", **chosen)
    network = network_of(checkpoint, card)
    load_weights(network, checkpoint)
    if digits and not card.digits:
        network = _encoded(checkpoint, card)
        quantized = replace(quantized, digits=True)
    quantized = replace(quantized, rest=rest_of(rest or card).name, target=target)
    network.to(device).eval()
    with deployed_in(rest_of(quantized)):
        result = quantize(network, [batch.to(device) for batch in images], method, **options)
    for form, names in result.sensitive.items():
        quantized = with_sensitive(quantized, form, names)
    save_checkpoint(out, network, replace(quantized, recipe=result.recipe))
    return result


def _encoded(checkpoint: Path, card: ModelCard) -> torch.nn.Module:
    from fp4deploy.models import build_unet

    if card.spec.source != UNET:
        raise InputError(f"--digits is for the built-in UNet, and {checkpoint} is {card.architecture}.")
    network = build_unet(card.channels, card.scale, digits=True)
    load_weights(network, checkpoint, to_encoding=True)
    return network


def quantized_card(
    card: ModelCard,
    recipe: str,
    include: Selection = None,
    exclude: Selection = None,
    **formats: Selection,
) -> ModelCard:
    """The card of a quantised model; layers are chosen by patterns there, not by functions."""
    return replace(
        card,
        precision="nvfp4",
        recipe=recipe,
        include=_patterns(include),
        exclude=_patterns(exclude),
        formats={name: patterns for name, each in formats.items() if (patterns := _patterns(each)) is not None},
    )


def _patterns(selection: Selection) -> tuple[str, ...] | None:
    if callable(selection):
        raise InputError("A checkpoint keeps which layers were chosen as patterns of names, not as a function.")
    return None if selection is None else (selection,) if isinstance(selection, str) else tuple(selection)
