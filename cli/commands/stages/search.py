"""`fp4deploy search`: which layers go to FP4, FP8 and INT8 under a budget of accuracy, bytes or time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from fp4deploy.precisions import LAYER_FORMATS

from ...console import done, note, shown, typed
from ...settings import NamedModelOption, expect


def search(
    checkpoint: Annotated[Path, typer.Argument(help="FP16 checkpoint of a semantic model or a classifier.")],
    budget: Annotated[
        str, typer.Option("--budget", help="drop=POINTS of mIoU or top-1, bytes=COUNT of weights, or ms=MILLISECONDS.")
    ],
    data: Annotated[
        Path | None, typer.Option("--data", help="Dataset folder.", show_default="what the run was trained on")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Images to calibrate and to measure on, each.")] = 32,
    batch: Annotated[int, typer.Option("--batch", min=1, help="Images of one forward pass.")] = 4,
    method: Annotated[str, typer.Option("--method", help="How layers are quantised, as of quantize.")] = "amax",
    arch: Annotated[str, typer.Option("--arch", help="GPU of the projected time: sm90, sm100 or sm120.")] = "sm120",
    conv: Annotated[
        Literal["auto", "qdq", "gemm", "fp8", "plugin"],
        typer.Option("--conv", help="Form of FP4 convolutions, as of build."),
    ] = "auto",
    measured: Annotated[
        Path | None,
        typer.Option(
            "--measured",
            help="JSON of fp4deploy profile of the packed FP16 and NVFP4 networks, for measured times.",
            show_default="projected times",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the search.", show_default="search beside the checkpoint")
    ] = None,
    model: NamedModelOption = None,
) -> None:
    """Measure every layer alone in FP4, FP8 and INT8, solve for the best placement, and write it as settings."""
    expect(model)
    import torch

    from fp4deploy.bench.locate import data_of
    from fp4deploy.experiments.search.files import RECIPE, save_search
    from fp4deploy.experiments.search.run import Budget
    from fp4deploy.experiments.search.run import search as run
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress
    from fp4deploy.tasks import key_of

    wanted = Budget.parse(budget)
    folder = out or checkpoint.parent / "search"
    require_writable(folder)
    with progress("reading images") as bar:
        found = run(
            checkpoint,
            data or data_of(checkpoint),
            wanted,
            folder,
            images=images,
            batch=batch,
            method=method,
            arch=arch,
            conv=conv,
            measured=measured,
            device="cuda" if torch.cuda.is_available() else "cpu",
            say=note,
            progress=bar.phase,
        )
    files = save_search(found, folder, checkpoint)
    done(
        f"{found.chosen.counts(f' of {len(found.errors)}')}: "
        f"{found.metric} {100 * found.chosen.score:.2f} % (drop of {found.drop:.2f} points), "
        f"{found.chosen.bytes / 1e6:.2f} MB, {found.chosen.ms:.3g} ms {found.timed}",
        layers=list(found.chosen.placed["FP4"]),
        **{name: list(found.chosen.placed[name.upper()]) for name in LAYER_FORMATS},
        **{key_of(found.metric): found.chosen.score},
        drop_points=found.drop,
        bytes=found.chosen.bytes,
        **{f"{found.timed}_ms": found.chosen.ms},
    )
    for file in files:
        done(shown(file), file=str(file))
    settings = typed(folder / RECIPE)
    note(f"Use it with: fp4deploy quantize {typed(checkpoint)} --config {settings}")
    note(f"or train with: fp4deploy train --config {settings} --models nvfp4")
