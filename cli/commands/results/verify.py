"""`fp4deploy verify`: whether a run's files are still those that its stages made, and made of each other."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp4deploy.errors import GateError, InputError, counted
from fp4deploy.runs import latest_run, open_run

from ... import completion
from ...console import done, note, print_json, results, shown, table


def verify(
    run: Annotated[
        Path | None,
        typer.Argument(help="Run folder.", show_default="the latest run", autocompletion=completion.runs),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Walk the chain data, checkpoint, ONNX, engine by SHA-256; exit 1 names the first broken link.

    Files of the run that the chain does not name are listed, and do not change the exit code.
    """
    from fp4deploy.provenance import FILE, OK, unnamed, verify_run

    where = latest_run() if run is None else open_run(run)
    findings = verify_run(where)
    if not findings:
        raise InputError(f"{where.path} has no {FILE}: an older version trained it. There is nothing to verify.")
    broken = [finding for finding in findings if finding.status != OK]
    others = unnamed(where)
    if as_json:
        chain = [vars(finding) for finding in findings]
        print_json({"run": str(where.path), "ok": not broken, "links": chain, "unnamed": others})
    else:
        note(f"Verifying {shown(where.path)}.")
        rows = [(finding.stage, finding.status, finding.text) for finding in findings]
        _print(
            [*rows, *(("", "not named", f"{name}: no stage recorded it, so it was not checked.") for name in others)]
        )
    if broken:
        more = f" ({len(broken) - 1} more)" if len(broken) > 1 else ""
        raise GateError(f"{broken[0].text}{more}")
    if not as_json:
        done(f"{len(findings)} files checked: each has the recorded digest, and so has what it was made of.")
        if others:
            note(
                f"The chain does not name {counted(len(others), 'file')} of the run, and nothing says what made them. "
                "Make them again by export or build, or keep them elsewhere."
            )


def _print(rows: list[tuple[str, str, str]]) -> None:
    results().print(table(("stage", "status", "file"), rows))
