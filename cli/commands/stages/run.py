"""`fp4deploy run`: train, export, build, bench and report in one go."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import processes

from ... import completion
from ...console import done, note, results, shown
from ...settings import (
    DEFAULT,
    BatchSizeOption,
    ClassesOption,
    ConfigOption,
    DataOption,
    DeviceOption,
    EpochsOption,
    EveryOption,
    InitOption,
    ModelOption,
    ModelsOption,
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


def run(
    demo: Annotated[
        bool, typer.Option("--demo", help="Generated shapes and small settings: minutes on two cores.")
    ] = False,
    data: DataOption = None,
    out: OutOption = None,
    models: ModelsOption = DEFAULT,
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
    check_arch(arch)  # before hours of training
    chosen = parse_models(models)
    resolved = settings(
        config,
        sets,
        data=data,
        classes=classes,
        recipe=recipe,
        task=task,
        every=telemetry_every,
        trackers=tracker,
        model=model,
        init=init,
        epochs=epochs,
        batch_size=batch_size,
        size=size,
    )
    with new_run(resolved, out) as (created, resolved):
        where = Path(resolved.data.root or created.path / "data")
        report = run_chain(
            resolved, created, where, chosen, from_scratch=from_scratch, arch=arch, say=note, commands=[this_command()]
        )
    _print(report)


def _print(report: Report) -> None:
    console = results()
    console.print()
    print_table(report.data.artifacts, reasons=False)
    console.print()
    files = {"report": str(report.json), "page": str(report.html)}
    for sentence in report.data.summary:
        done(sentence)
    done(f"\nReport: {shown(report.html)}\n        {shown(report.markdown)}\n        {shown(report.json)}", **files)
