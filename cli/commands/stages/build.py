"""`fp4deploy build`: canonical ONNX to an engine and its precision ledger; TensorRT-RTX needs no GPU for it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import latest_run

from ... import completion
from ...console import done, note, shown
from ...numbers import finite
from ...settings import parse_size

if TYPE_CHECKING:
    from fp4deploy.export.engine.build import BuildResult


def build(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Canonical .onnx files.", show_default="all of the latest run", autocompletion=completion.artifacts
        ),
    ] = None,
    backend: Annotated[
        Literal["tensorrt", "tensorrt-rtx"], typer.Option("--backend", help="Engine library.")
    ] = "tensorrt-rtx",
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help="GPU to build for, such as sm120.",
            show_default="sm120; with tensorrt the GPU present",
            autocompletion=completion.architectures,
        ),
    ] = None,
    conv: Annotated[
        Literal["auto", "qdq", "gemm", "fp8", "plugin"],
        typer.Option("--conv", help="Form of FP4 convolutions; auto picks per layer, plugin needs tensorrt."),
    ] = "auto",
    batch: Annotated[int, typer.Option("--max-batch", min=1, help="Largest batch the engine takes.")] = 8,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail (exit 1) where a layer does not have its planned precision.")
    ] = False,
    require_fp4: Annotated[
        float | None,
        typer.Option(
            "--require-fp4",
            min=0.0,
            max=1.0,
            callback=finite,
            help="Fail (exit 1) where less than this share of the multiply-accumulates is in FP4.",
            show_default="any share",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Target .plan (one model) or folder.", show_default="RUN/engines")
    ] = None,
    log: Annotated[
        Path | None, typer.Option("--log", help="Keep the compiler's log here (one model).", show_default="not kept")
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="HxW in pixels, of a file that leaves it open.", show_default="the file's own"),
    ] = None,
) -> None:
    """Build an engine of each model, and a ledger that says which layer runs in which precision."""
    from fp4deploy.export.engine.build import build_engine

    pixels = parse_size(size)
    found = list(models or _latest())
    if len(found) > 1 and (log is not None or (out is not None and out.suffix == ".plan")):
        raise InputError(f"There are {len(found)} models to build: give one for --log, and a folder for --out.")
    for path in found:
        note(f"Building {shown(path)} ...")
        target = target_of(path, out)
        result = build_engine(
            path,
            target,
            backend,
            arch,
            conv,
            strict,
            batch=(1, 1, batch),
            log=log,
            size=pixels,
            require_fp4=require_fp4,
        )
        done(
            describe(result),
            model=str(path),
            engine=str(result.plan),
            ledger=str(result.ledger_path),
            size_bytes=result.size_bytes,
            build_seconds=round(result.seconds, 3),
            totals=dataclasses.asdict(result.ledger.totals()),
        )
    note("Measure it with: fp4deploy bench --engine FILE; show its ledger with: fp4deploy inspect FILE")


def describe(result: BuildResult) -> str:
    """One line about a built engine."""
    return f"{shown(result.plan)} ({result.size_bytes / 1e6:.2f} MB, {result.seconds:.1f} s): {result.ledger.summary()}"


def canonical_models(folder: Path) -> list[Path]:
    """Canonical files of an export folder: all .onnx but the decomposed graphs (.portable.onnx)."""
    return [path for path in sorted(folder.glob("*.onnx")) if not path.name.endswith(".portable.onnx")]


def target_of(path: Path, out: Path | None) -> Path:
    """Where an engine goes: `out`, or engines/ of the run that holds the model, or the model's folder."""
    from fp4deploy.runs import run_of

    if out is not None and out.suffix == ".plan":
        return out
    run = run_of(path)
    folder = out or (run.engine_dir if run is not None else path.parent)
    return folder / f"{path.stem}.plan"


def _latest() -> list[Path]:
    run = latest_run()
    found = canonical_models(run.export_dir)
    if not found:
        raise InputError(f"The latest run, {run.path}, has no exported model yet. Export it with: fp4deploy export")
    note(f"Taking the latest run, {shown(run.path)}: {', '.join(path.name for path in found)}.")
    return found
