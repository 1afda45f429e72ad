"""The artefacts that a command measures, and where its results are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4deploy.errors import InputError

from . import completion
from .console import note, print_json, shown

PackedOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--engine",
        help="Packed network (.fp4), or its name in the latest run; repeatable.",
        show_default="every packed network of the latest run",
        autocompletion=completion.artifacts,
    ),
]


def find_artifacts(names: list[Path] | None) -> list[Path]:
    """Files by path or by their name in the latest run; every artefact of that run where none is named."""
    from fp4deploy.bench.locate import find_artifact, run_artifacts
    from fp4deploy.runs import latest_run

    if not names:
        run = latest_run()
        artifacts = list(run_artifacts(run).values())
        if not artifacts:
            raise InputError(f"{run.path} has no artefact to measure yet. Continue with: fp4deploy train")
        note(f"Taking every artefact of the latest run, {shown(run.path)}.")
        return artifacts
    found = []
    for name in names:
        path = find_artifact(name)
        if path != name:
            note(f"{name} is {shown(path)}.")
        found.append(path)
    return found


def packed_networks(names: list[Path] | None) -> list[Path]:
    """The packed networks among `find_artifacts`; all of those, where none is one, for an error that names them."""
    paths = find_artifacts(names)
    return [path for path in paths if path.suffix == ".fp4"] or paths


def write_json(document: dict[str, Any], out: str | None) -> None:
    """Write results to the file `out`, or on stdout where it is "-"; None: nowhere."""
    from fp4deploy.system.files import atomic_write

    if out == "-":
        print_json(document)
    elif out is not None:
        with atomic_write(Path(out)) as temporary:
            temporary.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        note(f"Wrote {shown(Path(out))}.")
