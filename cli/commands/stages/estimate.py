"""`fp4deploy estimate` and `fp4deploy train --dry-run`: how long a training will take, from a few measured steps.

With `--engine`: how long the layers of a packed network take on a GPU that need not be here, by `fp4deploy.timing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import InputError, counted

from ... import completion
from ...artifacts import packed_networks
from ...console import done, note, print_json, results, table
from ...deferred import given_options
from ...numbers import finite
from ...settings import DEFAULT, ModelsOption, SettingOptions, parse_models, settings

if TYPE_CHECKING:
    from fp4deploy.train import Config

COLUMNS = ("layer", "op", "precision", "kernels", "ms", "nine in ten between", "not tested for")
OF_NETWORKS = ("--engine", "--arch", "--batch-size", "--device", "--json")


def estimate(
    context: typer.Context,
    options: SettingOptions,
    models: ModelsOption = DEFAULT,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs to estimate for.")] = 1,
    images: Annotated[
        int | None, typer.Option("--images", min=1, help="Training images of the full set.", show_default="the data's")
    ] = None,
    val_images: Annotated[
        int | None, typer.Option("--val-images", min=0, help="Validation images.", show_default="the data's")
    ] = None,
    efficiency: Annotated[
        float | None,
        typer.Option(
            "--efficiency",
            min=0.01,
            max=1.0,
            callback=finite,
            help="Assumed share of the ideal speed of several GPUs.",
            show_default="0.94, what four GPUs reached",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to measure.")] = 30,
    minutes: Annotated[
        float,
        typer.Option("--minutes", min=0.01, max=1440, callback=finite, help="Longest time to measure, in all."),
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
    engine: Annotated[
        list[Path] | None,
        typer.Option(
            "--engine",
            help="Instead: the time of each layer of a packed network (.fp4); repeatable.",
            show_default="estimate a training",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option("--arch", help="With --engine: the GPU, sm90, sm100 or sm120.", show_default="sm120")
    ] = None,
) -> None:
    """Measure a few steps of each model, and estimate the time of its whole schedule; writes no run."""
    if engine or arch is not None:
        estimate_networks(engine, arch or "sm120", options.batch_size or 1, as_json, given_options(context))
        return
    run_estimate(settings(options), parse_models(models), gpus, images, val_images, efficiency, steps, as_json, minutes)


def estimate_networks(engine: list[Path] | None, arch: str, batch: int, as_json: bool, given: list[str]) -> None:
    """Print the time of each layer of packed networks on a GPU; given: options on the command line.

    Raises:
        InputError: options of a training beside, no packed network, or a GPU or kernel that is not known.
    """
    from fp4deploy.packed import read_packed
    from fp4deploy.peaks import find_gpu
    from fp4deploy.timing.network import estimate_network

    others = [name for name in given if name not in OF_NETWORKS]
    if others or not engine:
        cause = f"{others[0]} is of a training" if others else "--arch is of a packed network"
        raise InputError(
            f"{cause}, and --engine estimates a packed network for --arch. Estimate either: fp4deploy estimate "
            "--engine FILE.fp4 --arch sm120, or a training: fp4deploy estimate --data DIR"
        )
    gpu, rows = find_gpu(arch), []
    for path in packed_networks(engine):
        found = estimate_network(read_packed(path), gpu, batch=batch)
        rows.append({"path": str(path), **found.to_json()})
        if as_json:
            continue
        lines = []
        for row in found.layers:
            bar = f"{row.low_ms:.4f} and {row.high_ms:.4f}"
            kernels = ", ".join(row.kernels)
            lines.append([row.layer, row.op, row.precision, kernels, f"{row.ms:.4f}", bar, row.outside or "-"])
        results().print(table(COLUMNS, lines))
        total = found.total
        done(
            f"{path}, batch {batch}, on {gpu.name}: {total.ms:.3f} ms {found.label}, {total.low:.3f} to "
            f"{total.high:.3f} by the error bars of its layers. Not measured."
        )
    if as_json:
        print_json({"layers": rows})


def run_estimate(
    config: Config,
    models: tuple[str, ...],
    gpus: int = 1,
    images: int | None = None,
    val_images: int | None = None,
    efficiency: float | None = None,
    steps: int = 30,
    as_json: bool = False,
    minutes: float = 5.0,
) -> None:
    """Measure, estimate and print.

    Raises:
        InputError: the data cannot be read, or a model has nothing to train.
    """
    from fp4deploy.system.progress import progress
    from fp4deploy.train.estimate import estimate_training

    note(f"Measuring {counted(steps, 'step')} of {', '.join(models)}, at most {minutes:g} minutes ...")
    with progress("measurements") as bar:
        report = estimate_training(
            config, models, gpus, images, val_images, efficiency, steps, 60 * minutes, bar.advance
        )
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from rich.table import Table

    from fp4deploy.bench.tables import duration

    measured = Table("measured, images/s", "with the loader", "one batch", "evaluation", "loader alone")
    for speed in report["measured"]:
        cells = (f"{speed[key]:.1f}" for key in ("training", "resident", "evaluation", "loader"))
        measured.add_row(speed["model"], *cells)
    estimated = Table("estimated", "epochs", "images/s", "limited by", "training", "validation", "total")
    for row in report["estimated"]:
        times = (duration(3600 * row[key]) for key in ("training_hours", "validation_hours", "hours"))
        estimated.add_row(row["model"], str(row["epochs"]), f"{row['images_per_s']:.1f}", row["limit"], *times)
    target, console = report["for"], results()
    network = f"scale {report['scale']}" if report["network"] == "unet" else report["network"]
    done(
        f"{report['device']}, batch {report['batch_size']}, {report['height']} x {report['width']}, "
        f"{network}{', multi-term input encoding' if report['digits'] else ''}"
    )
    console.print(measured)
    done(
        f"Estimate for {counted(target['images'], 'training image')}, "
        f"{counted(target['val_images'], 'validation image')}, {counted(target['gpus'], 'GPU')}:"
    )
    console.print(estimated)
    done("Assumed: " + "; ".join(report["assumptions"]) + ".")
