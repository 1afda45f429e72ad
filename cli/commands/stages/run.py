"""`fp4deploy run`: train, export, build, bench and report in one go."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import InputError, Interrupted
from fp4deploy.runs import Run, hold, latest_run, open_run, processes

from ... import completion
from ...console import done, note, results, shown, typed
from ...settings import DEFAULT, GENERATED, TrainingOptions, new_run, parse_models, settings
from .bench import print_table

if TYPE_CHECKING:
    from fp4deploy.report.write import Report
    from fp4deploy.train import Config


def run(
    options: TrainingOptions,
    demo: Annotated[
        bool, typer.Option("--demo", help="Generated shapes and small settings: minutes on two cores.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the latest run, or the one given by --out, with its settings.")
    ] = False,
    arch: Annotated[
        str,
        typer.Option(
            "--arch", help="GPU to build engines for: sm120 or sm121.", autocompletion=completion.architectures
        ),
    ] = "sm120",
) -> None:
    """Take an FP16 and an NVFP4 model through every stage, and compare them in a table and a report."""
    from fp4deploy.bench.commands import this_command
    from fp4deploy.export.engine.build import check_arch
    from fp4deploy.pipeline import run_chain

    if processes() > 1:
        raise InputError("fp4deploy run is one process. Train under torchrun with: fp4deploy train; then export.")
    if demo and options.data is not None:
        raise InputError("--demo uses generated shapes; leave out either --demo or --data.")
    if resume and options.config is not None:
        raise InputError("--resume goes on with the settings of the run; leave out --config.")
    check_arch(arch)  # before hours of training
    chosen = parse_models(DEFAULT if options.models is None else options.models)
    begun = (open_run(options.out) if options.out is not None else latest_run()) if resume else None
    if begun is not None and options.models is None:
        chosen = begun.asked_models() or chosen
    resolved = settings(options if begun is None else replace(options, config=begun.config_path))
    if demo and begun is None and options.epochs is None:
        note("A smaller one, with worse models: fp4deploy run --demo --epochs 2 --size 64")
    with _resumed(begun, resolved) if begun is not None else new_run(resolved, options.out) as (current, resolved):
        where = Path(resolved.data.root or current.path / GENERATED)
        try:
            report = run_chain(
                resolved, current, where, chosen,
                from_scratch=options.from_scratch, resume=resume, arch=arch, say=note, commands=[this_command()],
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
