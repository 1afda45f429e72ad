"""`fp4deploy train`: FP16 and NVFP4 models in one loop, into a new run or on with an interrupted one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.runs import Run, latest_run, open_run

from .console import done, note, shown
from .settings import (
    ClassesOption,
    ConfigOption,
    DataOption,
    ModelsOption,
    OutOption,
    RecipeOption,
    ScratchOption,
    SetOption,
    TaskOption,
    parse_models,
    settings,
    start_run,
    tidy_on_failure,
)

if TYPE_CHECKING:
    from fp4deploy.train import Config, TrainResult


def train(
    data: DataOption = None,
    models: ModelsOption = "fp16,nvfp4",
    task: TaskOption = None,
    recipe: RecipeOption = None,
    classes: ClassesOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    out: OutOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the latest run, or the one given by --out.")
    ] = False,
    from_scratch: ScratchOption = False,
) -> None:
    """Train the models; without --data on generated shapes. Ctrl-C is safe: --resume continues."""
    chosen = parse_models(models)
    if resume:
        run = open_run(out) if out is not None else latest_run()
        resolved = settings(run.config_path, sets, data=data, classes=classes, recipe=recipe, task=task)
        note(f"Continuing {shown(run.path)}.")
        _report(run, _train(resolved, run, chosen, from_scratch, resume=True))
        return
    resolved = settings(config, sets, data=data, classes=classes, recipe=recipe, task=task)
    run, resolved = start_run(resolved, out)
    with tidy_on_failure(run):
        _report(run, _train(resolved, run, chosen, from_scratch, resume=False))


def _train(
    config: Config, run: Run, models: tuple[str, ...], from_scratch: bool, resume: bool
) -> dict[str, TrainResult]:
    from fp4deploy.train import train_models

    return train_models(config, run, models, from_scratch=from_scratch, resume=resume)


def _report(run: Run, trained: dict[str, TrainResult]) -> None:
    for model, result in trained.items():
        done(f"{model}: best {result.metric} {100 * result.best_score:.2f}, {shown(run.checkpoint(model))}")
    note("Export them with: fp4deploy export --format onnx")
