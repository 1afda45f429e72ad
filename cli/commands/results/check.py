"""`fp4deploy check`: the planned precision of each layer, and what an engine makes of it, before training."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import Fp4DeployError, InputError, counted, named_cause
from fp4deploy.export.ledger.shares import shares_of

from ... import completion
from ...console import print_json, results, table
from ...settings import NamedModelOption, expect, parse_axes
from ..stages import nnunet

if TYPE_CHECKING:
    from torch import Tensor, nn

    from fp4deploy.export.lowering.forecast import Forecast
    from fp4deploy.models.volumes import NetworkInput
    from fp4deploy.qat import LayerPlan


@dataclass(frozen=True)
class Asked:
    """The options by which a model is built."""

    recipe: str
    size: tuple[int, ...] | None
    classes: int | None
    task: str
    digits: bool
    sets: list[str]


@dataclass(frozen=True)
class Subject:
    """What is checked: its plan, what each layer becomes under a `--conv` mode of a library, its multiply-accumulates.

    macs: of each layer for one image; None where they are not known, and `unknown` says why.
    """

    plans: list[LayerPlan]
    forecasts: Callable[[str, str], list[Forecast]]
    macs: dict[str, int] | None
    unknown: str = ""

    def shares(self, precisions: Iterable[str]) -> dict[str, float]:
        """Of the multiply-accumulates, for the precision of each layer in the plan's order."""
        pairs = zip(self.plans, precisions, strict=True)
        return shares_of((precision, (self.macs or {}).get(plan.name, 0)) for plan, precision in pairs)


def check(
    model: Annotated[
        str,
        typer.Argument(
            help="A model (unet:0.25, smp:Unet/resnet34, hf:vit, net.py:factory), a checkpoint, an .onnx file, or a "
            "results folder of nnU-Net."
        ),
    ],
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe", help="Recipe to plan for (unet and FP16 checkpoints).", autocompletion=completion.recipes
        ),
    ] = "nvfp4_qat",
    classes: Annotated[
        int | None,
        typer.Option("--classes", min=1, help="Number of classes of a named model.", show_default="21, or what it has"),
    ] = None,
    task: Annotated[
        Literal["semantic", "classification"],
        typer.Option("--task", help="What a named model is built for: maps of logits, or one class an image."),
    ] = "semantic",
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
    size: Annotated[
        str | None,
        typer.Option("--size", help="HxW or DxHxW that shares are of.", show_default="the checkpoint's, or 256x256"),
    ] = None,
    factory: NamedModelOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Show for each layer whether it is quantised, what an engine multiplies it in, and why."""
    expect(factory)
    from fp4deploy.export.lowering.lower import CONV_MODES, check_conv_mode

    check_conv_mode(conv, target)
    subject = _subject(model, Asked(recipe, parse_axes(size), classes, task, digits, sets or []))
    forecasts = {each: subject.forecasts(each, _library(each, target)) for each in CONV_MODES}
    engine = forecasts[conv]
    forms = {each: subject.shares(layer.compute for layer in found) for each, found in forecasts.items()}
    if as_json:
        layers = [
            {**dataclasses.asdict(plan), "engine": found.compute, "engine_reason": found.reason}
            | ({"macs": subject.macs.get(plan.name, 0)} if subject.macs else {})
            for plan, found in zip(subject.plans, engine, strict=True)
        ]
        shares = {"requested": subject.shares(plan.precision for plan in subject.plans), "conv": forms}
        unknown = {"shares_unknown": subject.unknown} if subject.unknown else {}
        print_json({"model": model, "target": target, "conv": conv, "layers": layers, "shares": shares, **unknown})
        return
    _print_table(subject, engine)
    _print_forms(model, subject, engine, forms, target, conv)


def _library(conv: str, target: str) -> str:
    return "tensorrt" if conv == "plugin" else target


def _subject(model: str, asked: Asked) -> Subject:
    path = Path(model)
    if nnunet.is_folder(path):
        network, plans, patch, rest = nnunet.subject(path, asked.recipe)
        return _of_network(network, plans, patch, named=rest)
    if not path.is_file() and path.suffix not in (".onnx", ".safetensors"):
        return _of_spec(model, asked)
    if not path.is_file():
        raise InputError(
            f"There is no file {model}. check reads a model such as unet:0.25, a checkpoint or an .onnx file."
        )
    if path.suffix == ".onnx":
        return _of_onnx(path)
    if path.suffix == ".safetensors":
        return _of_checkpoint(path, asked.recipe, asked.size)
    raise InputError(
        f"check does not read {path.suffix or 'such'} files. Valid: unet, unet:0.25, net.py:make (the network of a "
        "state dict), .safetensors, .onnx."
    )


def _example(shape: tuple[int, ...]) -> Tensor:
    import torch

    return torch.zeros(1, *shape)


def _of_network(network: nn.Module, plans: list[LayerPlan], example: Tensor, named: str = "fp16") -> Subject:
    from fp4deploy.export.lowering.forecast import Forecast, forecast, forecast_other
    from fp4deploy.graph.costs import MULTIPLYING, work_of_layers
    from fp4deploy.rest import FP16, rest_of

    rest = rest_of(named)
    plans = [
        dataclasses.replace(plan, precision=rest.label) if plan.precision == FP16.label else plan for plan in plans
    ]

    def of(plan: LayerPlan, conv: str) -> Forecast:
        if plan.precision == rest.label:
            return Forecast(rest.label, rest.label, plan.reason)
        layer = network.get_submodule(plan.name)
        return forecast(layer, conv, rest) if plan.precision == "FP4" else forecast_other(layer, plan.precision, rest)

    modules = {plan.name: network.get_submodule(plan.name) for plan in plans}
    multiplying = {name: layer for name, layer in modules.items() if isinstance(layer, MULTIPLYING)}
    macs, unknown = None, ""
    try:
        macs = {name: work.macs for name, work in work_of_layers(network.eval(), multiplying, example).items()}
    except Exception as error:  # the network's own code, on a size that nobody gave
        cause = str(error) if isinstance(error, Fp4DeployError) else named_cause(error)
        unknown = (
            f"the network fails on images of {'x'.join(map(str, example.shape[2:]))} (--size names another): {cause}"
        )
    return Subject(plans, lambda conv, _: [of(plan, conv) for plan in plans], macs, unknown)


def _inputs(size: tuple[int, ...]) -> NetworkInput:
    """What a network that is named by its spec reads: RGB images, or volumes of cubes."""
    from fp4deploy.models.volumes import VOLUME, NetworkInput

    return NetworkInput(size=size, spacing=(1.0,) * VOLUME if len(size) == VOLUME else None)


def _of_spec(model: str, asked: Asked) -> Subject:
    from fp4deploy.models.build import build_model
    from fp4deploy.models.heads import ClassHead
    from fp4deploy.models.output import LogitsOutput
    from fp4deploy.models.spec import parse_spec
    from fp4deploy.qat import layer_plan
    from fp4deploy.tasks import TASKS
    from fp4deploy.train import load_config

    chosen = load_config(None, asked.sets).model
    inputs, classes = _inputs(asked.size or (256, 256)), asked.classes or 21
    head = ClassHead("label", classes) if TASKS[asked.task].whole_images else None
    spec = parse_spec(model, chosen.args, chosen.output)
    network = build_model(spec, classes, digits=asked.digits, head=head, inputs=inputs)
    if asked.classes is None and isinstance(network, LogitsOutput):
        network.logits_channels = None
    return _of_network(network, layer_plan(network, asked.recipe), _example((inputs.channels, *inputs.size)))


def _of_checkpoint(path: Path, recipe: str, size: tuple[int, ...] | None) -> Subject:
    from fp4deploy.models import load_weights, read_card
    from fp4deploy.models.checkpoint import network_of
    from fp4deploy.qat import layer_plan, prepare_as

    card = read_card(path)
    model = network_of(path, card)
    if card.precision == "nvfp4":
        prepare_as(model, card)
    load_weights(model, path)
    plans = layer_plan(model, card.recipe or recipe)
    shape = (card.resized(size) if size else card).input_shape
    return _of_network(model, plans, _example(shape), named=card.rest)


def _of_onnx(path: Path) -> Subject:
    from fp4deploy.export import read_onnx
    from fp4deploy.export.lowering.forecast import Forecast
    from fp4deploy.export.lowering.lower import lower
    from fp4deploy.export.onnx.layers import planned_layers
    from fp4deploy.qat import LayerPlan

    graph = read_onnx(path)
    layers = planned_layers(graph)
    if not layers:
        raise InputError(f"{path} has no layer plan in its metadata. Write it with: fp4deploy export")

    def forecasts(conv: str, target: str) -> list[Forecast]:
        lowered = {layer.name: layer for layer in lower(graph, conv, target).layers}
        return [Forecast(lowered[name].compute, lowered[name].weights, lowered[name].reason) for name in layers]

    plans = [
        LayerPlan(name, layer.get("kind", ""), layer.get("precision", ""), layer.get("reason", ""))
        for name, layer in layers.items()
    ]
    macs = {layer.name: layer.macs for layer in lower(graph, "qdq", "tensorrt").layers}
    return Subject(plans, forecasts, macs)


def _print_table(subject: Subject, engine: list[Forecast]) -> None:
    listed = table(("layer", "kind", "precision", "engine", "reason"))
    for plan, found in zip(subject.plans, engine, strict=True):
        style = "green" if found.compute == "FP4" else "yellow" if plan.precision == "FP4" else None
        reason = plan.reason if found.compute == plan.precision else f"{plan.reason}; {found.reason}"
        listed.add_row(plan.name, plan.kind, plan.precision, found.compute, reason, style=style)
    results().print(listed)


def _print_forms(
    model: str, subject: Subject, engine: list[Forecast], forms: dict[str, dict[str, float]], target: str, conv: str
) -> None:
    """What was asked for, what an engine gives, and what it would give in every other form."""
    from fp4deploy.export.engine.backends import BACKENDS
    from fp4deploy.export.ledger.ledger import BITS
    from fp4deploy.precisions import OF_ENGINES

    console = results()

    def say(text: str) -> None:
        console.print(text, markup=False, soft_wrap=True)

    asked = Counter(plan.precision for plan in subject.plans if plan.precision in OF_ENGINES)
    quantised = ", ".join(f"{number} quantised to {name}" for name, number in asked.items()) or "none quantised"
    say(f"\n{model}: {counted(len(subject.plans), 'layer')}, {quantised}.")
    pairs = zip(subject.plans, engine, strict=True)
    got = Counter(found.compute for plan, found in pairs if plan.precision in asked)
    if got:
        made = " and ".join(f"{number} in {name}" for name, number in sorted(got.items()))
        say(f"Of these, {BACKENDS[target].title} with --conv {conv} multiplies {made}.")
    if subject.macs is None:
        say(f"Shares of the multiply-accumulates are not known: {subject.unknown}")
        return
    say("Shares of the multiply-accumulates, as the plan is (build says what the compiler made of it):\n")
    rows = {"requested": ("", subject.shares(plan.precision for plan in subject.plans))}
    rows |= {f"--conv {each}": (BACKENDS[_library(each, target)].title, shares) for each, shares in forms.items()}
    precisions = sorted(
        {each for _, shares in rows.values() for each in shares}, key=lambda each: (BITS.get(each, 0), each)
    )
    listed = table(("form", "library", *precisions))
    for name, (library, shares) in rows.items():
        cells = (f"{100 * shares[each]:.1f} %" if each in shares else "-" for each in precisions)
        listed.add_row(name, library, *cells, style="bold" if name == f"--conv {conv}" else None)
    console.print(listed)
