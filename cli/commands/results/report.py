"""`fp4deploy report`: regenerate the report of one run, or compare several runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import latest_run

from ... import completion
from ...console import done, note, print_json, shown
from ...settings import JsonOutOption, NamedModelOption, expect

if TYPE_CHECKING:
    from fp4deploy.runs import Run


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folders; the others are compared with the first.",
            show_default="the latest run",
            autocompletion=completion.runs,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="HTML file to write.", show_default="in the run; of several, next to the first"),
    ] = None,
    json_out: JsonOutOption = None,
    model: NamedModelOption = None,
) -> None:
    """Write one self-contained page: the report of a run, or a comparison of runs. Nothing is trained or measured."""
    from fp4deploy.report.write import open_runs
    from fp4deploy.system.progress import progress

    expect(model)
    _check(out, json_out)
    found = open_runs(runs) if runs else [latest_run()]
    with progress("drawing the page"):
        data, page = _one(found[0], out) if len(found) == 1 else _several(found, out)
    if json_out not in (None, "-"):
        from fp4deploy.system.files import write_json

        write_json(Path(str(json_out)), data)
        note(f"Wrote {shown(Path(str(json_out)))}.")
    say = note if json_out == "-" else done
    for sentence in data["summary"]:
        say(sentence)
    say(f"\nReport: {shown(page)}")
    if json_out == "-":
        print_json(data)


def _check(out: Path | None, json_out: str | None) -> None:
    """Refuse what cannot be written before anything is drawn."""
    if out is not None and (out.suffix.lower() not in (".html", ".htm") or out.is_dir()):
        raise InputError(f"--out takes the HTML file to write, such as report.html, not {out}.")
    if json_out not in (None, "-") and Path(str(json_out)).is_dir():
        raise InputError(f"--json takes the file to write, or - for stdout; {json_out} is a folder.")


def _one(run: Run, out: Path | None) -> tuple[dict[str, Any], Path]:
    from fp4deploy.report.write import rewrite_report

    written = rewrite_report(run, out)
    for remark in written.data.remarks:
        note(remark)
    return written.data.to_json(), written.html


def _several(runs: list[Run], out: Path | None) -> tuple[dict[str, Any], Path]:
    from fp4deploy.report.write import default_page, write_comparison

    page = out or default_page(runs)
    found = write_comparison(runs, page)
    for sentence in found.cannot:
        note(sentence)
    for run in found.runs:
        for remark in run.remarks:
            note(f"{run.label}: {remark}")
    return found.model_dump(mode="json"), page
