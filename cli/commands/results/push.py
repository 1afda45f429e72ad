"""`fp4deploy push`: a run as a model repository of the Hugging Face hub, and its upload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.runs import latest_run, open_run

from ... import completion
from ...console import done, note, shown


def push(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder.", show_default="the latest run", autocompletion=completion.runs),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Repository, ORG/NAME.", show_default="nothing is uploaded")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="A new repository can be read by anyone.")] = False,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write.", show_default="RUN/hub")] = None,
) -> None:
    """Write checkpoints, exported files, settings and a model card as a folder, and with --to upload it."""
    from fp4deploy.report.model_repository import push as upload
    from fp4deploy.report.model_repository import write_model_repository

    found = open_run(run) if run is not None else latest_run()
    folder = out or found.path / "hub"
    files = write_model_repository(found, folder, to or "ORG/NAME")
    done(f"{shown(folder)}: {', '.join(files)}", folder=str(folder), files=files)
    if to is None:
        note("Nothing was uploaded. Look at the model card, README.md, and upload with: fp4deploy push --to ORG/NAME")
        return
    from huggingface_hub import HfApi

    upload(folder, to, HfApi(), private=not public)
    done(f"Uploaded as hf:{to}", repository=to)
