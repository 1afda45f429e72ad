"""`fp4deploy audit`: what precision any ONNX file asks for, and what a runtime makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError, counted, printable

from ... import completion
from ...console import note, print_json, results, typed

if TYPE_CHECKING:
    from fp4deploy.audit.report import Audit


def audit(
    file: Annotated[
        Path,
        typer.Argument(
            help=".onnx of any tool, or its name in the latest run; TensorRT layer information or an ONNX Runtime "
            "profile (.json).",
            show_default=False,
            autocompletion=completion.artifacts,
        ),
    ],
    target: Annotated[
        str, typer.Option("--target", help="Runtime to audit an .onnx file for: tensorrt-rtx, tensorrt, onnxruntime.")
    ] = "tensorrt-rtx",
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", help="The .onnx file that the engine or session was made of.", show_default="not known"
        ),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 1 where a layer runs in another precision than it asks for.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Show for each convolution and GEMM which precision is requested, which runs, and why they differ."""
    from fp4deploy.audit.report import audit_file
    from fp4deploy.bench.locate import or_of_latest_run

    if file.suffix.lower() == ".onnx":
        file = or_of_latest_run(file)
    found = audit_file(file, target, None if model is None else or_of_latest_run(model))
    if as_json:
        print_json({**dataclasses.asdict(found), "summary": found.summary()})
    else:
        _print(found)
    lost = [row for row in found.rows if row.fell_back]
    if strict and lost:
        first = lost[0]
        raise GateError(
            f"{counted(len(lost), 'layer')} not in the precision requested (first {first.layer}: {first.requested} "
            f"requested, {first.runs}; {first.reason})."
        )


def _print(found: Audit) -> None:
    from rich.table import Table
    from rich.text import Text

    console = results()
    console.print(f"{found.file} on {found.target} ({found.evidence})\n", markup=False, soft_wrap=True)
    table = Table("layer", "operator", "weight", "activation", "runs", "reason", box=None, pad_edge=False)
    for row in found.rows:
        style = "yellow" if row.fell_back else "green" if row.runs == "FP4" else None
        cells = (row.layer, row.operator, row.weight, row.activation, row.runs, row.reason)
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    console.print(table)
    console.print(f"\n{found.summary()}", markup=False, soft_wrap=True)
    if found.canonical and any(row.fell_back for row in found.rows):
        note(f"That is the file as it is. What fp4deploy build makes of it: fp4deploy check {typed(Path(found.file))}")
