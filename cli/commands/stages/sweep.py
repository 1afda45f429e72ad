"""`fp4deploy sweep`: variants of one training over seeds, as a table of paired differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import GateError, InputError, counted

from ...console import done, note, shown
from ...numbers import MAX_SECONDS, finite
from ...settings import DataOption, ModelOption, SetOption, named_models


def sweep(
    file: Annotated[Path, typer.Argument(help="YAML with a configuration, variants and seeds.")],
    data: DataOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder of the sweep; an existing one is continued.", show_default="runs/<FILE>"),
    ] = None,
    sets: SetOption = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="Seeds: 0,1,2.", show_default="the file's")] = None,
    only: Annotated[str | None, typer.Option("--only", help="Variants to run: a,b.", show_default="all")] = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=0.0,
            max=MAX_SECONDS / 60,
            callback=finite,
            help="Stop and save after so many minutes.",
            show_default="no limit",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            "--jobs", min=1, help="Trainings at a time, one GPU each.", show_default="1; with --address all GPUs"
        ),
    ] = None,
    address: Annotated[
        str | None,
        typer.Option("--address", help="Ray cluster to run on: HOST:6379 or auto.", show_default="this machine"),
    ] = None,
    model: ModelOption = None,
) -> None:
    """Train every variant for every seed; the same command continues a stopped sweep."""
    import json

    from fp4deploy.bench.commands import record
    from fp4deploy.experiments.sweep.plot import draw_sweep
    from fp4deploy.experiments.sweep.results import markdown
    from fp4deploy.experiments.sweep.run import run_sweep
    from fp4deploy.experiments.sweep.spec import load_sweep

    if minutes is not None and not minutes > 0:
        raise InputError(f"--minutes is {minutes:g}; give a time above 0, or leave it out.")
    flags = [f"data.root={json.dumps(str(data))}"] if data is not None else []
    if model is not None:
        flags.append(f"model.spec={json.dumps(model)}")
    flags += sets or []
    loaded = load_sweep(file, tuple(flags), _seeds(seeds), named_models(flags))
    folder = out if out is not None else Path("runs") / file.stem
    note(
        f"Sweep: {counted(len(loaded.variants), 'variant')}, {counted(len(loaded.seeds), 'seed')}, into {shown(folder)}"
    )
    names = tuple(name.strip() for name in (only or "").split(",") if name.strip())
    results = run_sweep(loaded, folder, names, minutes, note, record, jobs, address)
    picture = draw_sweep(results, folder)
    done(markdown(results), file=str(folder / "sweep.json"))
    note(", ".join(shown(path) for path in (folder / "sweep.json", folder / "sweep.md", picture) if path is not None))
    failed = [
        f"{name} (seed {seed})"
        for name, row in results["variants"].items()
        for seed, run in row["runs"].items()
        if run["status"] == "failed"
    ]
    if failed:
        listed = ", ".join(failed)
        raise GateError(
            f"{len(failed)} of the runs failed: {listed}. The table gives the reasons; the same command retries them."
        )


def _seeds(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise InputError(f"--seeds takes whole numbers such as 0,1,2, not '{text}'.") from None
