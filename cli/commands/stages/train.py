"""`fp4deploy train`: FP16 and NVFP4 models in one loop, into a new run or on with an interrupted one."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.runs import RUNS, Run, hold, is_first_process, latest_run, open_run

from ...console import done, note, shown, typed
from ...settings import DEFAULT, TrainingOptions, new_run, parse_models, require_used, settings
from ..results.telemetry import show_drawn
from .engine_formats import ArchOption, ForOption, target_of, with_formats
from .estimate import run_estimate

if TYPE_CHECKING:
    from fp4deploy.train import Config, TrainResult


def train(
    options: TrainingOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the latest run, or the one given by --out.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only estimate the time, as fp4deploy estimate does.")
    ] = False,
    engine: ForOption = None,
    arch: ArchOption = None,
) -> None:
    """Train the models; without --data on generated shapes. Ctrl-C is safe: --resume continues."""
    chosen = parse_models(DEFAULT if options.models is None else options.models)
    target = target_of(engine, arch)
    if resume and not dry_run:
        run = open_run(options.out) if options.out is not None else latest_run()
        resolved = settings(replace(options, config=run.config_path))
        if options.models is None:
            chosen = run.asked_models() or chosen
        require_used(options.epochs, resolved, chosen)
        with hold(run.path):
            resolved = with_formats(resolved, target)
            aimed = f", for {resolved.quant.target}" if resolved.quant.target else ""
            note(f"Continuing {shown(run.path)}: {', '.join(chosen)}{aimed}.")
            _record(run)
            _report(run, _train(resolved, run, chosen, options.from_scratch, resume=True), resolved)
        return
    asked = settings(options)
    require_used(options.epochs, asked, chosen)
    if dry_run:
        run_estimate(with_formats(asked, target), chosen)
        return
    with new_run(asked, options.out) as (run, resolved):
        resolved = with_formats(resolved, target)
        _report(run, _train(resolved, run, chosen, options.from_scratch, resume=False), resolved)


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
