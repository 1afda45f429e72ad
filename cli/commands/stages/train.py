"""`fp4deploy train`: FP16 and NVFP4 models in one loop, into a new run or on with an interrupted one."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.runs import RUNS, Run, hold, is_first_process, latest_run, open_run

from ...console import done, note, shown, typed
from ...settings import (
    DEFAULT,
    MODELS_HELP,
    BatchSizeOption,
    ClassesOption,
    ConfigOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    EveryOption,
    Flags,
    InitOption,
    ModelOption,
    OutOption,
    RecipeOption,
    ScratchOption,
    SetOption,
    SizeOption,
    TaskOption,
    TrackerOption,
    new_run,
    parse_models,
    require_used,
    settings,
)
from ..results.telemetry import show_drawn
from .engine_formats import ArchOption, ForOption, target_of, with_formats
from .estimate import run_estimate

if TYPE_CHECKING:
    from fp4deploy.train import Config, TrainResult


def train(
    data: DataOption = None,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=MODELS_HELP,
            show_default=f"{DEFAULT}; with --resume those the run was asked for",
        ),
    ] = None,
    task: TaskOption = None,
    recipe: RecipeOption = None,
    classes: ClassesOption = None,
    config: ConfigOption = None,
    epochs: EpochsOption = None,
    batch_size: BatchSizeOption = None,
    size: SizeOption = None,
    device: DeviceOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the latest run, or the one given by --out.")
    ] = False,
    from_scratch: ScratchOption = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate the time, as fp4deploy estimate does.")
    ] = False,
    telemetry_every: EveryOption = None,
    tracker: TrackerOption = None,
    model: ModelOption = None,
    init: InitOption = None,
    engine: ForOption = None,
    arch: ArchOption = None,
) -> None:
    """Train the models; without --data on generated shapes. Ctrl-C is safe: --resume continues."""
    chosen = parse_models(DEFAULT if models is None else models)
    target = target_of(engine, arch)
    flags: Flags = {"data": data, "classes": classes, "recipe": recipe, "task": task, "every": telemetry_every}
    flags |= {"trackers": tracker, "model": model, "init": init}
    flags |= {"epochs": epochs, "batch_size": batch_size, "size": size}
    if from_scratch:
        sets = [*(sets or []), "train.from_scratch=true"]
    if dry_run:
        resolved = settings(config, sets, **flags)
        require_used(epochs, resolved, chosen)
        run_estimate(with_formats(resolved, target), chosen)
        return
    if resume:
        run = open_run(out) if out is not None else latest_run()
        resolved = settings(run.config_path, sets, **flags)
        if models is None:
            chosen = run.asked_models() or chosen
        require_used(epochs, resolved, chosen)
        with hold(run.path):
            resolved = with_formats(resolved, target)
            aimed = f", for {resolved.quant.target}" if resolved.quant.target else ""
            note(f"Continuing {shown(run.path)}: {', '.join(chosen)}{aimed}.")
            _record(run)
            _report(run, _train(resolved, run, chosen, from_scratch, resume=True), resolved)
        return
    asked = settings(config, sets, **flags)
    require_used(epochs, asked, chosen)
    with new_run(asked, out) as (run, resolved):
        resolved = with_formats(resolved, target)
        _report(run, _train(resolved, run, chosen, from_scratch, resume=False), resolved)


def _train(
    config: Config, run: Run, models: tuple[str, ...], from_scratch: bool, resume: bool
) -> dict[str, TrainResult]:
    from fp4deploy.train import train_models

    return train_models(config, run, models, from_scratch=from_scratch, resume=resume)


def _record(run: Run) -> None:
    from fp4deploy.bench.commands import record

    if is_first_process():
        record(run)


def _report(run: Run, trained: dict[str, TrainResult], config: Config) -> None:
    from fp4deploy.report.telemetry_page import draw_trained
    from fp4deploy.system.progress import progress

    for model, result in trained.items():
        done(
            f"{model}: best {result.metric} {result.best_text}, {shown(run.checkpoint(model))}",
            model=model,
            checkpoint=str(run.checkpoint(model)),
            metric=result.metric,
            best_points=round(100 * result.best_score, 4) if result.best_score >= 0 else None,
            epochs=result.epochs,
            seconds=round(result.seconds, 3),
        )
    if is_first_process():
        with progress("drawing") as bar:
            drawn = draw_trained(run, list(trained), config.telemetry, bar.phase)
        show_drawn(run, drawn)
    note(f"Export them with: {_export_command(run, config)}")


def _export_command(run: Run, config: Config) -> str:
    """The command with what it would not find by itself: a run elsewhere than under runs/, a network of the user."""
    from fp4deploy.models.spec import parse_spec

    elsewhere = run.path.resolve().parent != RUNS.resolve()
    own = not parse_spec(config.model.spec).known
    return " ".join(
        [
            "fp4deploy export",
            *([typed(run.path)] if elsewhere else []),
            "--format onnx",
            *([f"--model {shlex.quote(config.model.spec)}"] if own else []),
        ]
    )
