"""`fp4deploy check`: the planned precision of each layer, with the reason, before training or building."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import InputError

from ..console import print_json, results
from ..settings import NamedModelOption, expect

if TYPE_CHECKING:
    from fp4deploy.qat import LayerPlan


def check(
    model: Annotated[
        str,
        typer.Argument(help="A model (unet:0.25, smp:Unet/resnet34, net.py:factory), a checkpoint, or an .onnx file."),
    ],
    recipe: Annotated[
        str, typer.Option("--recipe", help="Recipe to plan for (unet and FP16 checkpoints).")
    ] = "nvfp4_qat",
    classes: Annotated[int, typer.Option("--classes", min=1, help="Number of classes (unet only).")] = 21,
    digits: Annotated[
        bool, typer.Option("--digits", help="The first layer reads a multi-term FP4 encoding of the image (unet only).")
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="model.args.NAME=VALUE of a model; repeatable.", show_default="none"),
    ] = None,
    factory: NamedModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Show for each layer whether it runs in FP4 or FP16, and why."""
    expect(factory)
    plans = _plans(model, recipe, classes, digits, sets)
    if as_json:
        print_json({"model": model, "layers": [dataclasses.asdict(plan) for plan in plans]})
        return
    _print_table(model, plans)


def _plans(model: str, recipe: str, classes: int, digits: bool, sets: list[str] | None) -> list[LayerPlan]:
    path = Path(model)
    if not path.is_file() and path.suffix not in (".onnx", ".safetensors"):
        return _spec_plans(model, recipe, classes, digits, sets)
    if not path.is_file():
        raise InputError(
            f"There is no file {model}. check reads a model such as unet:0.25, a checkpoint or an .onnx file."
        )
    if path.suffix == ".onnx":
        return _onnx_plans(path)
    if path.suffix == ".safetensors":
        return _checkpoint_plans(path, recipe)
    raise InputError(f"check does not read {path.suffix or 'such'} files. Valid: unet, unet:0.25, .safetensors, .onnx.")


def _spec_plans(model: str, recipe: str, classes: int, digits: bool, sets: list[str] | None) -> list[LayerPlan]:
    from fp4deploy.models.build import build_model
    from fp4deploy.models.spec import parse_spec
    from fp4deploy.qat import layer_plan
    from fp4deploy.train import load_config

    chosen = load_config(None, sets or []).model
    return layer_plan(build_model(parse_spec(model, chosen.args, chosen.output), classes, digits=digits), recipe)


def _checkpoint_plans(path: Path, recipe: str) -> list[LayerPlan]:
    from fp4deploy.models import load_weights, read_card
    from fp4deploy.models.checkpoint import network_of
    from fp4deploy.qat import layer_plan, prepare_as

    card = read_card(path)
    model = network_of(path, card)
    if card.precision == "nvfp4":
        prepare_as(model, card)
    load_weights(model, path)
    return layer_plan(model, card.recipe or recipe)


def _onnx_plans(path: Path) -> list[LayerPlan]:
    from fp4deploy.export import read_onnx
    from fp4deploy.export.onnx.layers import planned_layers
    from fp4deploy.qat import LayerPlan

    layers = planned_layers(read_onnx(path))
    if not layers:
        raise InputError(f"{path} has no layer plan in its metadata. Write it with: fp4deploy export")
    return [
        LayerPlan(name, layer.get("kind", ""), layer.get("precision", ""), layer.get("reason", ""))
        for name, layer in layers.items()
    ]


def _print_table(model: str, plans: list[LayerPlan]) -> None:
    from rich.table import Table

    table = Table("layer", "kind", "precision", "reason", box=None, pad_edge=False)
    for plan in plans:
        style = "green" if plan.precision == "FP4" else None
        table.add_row(plan.name, plan.kind, plan.precision, plan.reason, style=style)
    console = results()
    console.print(table)
    quantised = sum(plan.precision == "FP4" for plan in plans)
    console.print(f"\n{model}: {quantised} of {len(plans)} layers in FP4.", markup=False)
