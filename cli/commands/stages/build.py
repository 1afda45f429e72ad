"""`fp4deploy build`: canonical ONNX to an engine and its precision ledger; TensorRT-RTX needs no GPU for it."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fp4deploy.errors import InputError
from fp4deploy.runs import latest_run, open_run

from ... import completion
from ...console import done, note, shown, typed
from ...numbers import MAX_DROP, finite
from ...settings import parse_size

if TYPE_CHECKING:
    from fp4deploy.bench.gate.baseline import Baseline
    from fp4deploy.export.engine.build import BuildResult, PreparedEngine
    from fp4deploy.export.engine.profile import Sizes


def build(
    models: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Canonical .onnx files, their names in the latest run, or a run folder.",
            show_default="all of the latest run",
            autocompletion=completion.artifacts,
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
        Literal["auto", "qdq", "gemm", "fp8", "plugin", "smallest"],
        typer.Option(
            "--conv",
            help="Form of FP4 convolutions; auto picks per layer, smallest is the form of the smallest plan, plugin "
            "needs tensorrt.",
        ),
    ] = "auto",
    batch: Annotated[int, typer.Option("--max-batch", min=1, help="Largest batch the engine takes.")] = 8,
    opt_batch: Annotated[int, typer.Option("--opt-batch", min=1, help="Batch that the engine is fastest at.")] = 1,
    min_batch: Annotated[int, typer.Option("--min-batch", min=1, help="Smallest batch the engine takes.")] = 1,
    strict: Annotated[
        bool, typer.Option("--strict", help="Fail (exit 1) where a layer does not have the precision that it requests.")
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
    data: Annotated[
        Path | None,
        typer.Option(
            "--data",
            help="Labelled images: where the engine of --conv auto is not shown to keep the file's accuracy on them, "
            "convolutions are FP16 (--conv qdq).",
            show_default="not measured",
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop",
            min=0.0,
            callback=finite,
            help="With --data: points of mIoU or AP that the drop's interval may reach.",
            show_default=f"{MAX_DROP:g}",
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
    max_size: Annotated[
        str | None,
        typer.Option("--max-size", help="Largest HxW of an engine for a range of sizes.", show_default="one size"),
    ] = None,
    opt_size: Annotated[
        str | None,
        typer.Option("--opt-size", help="HxW that the engine is fastest at.", show_default="--max-size"),
    ] = None,
    min_size: Annotated[
        str | None, typer.Option("--min-size", help="Smallest HxW of the range.", show_default="--opt-size")
    ] = None,
    input_type: Annotated[
        Literal["fp16", "fp32", "uint8"] | None,
        typer.Option(
            "--input", help="What the engine takes; uint8: images as decoded, normalised inside.", show_default="fp16"
        ),
    ] = None,
    input_layout: Annotated[
        Literal["nchw", "nhwc"], typer.Option("--input-layout", help="Order of the input's axes.")
    ] = "nchw",
    output_type: Annotated[
        Literal["fp16", "fp32", "argmax"] | None,
        typer.Option(
            "--output", help="What it gives: logits, or the class of each pixel as INT32.", show_default="fp16"
        ),
    ] = None,
    output_layout: Annotated[
        Literal["nchw", "nhwc"], typer.Option("--output-layout", help="Order of the output's axes.")
    ] = "nchw",
    version_compatible: Annotated[
        bool, typer.Option("--version-compatible", help="Later versions of TensorRT can run the engine.")
    ] = False,
    stripped: Annotated[
        bool, typer.Option("--strip-weights", help="A plan without weights; NAME.weights.onnx has them.")
    ] = False,
    refittable: Annotated[bool, typer.Option("--refittable", help="Weights of the engine can be replaced.")] = False,
) -> None:
    """Build an engine of each model, and a ledger that says which layer runs in which precision."""
    from fp4deploy.bench.locate import or_of_latest_run
    from fp4deploy.export.engine.build import prepare_engine, target_arch
    from fp4deploy.export.engine.forms import smaller_in_fp16, smallest
    from fp4deploy.export.lowering.interface import Interface
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress

    pixels, sizes = parse_size(size), _sizes(min_size, opt_size, max_size)
    interface = Interface(input_type, input_layout, output_type, output_layout)
    flags = {"version_compatible": version_compatible, "stripped": stripped, "refittable": refittable}
    found = _models([or_of_latest_run(path) for path in models]) if models else _latest()
    if max_drop is not None and data is None:
        raise InputError("--max-drop is of the accuracy on labelled images, and there are none. Add: --data DIR")
    allowed = MAX_DROP if max_drop is None else max_drop
    if data is not None and conv != "auto":
        raise InputError(f"--data is for --conv auto, which chooses by it; here is --conv {conv}.")
    if len(found) > 1 and (log is not None or (out is not None and out.suffix == ".plan")):
        raise InputError(f"There are {len(found)} models to build: give one for --log, and a folder for --out.")
    target = target_arch(backend, arch)
    require_writable(*(target_of(path, out, target) for path in found), log)
    options = tuple(name for name, chosen in flags.items() if chosen)
    with progress("lowering"):  # all of them, so that what cannot be built is refused before anything is written
        batches = (min_batch, opt_batch, batch)

        def prepare(path: Path, form: str) -> PreparedEngine:
            return prepare_engine(path, backend, arch, form, batches, pixels, sizes, interface, options)

        engines = [prepare(path, "auto" if conv == "smallest" else conv) for path in found]
    asking = [path for path, engine in zip(found, engines, strict=True) if engine.lowered.requests_fp4]
    baselines = _baselines(asking, data) if data is not None else {}  # data that does not fit is refused before, too
    for path, engine in zip(found, engines, strict=True):
        note(f"Building {shown(path)} ...")
        with progress("compiling") as bar:
            engine = smallest(partial(prepare, path), bar.phase) if conv == "smallest" else engine
            result = engine.build(target_of(path, out, target), strict, log, require_fp4, bar.phase)
        if data is not None and path in baselines and not _keeps_accuracy(baselines[path], result.plan, data, allowed):
            note(f"Building {shown(path)} again, with --conv qdq ...")
            with progress("compiling") as bar:
                result = prepare(path, "qdq").build(result.plan, strict, log, require_fp4, bar.phase)
            _keeps_accuracy(baselines[path], result.plan, data, allowed)
        done(
            describe(result),
            model=str(path),
            engine=str(result.plan),
            ledger=str(result.ledger_path),
            size_bytes=result.size_bytes,
            build_seconds=round(result.seconds, 3),
            totals=dataclasses.asdict(result.ledger.totals()),
        )
        if larger := smaller_in_fp16(result.plan, result.ledger, conv == "smallest"):
            note(larger)
    last = typed(result.plan)
    note(f"Measure it with: fp4deploy bench --engine {last}; show its ledger with: fp4deploy inspect {last}")


def _sizes(least: str | None, usual: str | None, most: str | None) -> Sizes | None:
    """(min, opt, max) of height and width; the smaller ones are by default the next larger one."""
    if most is None:
        if least is not None or usual is not None:
            raise InputError("--min-size and --opt-size are for a range of image sizes: give --max-size as well.")
        return None
    found: list[tuple[int, int]] = []
    for name, text in (("max", most), ("opt", usual), ("min", least)):
        pixels = parse_size(text, f"--{name}-size")
        found.append(found[-1] if pixels is None else pixels)
    return found[2], found[1], found[0]


def _baselines(sources: list[Path], data: Path) -> dict[Path, Baseline]:
    """The accuracy of each file on labelled images."""
    from fp4deploy.bench.gate.baseline import find_baseline
    from fp4deploy.system.progress import progress

    with progress("measuring the file" if len(sources) == 1 else "measuring the files"):
        return {source: find_baseline(source, data) for source in sources}


def _keeps_accuracy(baseline: Baseline, plan: Path, data: Path, max_drop: float) -> bool:
    """Whether an engine, run or emulated, is shown to lose at most `max_drop` points of its file's accuracy; said."""
    from fp4deploy.bench.artifact import bench_artifact
    from fp4deploy.bench.gate.decision import decide
    from fp4deploy.system.progress import progress

    with progress("images") as bar:
        entry = bench_artifact(plan, data, iterations=1, progress=bar.advance)
        decision = decide(entry, baseline, max_drop)
    note(f"{decision.text()} {entry.status.capitalize()}; allowed are {max_drop:g} points.")
    return decision.passed


def describe(result: BuildResult) -> str:
    """One line about a built engine."""
    return f"{shown(result.plan)} ({result.size_bytes / 1e6:.2f} MB, {result.seconds:.1f} s): {result.ledger.summary()}"


def canonical_models(folder: Path) -> list[Path]:
    """Canonical files of an export folder."""
    return [path for path in sorted(folder.glob("*.onnx")) if canonical(path)]


def canonical(path: Path) -> bool:
    """By its name an ONNX file that engines are built of: no decomposed graph (.portable.onnx)."""
    return path.suffix == ".onnx" and not path.name.endswith(".portable.onnx")


def _models(given: list[Path]) -> list[Path]:
    """The canonical files among those given (RUN/export/*.onnx has others too); a run folder stands for its own."""
    paths = [path for each in given for path in (_of_folder(each) if each.is_dir() else [each])]
    found = [path for path in paths if canonical(path)] or paths
    left_out = [path.name for path in paths if path not in found]
    if left_out:
        note(f"Leaving out {', '.join(left_out)}: engines are built of canonical files (NAME.onnx).")
    return found


def _of_folder(folder: Path) -> list[Path]:
    found = canonical_models(folder) or canonical_models(open_run(folder).export_dir)
    if not found:
        raise InputError(f"{folder} has no exported model yet. Export it with: fp4deploy export {typed(folder)}")
    return found


def target_of(path: Path, out: Path | None, arch: str) -> Path:
    """Where an engine goes: `out`, or engines/ of the run that holds the model, or the model's folder."""
    from fp4deploy.naming import built_name
    from fp4deploy.runs import run_of

    if out is not None and out.suffix == ".plan":
        return out
    run = run_of(path)
    folder = out or (run.engine_dir if run is not None else path.parent)
    return folder / built_name(path, arch)


def _latest() -> list[Path]:
    run = latest_run()
    found = canonical_models(run.export_dir)
    if not found:
        raise InputError(f"The latest run, {run.path}, has no exported model yet. Export it with: fp4deploy export")
    note(f"Taking the latest run, {shown(run.path)}: {', '.join(path.name for path in found)}.")
    return found
