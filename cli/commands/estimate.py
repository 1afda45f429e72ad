"""`fp4deploy estimate`: how long a training will take, from a few measured steps; what `train --dry-run` prints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ..console import done, note, print_json, results
from ..settings import (
    DEFAULT,
    ClassesOption,
    ConfigOption,
    DataOption,
    ModelsOption,
    RecipeOption,
    SetOption,
    TaskOption,
    parse_models,
    settings,
)

if TYPE_CHECKING:
    from fp4deploy.train import Config


def estimate(
    data: DataOption = None,
    models: ModelsOption = DEFAULT,
    task: TaskOption = None,
    recipe: RecipeOption = None,
    classes: ClassesOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
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
            help="Assumed share of the ideal speed of several GPUs.",
            show_default="0.8, what four GPUs reached",
        ),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps to measure.")] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON alone.")] = False,
) -> None:
    """Measure a few steps of each model, and estimate the whole schedule; nothing is kept."""
    resolved = settings(config, sets, data=data, classes=classes, recipe=recipe, task=task)
    run_estimate(resolved, parse_models(models), gpus, images, val_images, efficiency, steps, as_json)


def run_estimate(
    config: Config,
    models: tuple[str, ...],
    gpus: int = 1,
    images: int | None = None,
    val_images: int | None = None,
    efficiency: float | None = None,
    steps: int = 30,
    as_json: bool = False,
) -> None:
    """Measure, estimate and print.

    Raises:
        InputError: the data cannot be read, or a model has nothing to train.
    """
    from fp4deploy.errors import InputError
    from fp4deploy.train import estimate as module
    from fp4deploy.train.models import open_splits

    if "nvfp4_ptq" in models:
        raise InputError("nvfp4_ptq is not trained, so there is nothing to estimate; leave it out of --models.")
    if config.data.root is None:
        raise InputError(
            "An estimate needs data to read. Give --data DIR, or make some with: fp4deploy data shapes DIR"
        )
    share = module.EFFICIENCY if efficiency is None else efficiency
    there = [len(split) for split in open_splits(config)]
    train, val = images or there[0], there[1] if val_images is None else val_images
    note(f"Measuring {steps} steps of {', '.join(models)} ...")
    speeds = module.measure(config, models, steps)
    found = module.estimate(config, speeds, train, val, gpus, share)
    facts = module.as_json(config, speeds, found, train, val, gpus, share)
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def _print(facts: dict[str, object]) -> None:
    from typing import Any, cast

    from rich.table import Table

    measured = Table("measured, images/s", "with the loader", "one batch", "evaluation", "loader alone")
    for speed in cast("list[dict[str, Any]]", facts["measured"]):
        cells = (f"{speed[key]:.1f}" for key in ("training", "resident", "evaluation", "loader"))
        measured.add_row(speed["model"], *cells)
    wanted = cast("dict[str, Any]", facts["for"])
    planned = Table("estimated", "epochs", "images/s", "held by", "training", "validation", "hours in all")
    for row in cast("list[dict[str, Any]]", facts["estimated"]):
        hours = (f"{row[key]:.2f}" for key in ("training_hours", "validation_hours", "hours"))
        planned.add_row(row["model"], str(row["epochs"]), f"{row['images_per_s']:.1f}", row["limit"], *hours)
    console = results()
    done(
        f"{facts['device']}, batch {facts['batch_size']}, {facts['height']} x {facts['width']}, scale {facts['scale']}"
        f"{', digits' if facts['digits'] else ''}"
    )
    console.print(measured)
    done(
        f"Estimate for {wanted['images']} training and {wanted['val_images']} validation images, {wanted['gpus']} GPUs:"
    )
    console.print(planned)
    done("Assumed: " + "; ".join(cast("list[str]", facts["assumptions"])) + ".")
