"""`fp4deploy run`: train, export, build, bench and report in one go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import InputError, Interrupted
from fp4deploy.runs import Run, hold, latest_run, open_run, processes

from ... import completion
from ...console import done, note, results, shown, typed
from ...settings import (
    DEFAULT,
    GENERATED,
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
    settings,
)
from .bench import print_table

if TYPE_CHECKING:
    from fp4deploy.report.write import Report
    from fp4deploy.train import Config


def run(
    demo: Annotated[
        bool, typer.Option("--demo", help="Generated shapes and small settings: minutes on two cores.")
    ] = False,
    data: DataOption = None,
    out: OutOption = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the latest run, or the one given by --out, with its settings.")
    ] = False,
    models: Annotated[
        str | None,
        typer.Option(
            "--models",
            help=MODELS_HELP,
            show_default=f"{DEFAULT}; with --resume those the run was asked for",
            autocompletion=completion.models,
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
    arch: Annotated[
        str,
        typer.Option(
            "--arch", help="GPU to build engines for: sm120 or sm121.", autocompletion=completion.architectures
        ),
    ] = "sm120",
    from_scratch: ScratchOption = False,
    telemetry_every: EveryOption = None,
    tracker: TrackerOption = None,
    model: ModelOption = None,
    init: InitOption = None,
) -> None:
    """Take an FP16 and an NVFP4 model through every stage, and compare them in a table and a report."""
    from fp4deploy.bench.commands import this_command
    from fp4deploy.export.engine.build import check_arch
    from fp4deploy.pipeline import run_chain

    if processes() > 1:
        raise InputError("fp4deploy run is one process. Train under torchrun with: fp4deploy train; then export.")
    if demo and data is not None:
        raise InputError("--demo uses generated shapes; leave out either --demo or --data.")
    if resume and config is not None:
        raise InputError("--resume goes on with the settings of the run; leave out --config.")
    check_arch(arch)  # before hours of training
    chosen = parse_models(DEFAULT if models is None else models)
    flags: Flags = {"data": data, "classes": classes, "recipe": recipe, "task": task, "every": telemetry_every}
    flags |= {"trackers": tracker, "model": model, "init": init}
    flags |= {"epochs": epochs, "batch_size": batch_size, "size": size}
    begun = (open_run(out) if out is not None else latest_run()) if resume else None
    if begun is not None and models is None:
        chosen = begun.asked_models() or chosen
    resolved = settings(config if begun is None else begun.config_path, sets, **flags)
    if demo and begun is None and epochs is None:
        note("A smaller one, with worse models: fp4deploy run --demo --epochs 2 --size 64")
    with _resumed(begun, resolved) if begun is not None else new_run(resolved, out) as (current, resolved):
        where = Path(resolved.data.root or current.path / GENERATED)
        try:
            report = run_chain(
                resolved, current, where, chosen,
                from_scratch=from_scratch, resume=resume, arch=arch, say=note, commands=[this_command()],
            )  # fmt: skip
        except Interrupted as error:
            more = f"fp4deploy run --out {typed(current.path)} --resume"
            raise Interrupted(error.number, more if error.resume else "") from None
    _print(report)


@contextmanager
def _resumed(run: Run, resolved: Config) -> Iterator[tuple[Run, Config]]:
    """Hold a run that is there."""
    from fp4deploy.bench.commands import record

    with hold(run.path):
        note(f"Continuing {shown(run.path)}.")
        record(run)
        yield run, resolved


def _print(report: Report) -> None:
    console = results()
    console.print()
    print_table(report.data.artifacts, reasons=False)
    console.print()
    files = {"report": str(report.json), "page": str(report.html)}
    for sentence in report.data.summary:
        done(sentence)
    done(f"\nReport: {shown(report.html)}\n        {shown(report.markdown)}\n        {shown(report.json)}", **files)
