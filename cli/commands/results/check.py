"""`fp4deploy check`: the planned precision of each layer, and what an engine makes of it, before training."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError

from ... import completion
from ...console import print_json, results
from ...settings import NamedModelOption, expect

if TYPE_CHECKING:
    from torch import nn

    from fp4deploy.export.lowering.forecast import Forecast
    from fp4deploy.qat import LayerPlan

RULES = {"tensorrt-rtx": "TensorRT-RTX", "tensorrt": "TensorRT"}


def check(
    model: Annotated[
        str,
        typer.Argument(help="A model (unet:0.25, smp:Unet/resnet34, net.py:factory), a checkpoint, or an .onnx file."),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", help="Recipe to plan for (unet and FP16 checkpoints).", autocompletion=completion.recipes
        ),
    ] = "nvfp4_qat",
    classes: Annotated[int, typer.Option("--classes", min=1, help="Number of classes (unet only).")] = 21,
    digits: Annotated[
        bool, typer.Option("--digits", help="The first layer reads a multi-term FP4 encoding of the image (unet only).")
    ] = False,
    sets: Annotated[
        list[str] | None,
        typer.Option("--set", help="model.args.NAME=VALUE of a model; repeatable.", show_default="none"),
    ] = None,
    target: Annotated[
        Literal["tensorrt-rtx", "tensorrt"], typer.Option("--target", help="Engine library of the forecast.")
    ] = "tensorrt-rtx",
    conv: Annotated[
        Literal["auto", "qdq", "gemm", "fp8", "plugin"],
        typer.Option("--conv", help="As of build."),
    ] = "auto",
    factory: NamedModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Show for each layer whether it is quantised, what an engine multiplies it in, and why."""
    expect(factory)
    from fp4deploy.export.lowering.lower import check_conv_mode

    check_conv_mode(conv, target)
    plans = _plans(model, recipe, classes, digits, sets, conv, target)
    if as_json:
        layers = [
            {**dataclasses.asdict(plan), "engine": engine.compute, "engine_reason": engine.reason}
            for plan, engine in plans
        ]
        print_json({"model": model, "target": target, "conv": conv, "layers": layers})
        return
    _print_table(model, plans, f"{RULES[target]} with --conv {conv}")


Planned = list[tuple["LayerPlan", "Forecast"]]


def _plans(
    model: str, recipe: str, classes: int, digits: bool, sets: list[str] | None, conv: str, target: str
) -> Planned:
    path = Path(model)
    if not path.is_file() and path.suffix not in (".onnx", ".safetensors"):
        return _spec_plans(model, recipe, classes, digits, sets, conv)
    if not path.is_file():
        raise InputError(
            f"There is no file {model}. check reads a model such as unet:0.25, a checkpoint or an .onnx file."
        )
    if path.suffix == ".onnx":
        return _onnx_plans(path, conv, target)
    if path.suffix == ".safetensors":
        return _checkpoint_plans(path, recipe, conv)
    raise InputError(f"check does not read {path.suffix or 'such'} files. Valid: unet, unet:0.25, .safetensors, .onnx.")


def _forecasts(network: nn.Module, plans: list[LayerPlan], conv: str) -> Planned:
    from fp4deploy.export.lowering.forecast import Forecast, forecast, forecast_fp8

    def of(plan: LayerPlan) -> Forecast:
        if plan.precision == "FP16":
            return Forecast("FP16", "FP16", plan.reason)
        layer = network.get_submodule(plan.name)
        return forecast(layer, conv) if plan.precision == "FP4" else forecast_fp8(layer)

    return [(plan, of(plan)) for plan in plans]


def _spec_plans(model: str, recipe: str, classes: int, digits: bool, sets: list[str] | None, conv: str) -> Planned:
    from fp4deploy.models.build import build_model
    from fp4deploy.models.spec import parse_spec
    from fp4deploy.qat import layer_plan
    from fp4deploy.train import load_config

    chosen = load_config(None, sets or []).model
    network = build_model(parse_spec(model, chosen.args, chosen.output), classes, digits=digits)
    return _forecasts(network, layer_plan(network, recipe), conv)


def _checkpoint_plans(path: Path, recipe: str, conv: str) -> Planned:
    from fp4deploy.models import load_weights, read_card
    from fp4deploy.models.checkpoint import network_of
    from fp4deploy.qat import layer_plan, prepare_as

    card = read_card(path)
    model = network_of(path, card)
    if card.precision == "nvfp4":
        prepare_as(model, card)
    load_weights(model, path)
    return _forecasts(model, layer_plan(model, card.recipe or recipe), conv)


def _onnx_plans(path: Path, conv: str, target: str) -> Planned:
    from fp4deploy.export import read_onnx
    from fp4deploy.export.lowering.forecast import Forecast
    from fp4deploy.export.lowering.lower import lower
    from fp4deploy.export.onnx.layers import planned_layers
    from fp4deploy.qat import LayerPlan

    graph = read_onnx(path)
    layers = planned_layers(graph)
    if not layers:
        raise InputError(f"{path} has no layer plan in its metadata. Write it with: fp4deploy export")
    lowered = {layer.name: layer for layer in lower(graph, conv, target).layers}
    return [
        (
            LayerPlan(name, layer.get("kind", ""), layer.get("precision", ""), layer.get("reason", "")),
            Forecast(lowered[name].compute, lowered[name].weights, lowered[name].reason),
        )
        for name, layer in layers.items()
    ]


def _print_table(model: str, plans: Planned, engine: str) -> None:
    from rich.table import Table

    table = Table("layer", "kind", "precision", "engine", "reason", box=None, pad_edge=False)
    for plan, found in plans:
        style = "green" if found.compute == "FP4" else "yellow" if plan.precision == "FP4" else None
        reason = plan.reason if found.compute == plan.precision else f"{plan.reason}; {found.reason}"
        table.add_row(plan.name, plan.kind, plan.precision, found.compute, reason, style=style)
    console = results()
    console.print(table)
    quantised = [found for plan, found in plans if plan.precision == "FP4"]
    other = "FP8" if any(found.compute == "FP8" for found in quantised) else "FP16 with FP4 weights"
    multiplied = sum(found.compute == "FP4" for found in quantised)
    eight = sum(plan.precision == "FP8" for plan, _ in plans)
    in_fp8 = f" {eight} more {'is' if eight == 1 else 'are'} quantised to FP8." if eight else ""
    console.print(
        f"\n{model}: {len(quantised)} of {len(plans)} layers quantised to FP4. {engine} multiplies {multiplied} "
        f"of them in FP4 and {len(quantised) - multiplied} in {other}.{in_fp8}",
        markup=False,
        soft_wrap=True,
    )
