"""`fp4deploy telemetry`: heatmaps of what a training tracked; what NVFP4 costs in each tensor and layer of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import InputError, counted
from fp4deploy.runs import Run, latest_run, open_run

from ... import completion
from ...console import done, note, shown, typed
from ...deferred import deferred
from ...settings import NamedModelOption, NetworkOption, expect

app = typer.Typer(help="Heatmaps of a training; errors of its layers; kurtosis of its tensors.", no_args_is_help=True)


CheckpointArgument = Annotated[
    Path | None, typer.Argument(help="Checkpoint.", show_default="nvfp4, else fp16, of the latest run")
]
DataOption = Annotated[
    Path | None, typer.Option("--data", help="Dataset folder.", show_default="what the run was trained on")
]
ImagesOption = Annotated[int, typer.Option("--images", min=1, help="Validation images to use.")]


@deferred(app, "plot")
def plot(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder.", show_default="the latest run", autocompletion=completion.runs),
    ] = None,
    model: Annotated[str | None, typer.Option("--model", help="Only this model.", show_default="all")] = None,
    network: NetworkOption = None,
) -> None:
    """Draw every heatmap of a run from its telemetry.jsonl and checkpoints, under plots/heatmaps/<model>/."""
    expect(network, "--network")
    from fp4deploy.report.telemetry_page import draw_telemetry_of
    from fp4deploy.system.progress import progress

    found = open_run(run) if run is not None else latest_run()
    models = _tracked(found)
    if model is not None and model not in models:
        raise InputError(f"{shown(found.path)} holds no telemetry of '{model}'; it has: {', '.join(models) or 'none'}.")
    if not models:
        raise InputError(
            f"{shown(found.path)} holds no telemetry. Train with telemetry: fp4deploy train --telemetry-every 200"
        )
    with progress("drawing") as bar:
        drawn = draw_telemetry_of(found, [model] if model else models, bar.phase)
    show_drawn(found, drawn)


@deferred(app, "study")
def study(
    checkpoint: CheckpointArgument = None,
    data: DataOption = None,
    images: ImagesOption = 16,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for kurtosis.{json,md,png}.", show_default="the run's plots/")
    ] = None,
    model: NamedModelOption = None,
) -> None:
    """Say which tensors NVFP4 quantises badly, and what each layer alone in NVFP4 does to the output."""
    expect(model)
    from fp4deploy.bench.locate import data_of
    from fp4deploy.experiments.sensitivity.files import render_study, save_study
    from fp4deploy.experiments.sensitivity.study import study_images, study_kurtosis
    from fp4deploy.system.progress import progress

    path = checkpoint or _default_checkpoint()
    with progress("every layer alone in NVFP4"):
        found = study_kurtosis(path, study_images(path, data or data_of(path), images), on_gpu=True)
    _say(render_study(found).split("Each layer")[0].strip(), save_study(found, out or _plots(path, "kurtosis")))


@deferred(app, "layers")
def layers(
    checkpoint: CheckpointArgument = None,
    data: DataOption = None,
    images: ImagesOption = 16,
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="NVFP4 recipe.", show_default="the checkpoint's, else nvfp4_qat")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for layers.{json,md,png}.", show_default="the run's plots/")
    ] = None,
    model: NamedModelOption = None,
) -> None:
    """Say which error each layer in NVFP4 adds: by its input, its weight and block scales, and from which channels."""
    expect(model)
    from fp4deploy.bench.locate import data_of
    from fp4deploy.experiments.sensitivity.layer_files import render_layers, save_layers
    from fp4deploy.experiments.sensitivity.layers import study_layers
    from fp4deploy.experiments.sensitivity.study import study_images
    from fp4deploy.system.progress import progress

    path = checkpoint or _default_checkpoint()
    with progress("every layer alone, by operand"):
        found = study_layers(path, study_images(path, data or data_of(path), images), recipe, on_gpu=True)
    _say(render_layers(found).strip(), save_layers(found, out or _plots(path, "layers")))


def _plots(checkpoint: Path, kind: str) -> Path:
    """The folder of a study in the run that a checkpoint is of."""
    whole = checkpoint.resolve()
    return whole.parents[1] / "plots" / kind / whole.parent.name


def _say(text: str, files: list[Path]) -> None:
    done(text)
    for file in files:
        done(shown(file), file=str(file))


def show_drawn(run: Run, drawn: dict[str, list[Path]]) -> None:
    """Print where the heatmaps of each model are."""
    from fp4deploy.report.figures.telemetry import heatmap_folder
    from fp4deploy.report.telemetry_page import page_path

    for model, files in drawn.items():
        note(f"{model}: {counted(len(files), 'heatmap file')} under {shown(heatmap_folder(run, model))}")
    if page_path(run).is_file():
        more = "" if drawn else f"; as single files: fp4deploy telemetry plot {typed(run.path)}"
        note(f"All heatmaps on one page: {shown(page_path(run))}{more}")


def _tracked(run: Run) -> list[str]:
    return sorted(path.parent.name for path in run.path.glob("*/telemetry.jsonl"))


def _default_checkpoint() -> Path:
    run = latest_run()
    for model in ("nvfp4", *run.models()):
        if run.checkpoint(model).is_file():
            return run.checkpoint(model)
    raise InputError(f"{shown(run.path)} has no checkpoint yet. Train one with: fp4deploy train")
