"""`--for rtx --arch sm120` of train and quantize: each layer in the precision that its engine will multiply it in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError, counted

from ... import completion
from ...console import note

if TYPE_CHECKING:
    from fp4deploy.models.card import ModelCard
    from fp4deploy.train import Config

Library = Literal["rtx", "tensorrt"]
BACKEND = {"rtx": "tensorrt-rtx", "tensorrt": "tensorrt"}

ForOption = Annotated[
    Library | None,
    typer.Option(
        "--for",
        help="Engine library to quantise for: each layer in the precision that build gives it with --conv auto.",
        show_default="NVFP4 as the recipe has it",
    ),
]
ArchOption = Annotated[
    str | None,
    typer.Option("--arch", help="GPU of --for.", show_default="sm120", autocompletion=completion.architectures),
]


def target_of(library: Library | None, arch: str | None) -> str | None:
    """What the options name, such as "rtx sm120"; None without them.

    Raises:
        InputError: no library, or one that multiplies no FP4 on that GPU.
    """
    from fp4deploy.export.engine.backends import BACKENDS
    from fp4deploy.export.engine.build import check_arch

    if library is None:
        if arch is not None:
            raise InputError("--arch names the GPU of --for. Give both: --for rtx --arch sm120")
        return None
    backend = BACKENDS[BACKEND[library]]
    chosen = check_arch(arch or "sm120", backend.name)
    if chosen not in backend.fp4_arches:
        raise InputError(
            f"{backend.title} multiplies no FP4 on {chosen}. Valid --arch values of --for {library}: "
            f"{', '.join(backend.fp4_arches)}."
        )
    return f"{library} {chosen}"


def with_formats(config: Config, target: str | None) -> Config:
    """The settings with `quant.fp8` for the target; those of a run that began with the same target are its own.

    Raises:
        InputError: they choose other layers already; as of `open_splits`.
    """
    from fp4deploy.train.models import model_card, open_splits
    from fp4deploy.train.volumes import sized

    quant = config.quant
    if target is None or quant.target == target:
        return config
    if quant.target is not None:
        raise InputError(f"The run was begun for {quant.target}. Resume it without --for, or begin another one.")
    if "fp8" in quant.selections:
        raise InputError("--for chooses the layers in FP8, and quant.fp8 names some too. Leave out one of them.")
    data, _ = open_splits(config)
    card: ModelCard = model_card(sized(config, data), "nvfp4", data)
    return config.model_copy(
        update={"quant": quant.model_copy(update={"fp8": list(layers_in_fp8(card, target)), "target": target})}
    )


def layers_in_fp8(card: ModelCard, target: str) -> tuple[str, ...]:
    """The layers that the card's recipe has in NVFP4 and the engine multiplies in FP8; what comes of it is printed."""
    import torch

    from fp4deploy.export.lowering.forecast import in_fp8
    from fp4deploy.models.build import network_for
    from fp4deploy.qat import layer_plan
    from fp4deploy.rest import rest_of

    network = network_for(card, "The configuration")
    image = torch.empty(2, *card.input_shape, device="meta")
    formats = card.formats | {"fp8": ()}
    plans = layer_plan(network, card.recipe, card.include, card.exclude, example_inputs=image, **formats)
    found = in_fp8(network, plans, "auto", rest_of(card))
    left = sum(plan.precision == "FP4" for plan in plans) - len(found)
    note(f"For {target}, --conv auto: {counted(len(found), 'layer')} in FP8, {left} in NVFP4.")
    return found
