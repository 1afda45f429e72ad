"""`fp4deploy estimate` and `fp4deploy train --dry-run`: how long a training will take, from a few measured steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import counted

from ...console import done, note, print_json, results
from ...numbers import finite
from ...settings import DEFAULT, ModelsOption, SettingOptions, parse_models, settings

if TYPE_CHECKING:
    from fp4deploy.train import Config


def estimate(
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
) -> None:
    """Measure a few steps of each model, and estimate the time of its whole schedule; writes no run."""
    run_estimate(settings(options), parse_models(models), gpus, images, val_images, efficiency, steps, as_json, minutes)


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
