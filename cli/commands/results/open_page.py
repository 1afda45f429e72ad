"""`fp4deploy open`: show a run's report, or another page it has, in the browser."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.runs import latest_run, open_run

from ... import completion
from ...console import done, shown

PAGES = ("report.html", "comparison.html")


def open_page(
    target: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder, or an .html file.", show_default="the latest run", autocompletion=completion.runs
        ),
    ] = None,
) -> None:
    """Show the report of a run, or another page, in the browser; exit 3 where there is none to show it."""
    page = _page(target)
    done(shown(page), page=str(page))
    if not webbrowser.open(page.resolve().as_uri()):
        raise UnavailableError(f"No browser can be opened here. Open {page} yourself.")


def _page(target: Path | None) -> Path:
    if target is not None and target.suffix.lower() in (".html", ".htm"):
        if not target.is_file():
            raise InputError(f"There is no page {target}.")
        return target
    run = latest_run() if target is None else open_run(target)
    for page in (run.path / name for name in PAGES):
        if page.is_file():
            return page
    raise InputError(f"{run.path} has no report yet. Write it with: fp4deploy report {run.path}")
