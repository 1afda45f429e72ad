"""`fp4deploy audit`: what precision any ONNX file asks for, and what a runtime makes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fp4deploy.errors import GateError, InputError, counted, printable

from ... import completion
from ...console import note, print_json, results, shown, table, typed

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
    fix: Annotated[
        Path | None,
        typer.Option(
            "--fix",
            help="Write the .onnx file here with its Q/DQ pairs where an engine multiplies in eight bits.",
            show_default="not written",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the table.")] = False,
) -> None:
    """Show for each convolution and GEMM which precision is requested, which runs, and why they differ."""
    from fp4deploy.audit.report import audit_file
    from fp4deploy.bench.locate import or_of_latest_run

    if file.suffix.lower() == ".onnx":
        file = or_of_latest_run(file)
    if fix is not None:
        _fix(file, fix)
        file = fix
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


def _fix(file: Path, out: Path) -> None:
    """Write the file with its pairs moved, and say what was changed."""
    from collections import Counter

    import onnx

    from fp4deploy.export.onnx.canonical import foreign_graph, read_onnx
    from fp4deploy.interop.placement import with_placed_quantizers
    from fp4deploy.system.files import atomic_write

    if file.suffix.lower() != ".onnx" or out.suffix.lower() != ".onnx" or out.resolve() == file.resolve():
        raise InputError("--fix takes an .onnx file and writes another one: fp4deploy audit a.onnx --fix b.onnx")
    with foreign_graph(file):
        fixed, edits = with_placed_quantizers(read_onnx(file))
    with atomic_write(out) as temporary:
        onnx.save(fixed, temporary)
    for (done, exact), count in Counter((edit.done, edit.exact) for edit in edits).items():
        places = [edit.at for edit in edits if (edit.done, edit.exact) == (done, exact)]
        numbers = "the same numbers" if exact else "other numbers"
        note(printable(f"{', '.join(places[:3])}{f' and {count - 3} more' if count > 3 else ''}: {done} ({numbers})."))
    note(f"{shown(out)}: {counted(len(edits), 'change')}. Engines of both: fp4deploy build {typed(file)} {typed(out)}")


def _print(found: Audit) -> None:
    console = results()
    console.print(f"{found.file} on {found.target} ({found.evidence})\n", markup=False, soft_wrap=True)
    listed = table(("layer", "operator", "weight", "activation", "runs", "reason"))
    for row in found.rows:
        style = "yellow" if row.fell_back else "green" if row.runs == "FP4" else None
        cells = (row.layer, row.operator, row.weight, row.activation, row.runs, row.reason)
        listed.add_row(*cells, style=style)
    console.print(listed)
    console.print(f"\n{found.summary()}", markup=False, soft_wrap=True)
    if found.canonical and any(row.fell_back for row in found.rows):
        note(f"That is the file as it is. What fp4deploy build makes of it: fp4deploy check {typed(Path(found.file))}")
