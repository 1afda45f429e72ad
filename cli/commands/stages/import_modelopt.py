"""`fp4deploy import-modelopt`: a model that NVIDIA ModelOpt quantised to a checkpoint of this project."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import InputError

from ...artifacts import next_commands
from ...console import done, note, results, shown, table
from ...settings import NamedModelOption, expect


def import_modelopt(
    source: Annotated[Path, typer.Argument(help="File of modelopt.torch.opt.save (.pt, .pth).")],
    like: Annotated[
        Path, typer.Option("--like", help="FP16 checkpoint of the network that ModelOpt quantised, for its card.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", help="Checkpoint to write.", show_default="NAME.safetensors beside the file")
    ] = None,
    model: NamedModelOption = None,
) -> None:
    """Take over weights, amaxes and formats, and say layer by layer what is not kept."""
    expect(model)
    from fp4deploy import provenance
    from fp4deploy.interop.modelopt import from_modelopt, read_modelopt
    from fp4deploy.models import read_card, save_checkpoint
    from fp4deploy.models.checkpoint import network_of
    from fp4deploy.ptq.checkpoint import quantized_card

    target = out or source.with_suffix(".safetensors")
    if target.suffix != ".safetensors" or (target.exists() and like.exists() and target.samefile(like)):
        raise InputError(f"--out {target} should be a .safetensors file, and another one than {like}.")
    quantized = read_modelopt(source)
    card = read_card(like)
    if card.precision != "fp16":
        raise InputError(f"{like} is {card.precision}. Give the FP16 checkpoint of the same network: --like FILE")
    network = network_of(like, card)
    found = from_modelopt(network, quantized)
    kept = [each for each in found if each.precision != "FP16"]
    names, eight = (
        tuple(each.layer for each in kept if each.precision in wanted) for wanted in (("FP4", "FP8"), ("FP8",))
    )
    save_checkpoint(target, network, quantized_card(card, "nvfp4_qat", names, None, fp8=eight or None))
    provenance.record("import-modelopt", target, [like, source])
    rows = [(each.layer, each.precision, "; ".join(each.lost) or "-") for each in found]
    results().print(table(("layer", "precision", "not kept"), rows))
    done(
        f"{shown(target)} ({len(kept)} of {len(found)} quantised layers, {len(eight)} of them in FP8)",
        checkpoint=str(target),
        layers={each.layer: {"precision": each.precision, "not_kept": each.lost} for each in found},
    )
    note(next_commands(target, like, _data(like), model, given=False))


def _data(checkpoint: Path) -> Path | None:
    """The data of the run that the checkpoint lies in, if there is one and has them."""
    from fp4deploy.bench.locate import data_of
    from fp4deploy.runs import run_of

    with suppress(InputError):
        return data_of(checkpoint) if run_of(checkpoint) is not None else None
    return None
