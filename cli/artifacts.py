"""The artefacts that a command measures, and where its results are written."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import InputError

from . import completion
from .console import note, print_json, shown, typed

if TYPE_CHECKING:
    from fp4deploy.runs import Run

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
    """Files by path or by their name in the latest run; of a run folder, by default the latest, every artefact."""
    from fp4deploy.bench.locate import find_artifact
    from fp4deploy.runs import latest_run, open_run

    if not names:
        run = latest_run()
        found = _artifacts(run)
        note(f"Taking every artefact of the latest run, {shown(run.path)}.")
        return found
    found = []
    for name in names:
        if name.is_dir():
            found += _artifacts(open_run(name))
            continue
        path = find_artifact(name)
        if path != name:
            note(f"{name} is {shown(path)}.")
        found.append(path)
    return found


def _artifacts(run: Run) -> list[Path]:
    from fp4deploy.bench.locate import run_artifacts

    found = list(run_artifacts(run).values())
    if not found:
        raise InputError(f"{run.path} has no artefact to measure yet. Continue with: fp4deploy train")
    return found


def next_commands(checkpoint: Path, baseline: Path, data: Path | None, model: str | None, given: bool) -> str:
    """What to do with a new NVFP4 checkpoint.

    data: what both are measured on; it is named where it was given, or where no run of the checkpoint says it. On a
        plain folder of images an export is verified, and nothing is measured.
    """
    from fp4deploy.data import are_photos
    from fp4deploy.runs import run_of

    path, named, more = typed(checkpoint), "", f" --model {shlex.quote(model)}" if model is not None else ""
    if given or run_of(checkpoint) is None:
        named = f" --data {typed(data) if data is not None else 'DIR'}"
    measured = " --data DATASET" if data is not None and are_photos(data) else named
    return (
        f"Measure it on all images with: fp4deploy bench --engine {path} --baseline {typed(baseline)}{measured}{more}; "
        f"export it with: fp4deploy export {path}{named}{more}"
    )


def named_next(files: Sequence[Path]) -> str:
    """Arguments by which `build` and `bench` take new files: none in the latest run, else their run, or each file."""
    from fp4deploy.runs import latest_run, run_of

    found = {None if (run := run_of(file)) is None else run.path.resolve() for file in files}
    try:
        latest = latest_run().path.resolve()
    except InputError:
        latest = None
    if found == {latest} and latest is not None:
        return ""
    runs = [path for path in found if path is not None]
    return "".join(f" {typed(path)}" for path in (runs if len(found) == len(runs) == 1 else files))


def packed_networks(names: list[Path] | None) -> list[Path]:
    """The packed networks among `find_artifacts`; all of those, where none is one, for an error that names them."""
    paths = find_artifacts(names)
    return [path for path in paths if path.suffix == ".fp4"] or paths


def write_json(document: dict[str, Any], out: str | None) -> None:
    """Write results to the file `out`, or on stdout where it is "-"; None: nowhere."""
    from fp4deploy.system import files

    if out == "-":
        print_json(document)
    elif out is not None:
        files.write_json(Path(out), document)
        note(f"Wrote {shown(Path(out))}.")
