"""`fp4deploy export`: a run or a checkpoint to canonical ONNX or a packed network, compared with torch first."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fp4deploy.errors import GateError, InputError
from fp4deploy.runs import Run, latest_run, open_run, run_of

from ... import completion
from ...artifacts import named_next
from ...console import done, note, shown, typed
from ...settings import ExportedRestOption, NamedModelOption, expect, parse_axes
from . import nnunet

if TYPE_CHECKING:
    from fp4deploy.export import ExportResult


SUFFIXES = {"onnx": ".onnx", "packed": ".fp4"}
REPOSITORY = Path("model_repository")


def export(
    source: Annotated[
        Path | None,
        typer.Argument(
            help="Run folder, checkpoint, results folder of nnU-Net; of servers .onnx or .fp4 files, of MONAI .fp4.",
            show_default="the latest run",
            autocompletion=completion.sources,
        ),
    ] = None,
    form: Annotated[
        Literal["onnx", "packed", "triton", "deepstream", "holoscan", "monai-bundle"],
        typer.Option(
            "--format",
            help="Canonical Q/DQ graph, packed network (.fp4), or what a server, pipeline or MONAI needs around it.",
        ),
    ] = "onnx",
    portable: Annotated[
        bool,
        typer.Option("--portable", help="Also write NAME.portable.onnx in standard operators, for plain ONNX Runtime."),
    ] = False,
    data: Annotated[
        Path | None, typer.Option("--data", help="Data set to compare with torch on.", show_default="the run's own")
    ] = None,
    images: Annotated[int, typer.Option("--images", min=1, help="Number of validation images to compare on.")] = 16,
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare with torch before writing.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="Target file (one checkpoint) or folder.", show_default="RUN/export, or model_repository"
        ),
    ] = None,
    size: Annotated[
        str | None,
        typer.Option("--size", help="HxW or DxHxW of the ONNX graph.", show_default="as trained"),
    ] = None,
    dynamic_size: Annotated[
        bool, typer.Option("--dynamic-size", help="Leave height and width of the ONNX graph open.")
    ] = False,
    batch: Annotated[
        int | None,
        typer.Option("--batch", min=1, help="The only number of images that the file takes.", show_default="any"),
    ] = None,
    rest: ExportedRestOption = None,
    max_batch: Annotated[
        int,
        typer.Option(
            "--max-batch", min=1, help="Largest batch of the server, or frames at once (--format triton, deepstream)."
        ),
    ] = 8,
    fold: nnunet.FoldOption = None,
    model: NamedModelOption = None,
) -> None:
    """Write the hardware-neutral ONNX graph, or a packed network; exit 1 if its results differ from torch's."""
    expect(model)
    if portable and form != "onnx":
        raise InputError("--portable is an option of --format onnx; remove it, or export with --format onnx.")
    if form != "onnx" and (size is not None or dynamic_size):
        raise InputError("--size and --dynamic-size are options of --format onnx.")
    if form not in SUFFIXES and batch is not None:
        raise InputError("--batch is an option of --format onnx and packed; a server's largest batch is --max-batch.")
    if form not in SUFFIXES and rest is not None:
        raise InputError(f"--rest is an option of --format onnx and packed: {form} runs their files.")
    if source is not None and nnunet.is_folder(source):
        if size is not None or dynamic_size or batch is not None:
            raise InputError(
                "--size, --dynamic-size and --batch are not for a folder of nnU-Net: its plans say the patch size."
            )
        nnunet.export(source, fold, form, portable, data, out, verify, rest)
        return
    if fold:
        raise InputError("--fold is for a results folder of nnU-Net.")
    if form == "triton":
        _serve(source, out or REPOSITORY, max_batch)
        return
    if form in ("deepstream", "holoscan"):
        _pipeline(source, out, form, max_batch)
        return
    if form == "monai-bundle":
        if data is not None:
            raise InputError("--data is not an option of --format monai-bundle, which packs a file that was verified.")
        _bundle(source, out)
        return
    from fp4deploy.system.files import require_writable
    from fp4deploy.system.progress import progress

    pixels, suffix = parse_axes(size), SUFFIXES[form]
    failed: list[tuple[Path, GateError | InputError]] = []
    targets = _targets(source, out, suffix)
    require_writable(*(target for _, target in targets))
    for checkpoint, target in targets:
        note(f"Exporting {shown(checkpoint)} ...")
        verify_on = (data or _data(checkpoint)) if verify else None
        try:
            with progress(f"tracing{' and comparing with torch' if verify else ''}"):
                if form == "packed":
                    line = _packed(checkpoint, target, verify_on, images, verify, rest, batch)
                else:
                    sizes = {"size": pixels, "dynamic_size": dynamic_size, "rest": rest, "batch": batch}
                    line = describe(_onnx(checkpoint, target, portable, verify_on, images, verify, **sizes))
        except (GateError, InputError) as error:
            failed.append((checkpoint, error))
            continue
        done(line, checkpoint=str(checkpoint), path=str(target), size_bytes=target.stat().st_size)
    if failed:
        raise type(min((error for _, error in failed), key=lambda error: error.exit_code))(_causes(failed))
    files = [target for _, target in targets]
    if form == "packed":
        measured = f"{named_next(files)}{'' if run_of(files[-1]) else ' --data DIR'}"
        note(f"Measure it with: fp4deploy bench{measured}; list its layers with: fp4deploy inspect {typed(files[-1])}")
    else:
        note(f"Build an engine with: fp4deploy build{named_next(files)}")


def _causes(failed: list[tuple[Path, GateError | InputError]]) -> str:
    """Every message; one that says of several checkpoints the same is written once, with the names of the others."""
    found: dict[str, tuple[str, list[str]]] = {}  # message without the checkpoint -> the first message, the others
    for checkpoint, error in failed:
        text, path = str(error), str(checkpoint)
        found.setdefault(text.replace(path, ""), (text, []))[1].append(path)
    return " ".join(
        f"{text} The same is true of {', '.join(others)}." if (others := list(dict.fromkeys(paths))[1:]) else text
        for text, paths in found.values()
    )


def _serve(source: Path | None, out: Path, max_batch: int) -> None:
    from fp4deploy.serving.repository import write_repository

    for path in _exported(source):
        folders = write_repository(path, out, most=max_batch)
        done(
            f"{shown(path)} as {', '.join(folder.name for folder in folders)} in {shown(out)}",
            path=str(path),
            models=[str(folder) for folder in folders],
        )
    note(f"Serve it with: tritonserver --model-repository {typed(out)}")


def _pipeline(source: Path | None, out: Path | None, form: str, max_batch: int) -> None:
    from fp4deploy.naming import model_stem
    from fp4deploy.serving.pipelines import write_pipeline

    for path in _exported(source):
        target = write_pipeline(path, (out or Path(form)) / model_stem(path), form, max_batch)
        done(f"{shown(path)} for {form} in {shown(target)}", path=str(path), folder=str(target))
    note("On the device, build the engine as the first line of the configuration says.")


def _bundle(source: Path | None, out: Path | None) -> None:
    from fp4deploy.naming import model_stem
    from fp4deploy.serving.bundle import write_bundle

    for path in _exported(source, ".fp4"):
        target = write_bundle(path, (out or Path("monai-bundle")) / model_stem(path))
        done(f"{shown(path)} as a bundle of MONAI in {shown(target)}", path=str(path), folder=str(target))
        options = f"--config_file {typed(target / 'configs' / 'inference.json')} --bundle_root {typed(target)}"
        note(f"Run it with: python -m monai.bundle run {options} --dataset_dir IMAGES")


def _exported(source: Path | None, suffix: str = ".onnx") -> list[Path]:
    """The file itself, also by its name in the latest run, or the canonical graphs or packed networks of a run."""
    from fp4deploy.bench.locate import or_of_latest_run

    source = or_of_latest_run(source) if source is not None else None
    if source is not None and source.is_file():
        return [source]
    if source is not None and not source.exists():
        raise InputError(f"There is no file or folder {source}. Give a run folder or a {suffix} file.")
    run = open_run(source) if source is not None else latest_run()
    found = [path for path in sorted(run.export_dir.glob(f"*{suffix}")) if ".portable" not in path.name]
    if not found:
        form = next(form for form, ending in SUFFIXES.items() if ending == suffix)
        raise InputError(f"{run.path} has no {suffix} file yet. Write it with: fp4deploy export --format {form}")
    return found


def _onnx(*arguments: Any, **options: Any) -> ExportResult:
    from fp4deploy.export import export_checkpoint

    return export_checkpoint(*arguments, **options)


def _packed(
    checkpoint: Path, target: Path, data: Path | None, images: int, verify: bool, rest: str | None, batch: int | None
) -> str:
    from fp4deploy.bench.tables import size
    from fp4deploy.export.to_packed import pack
    from fp4deploy.packed import plain_bytes
    from fp4deploy.packed.shapes import expected

    result = pack(checkpoint, target, data, images, verify, rest=rest, batch=batch)
    graph = result.file.graph
    weights, plain = result.file.weight_bytes, plain_bytes(graph)
    fixed = [expected(graph, each) for each in graph.inputs if not {*range(2, len(each.shape))} <= {*each.free}]
    only = f", for {' and '.join(fixed)} alone" if fixed else ""
    agreed = f", {result.verification.sentence()}" if result.verification else ""
    return (
        f"{shown(target)} (weights {size(weights)}, in FP16 {size(plain)}: ratio {weights / plain:.3f}){only}{agreed}"
    )


def describe(result: ExportResult) -> str:
    """One line about an exported model."""
    portable = f" and {shown(result.portable_path)}" if result.portable_path else ""
    agreed = f", {result.verification.sentence()}" if result.verification else ""
    unused = result.unused_layers
    without = f", without {len(unused)} layers that the network never calls (first {unused[0]})" if unused else ""
    return f"{shown(result.path)}{portable} ({result.path.stat().st_size / 1e6:.2f} MB){agreed}{without}"


def _targets(source: Path | None, out: Path | None, suffix: str) -> list[tuple[Path, Path]]:
    if source is not None and not source.exists():
        raise InputError(
            f"There is no file or folder {source}. Give a run folder or a checkpoint; train one with: fp4deploy train"
        )
    if source is not None and source.is_file():
        return [(source, _target(source, out, suffix))]
    run = open_run(source) if source is not None else latest_run()
    if source is None:
        note(f"Taking the latest run, {shown(run.path)}.")
    models = run.models()
    if not models:
        raise InputError(f"{run.path} holds no checkpoint yet. Continue its training with: fp4deploy train --resume")
    if out is not None and out.suffix == suffix and len(models) > 1:
        raise InputError(f"{run.path} holds {len(models)} models, so --out must be a folder, not {out}.")
    return [(run.checkpoint(model), _in_folder(run, model, out, suffix)) for model in models]


def _in_folder(run: Run, model: str, out: Path | None, suffix: str) -> Path:
    if out is not None and out.suffix == suffix:
        return out
    return (out or run.export_dir) / run.exported(model, suffix).name


def _target(checkpoint: Path, out: Path | None, suffix: str) -> Path:
    from fp4deploy.bench.locate import model_of

    run = run_of(checkpoint)
    model = model_of(checkpoint, run)
    if run is not None and model is not None:
        return _in_folder(run, model, out, suffix)
    if out is not None and out.suffix == suffix:
        return out
    return (out or checkpoint.parent) / f"{checkpoint.stem}{suffix}"


def _data(checkpoint: Path) -> Path | None:
    from fp4deploy.bench.locate import data_of

    return data_of(checkpoint) if run_of(checkpoint) is not None else None
