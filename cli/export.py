"""`fp4deploy export`: a run or a checkpoint to canonical Q/DQ ONNX, verified against torch before it is written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import GateError, InputError
from fp4deploy.runs import Run, artifact_stem, latest_run, open_run

from .console import done, note, shown

if TYPE_CHECKING:
    from fp4deploy.export import ExportResult


def export(
    source: Annotated[
        Path | None, typer.Argument(help="Run folder or checkpoint.", show_default="the latest run")
    ] = None,
    form: Annotated[Literal["onnx"], typer.Option("--format", help="Canonical Q/DQ graph.")] = "onnx",
    portable: Annotated[
        bool, typer.Option("--portable", help="Also write the twin that plain ONNX Runtime runs.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Data to verify on.", show_default="the run's own")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Validation images to verify on.")] = 16,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch before writing.")] = True,
    out: Annotated[
        Path | None, typer.Option("--out", help="Target file (one checkpoint) or folder.", show_default="RUN/export")
    ] = None,
) -> None:
    """Write the hardware-neutral ONNX graph; exit 1 if ONNX Runtime computes another result from it than torch."""
    from fp4deploy.export import export_onnx

    failed: list[GateError | InputError] = []
    for checkpoint, target in _targets(source, out):
        note(f"Exporting {shown(checkpoint)} ...")
        verify_on = (data or _data(checkpoint)) if verify else None
        try:
            result = export_onnx(checkpoint, target, portable, verify_on, images, verify)
        except (GateError, InputError) as error:
            failed.append(error)
            continue
        done(describe(result))
    if failed:
        raise type(min(failed, key=lambda error: error.exit_code))(" ".join(dict.fromkeys(map(str, failed))))
    note("Build an engine of it with: fp4deploy build")


def describe(result: ExportResult) -> str:
    """One line about an exported model."""
    portable = f" and {shown(result.portable_path)}" if result.portable_path else ""
    agreed = f", {result.verification.sentence()}" if result.verification else ""
    return f"{shown(result.path)}{portable} ({result.path.stat().st_size / 1e6:.2f} MB){agreed}"


def _targets(source: Path | None, out: Path | None) -> list[tuple[Path, Path]]:
    if source is not None and not source.exists():
        raise InputError(f"There is no {source}. Give a run folder or a checkpoint; train one with: fp4deploy train")
    if source is not None and source.is_file():
        return [(source, _target(source, out))]
    run = open_run(source) if source is not None else latest_run()
    if source is None:
        note(f"Taking the latest run, {shown(run.path)}.")
    models = run.models()
    if not models:
        raise InputError(f"{run.path} holds no checkpoint yet. Continue its training with: fp4deploy train --resume")
    if out is not None and out.suffix == ".onnx" and len(models) > 1:
        raise InputError(f"{run.path} holds {len(models)} models, so --out must be a folder, not {out}.")
    return [(run.checkpoint(model), _in_folder(run, model, out)) for model in models]


def _in_folder(run: Run, model: str, out: Path | None) -> Path:
    if out is not None and out.suffix == ".onnx":
        return out
    return (out or run.export_dir) / f"{artifact_stem(model)}.onnx"


def _target(checkpoint: Path, out: Path | None) -> Path:
    from fp4deploy.bench.locate import model_of, run_of

    run = run_of(checkpoint)
    model = model_of(checkpoint, run)
    if run is not None and model is not None:
        return _in_folder(run, model, out)
    if out is not None and out.suffix == ".onnx":
        return out
    return (out or checkpoint.parent) / f"{checkpoint.stem}.onnx"


def _data(checkpoint: Path) -> Path | None:
    from fp4deploy.bench.locate import data_of, run_of

    return data_of(checkpoint) if run_of(checkpoint) is not None else None
