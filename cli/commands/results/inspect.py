"""`fp4deploy inspect`: layers, precisions and sizes of a file, read from the file alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fp4deploy.errors import InputError, counted

from ... import completion
from ...console import print_json, results, table


def inspect(
    file: Annotated[
        Path,
        typer.Argument(
            help=".onnx, .fp4, .plan, .ledger.json or .safetensors; or its name in the latest run.",
            autocompletion=completion.artifacts,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of the tables.")] = False,
) -> None:
    """Show the ledger of an engine, or the layers of an ONNX file, packed network or checkpoint."""
    path = _find(file)
    reader = next((read for suffix, read in READERS.items() if path.name.endswith(suffix)), None)
    if reader is None:
        raise InputError(f"{path} has an unknown suffix. inspect reads: {', '.join(READERS)}.")
    facts, columns, rows, last = reader(path)
    if as_json:
        print_json({**facts, "layers": [dict(zip(columns, row, strict=True)) for row in rows]})
        return
    _print(facts, columns, rows, last)


LEDGER = ".ledger.json"
HEADINGS = {"wanted": "requested", "realised": "actual"}  # of keys that are kept in JSON
Shown = tuple[dict[str, Any], tuple[str, ...], list[tuple[Any, ...]], str]  # facts, columns, rows, closing line


def _find(file: Path) -> Path:
    if file.is_file():
        return file
    from fp4deploy.bench.locate import find_artifact

    plan = Path(f"{file.name.removesuffix(LEDGER)}.plan")
    return find_artifact(plan).with_name(file.name) if str(file).endswith(LEDGER) else find_artifact(file)


def _onnx(path: Path) -> Shown:
    from fp4deploy.export import describe_onnx

    return describe_onnx(path)


def _ledger(path: Path) -> Shown:
    from fp4deploy.export.ledger.ledger import COLUMNS, load_ledger

    ledger = load_ledger(path)
    facts = {
        "engine": ledger.plan,
        "backend": f"{ledger.backend} {ledger.backend_version}",
        "arch": ledger.arch,
        "conv": ledger.conv,
        "evidence": f"{ledger.evidence}; {ledger.statement}",
        "source": ledger.source,
        "bytes": ledger.plan_bytes,
        "build_seconds": round(ledger.build_seconds, 2),
        "batch": list(ledger.batch),
        **({"sizes": [list(size) for size in ledger.sizes]} if ledger.sizes else {}),
        **({"interface": ledger.interface} if ledger.interface else {}),
        **({"options": list(ledger.options)} if ledger.options else {}),
        "totals": dataclasses.asdict(ledger.totals()),
    }
    return facts, COLUMNS, [tuple(row.values()) for row in ledger.rows()], ledger.summary()


def _plan(path: Path) -> Shown:
    from fp4deploy.export.ledger.ledger import ledger_path

    ledger = ledger_path(path)
    if not ledger.is_file():
        raise InputError(
            f"{path} has no ledger ({ledger.name}) in its folder, and an engine cannot be read without its GPU. "
            "Build it again with: fp4deploy build"
        )
    return _ledger(ledger)


def _checkpoint(path: Path) -> Shown:
    from safetensors import safe_open

    from fp4deploy.models import read_card

    card = dataclasses.asdict(read_card(path))
    card["class_names"] = list(card["class_names"])
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
        rows = [(name, part.get_dtype(), list(part.get_shape())) for name, part in slices.items()]
    facts = {"file": str(path), "bytes": path.stat().st_size, **card}
    return facts, ("tensor", "type", "shape"), rows, f"{counted(len(rows), 'tensor')}."


def _packed(path: Path) -> Shown:
    from fp4deploy.packed import read_packed
    from fp4deploy.packed.describe import describe_packed

    return describe_packed(read_packed(path))


READERS: dict[str, Callable[[Path], Shown]] = {
    ".onnx": _onnx,
    ".fp4": _packed,
    ".plan": _plan,
    LEDGER: _ledger,
    ".safetensors": _checkpoint,
}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _print(facts: dict[str, Any], columns: tuple[str, ...], rows: list[tuple[Any, ...]], last: str) -> None:
    console = results()
    for name, value in facts.items():
        parts = (f"{key} {_text(part)}" for key, part in value.items()) if isinstance(value, dict) else [_text(value)]
        console.print(f"{name}: {', '.join(parts)}", markup=False, soft_wrap=True)
    listed = table(HEADINGS.get(name, name) for name in columns)
    for row in rows:
        precise = any(str(cell) == "FP4" for cell in row)
        listed.add_row(*map(str, row), style="green" if precise else None)
    console.print()
    console.print(listed)
    console.print(f"\n{last}", markup=False, soft_wrap=True)
