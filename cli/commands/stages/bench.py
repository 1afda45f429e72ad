"""`fp4deploy bench`: accuracy and latency of any artefact on the same data, with an accuracy gate on request."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fp4deploy.errors import InputError, UnavailableError, counted

from ... import completion
from ...artifacts import find_artifacts, write_json
from ...console import note, notes, results, shown
from ...deferred import given_options
from ...numbers import MAX_DROP, MAX_SECONDS, finite
from ...settings import CompileOption, JsonOutOption, NamedModelOption, RestOption, expect

if TYPE_CHECKING:
    from fp4deploy.bench.gate.baseline import Baseline
    from fp4deploy.bench.gate.decision import Decision
    from fp4deploy.bench.records import ArtifactEntry
    from fp4deploy.bench.runtimes.like import Like

MAX_LETTERS = 40  # of the name of a file, before it may be broken over two lines
ACCURACY, GATE, RUNTIMES, LATENCY = "Accuracy", "Gate", "Runtimes", "Latency"  # headings of the options in --help
NOT_OF_PIPELINE = (
    "--limit",
    "--max-dets",
    "--iterations",
    "--results",
    "--baseline",
    "--max-drop",
    "--baseline-artefact",
)
WIDE = 120  # columns of a terminal from which backend and precision have columns of their own
NOT_NARROW = ("backend", "precision", "p90 ms", "p99 ms")  # columns of wide terminals, lines of others in narrow ones


def bench(
    context: typer.Context,
    source: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Run folder or artefact, as --engine.",
            show_default="every artefact of the latest run",
            autocompletion=completion.sources,
        ),
    ] = None,
    engine: Annotated[
        list[Path] | None,
        typer.Option(
            "--engine",
            help="Artefact (.plan, .onnx, .fp4, checkpoint), or its name in the latest run; repeatable.",
            show_default="every artefact of the latest run",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", rich_help_panel=ACCURACY, help="Data to measure on.", show_default="that of the artefact's run"
        ),
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(
            "--like",
            rich_help_panel=ACCURACY,
            help="Classes, size, mean and std of .onnx files without a model card: a checkpoint, .onnx or .yaml.",
            show_default="the file's own card",
        ),
    ] = None,
    split: Annotated[
        str, typer.Option("--split", rich_help_panel=ACCURACY, help="Part of the data: val or test.")
    ] = "val",
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit",
            rich_help_panel=ACCURACY,
            min=1,
            help="Measure accuracy on so many images, evenly spaced; not kept for the report.",
            show_default="every image of the split",
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            "--baseline",
            rich_help_panel=GATE,
            help="Artefact, or JSON of an earlier bench, to compare with.",
            autocompletion=completion.artifacts,
        ),
    ] = None,
    max_drop: Annotated[
        float | None,
        typer.Option(
            "--max-drop",
            rich_help_panel=GATE,
            min=0.0,
            callback=finite,
            help="Points of mIoU or AP that the drop's interval may reach (exit 1).",
            show_default=f"{MAX_DROP:g}",
        ),
    ] = None,
    baseline_artefact: Annotated[
        str | None,
        typer.Option(
            "--baseline-artefact",
            rich_help_panel=GATE,
            help="Entry of a JSON with several.",
            show_default="the only one",
        ),
    ] = None,
    max_dets: Annotated[
        int | None,
        typer.Option(
            "--max-dets",
            rich_help_panel=ACCURACY,
            min=1,
            help="Most instances of an image that are scored (instance models).",
            show_default="as trained",
        ),
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            "--results",
            rich_help_panel=ACCURACY,
            help="Folder for overlays of the images that lost most; of instance models COCO and panoptic files too.",
            show_default="not kept",
        ),
    ] = None,
    provider: Annotated[
        list[str] | None,
        typer.Option(
            "--provider",
            rich_help_panel=RUNTIMES,
            help="What runs .onnx files: cpu, tensorrt-rtx; repeatable.",
            show_default="cpu",
        ),
    ] = None,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--torch",
            rich_help_panel=RUNTIMES,
            help="How torch runs checkpoints: eager, graph, compiled, max-autotune; repeatable.",
            show_default="eager",
        ),
    ] = None,
    batch: Annotated[int, typer.Option("--batch", rich_help_panel=LATENCY, min=1, help="Images a timed run.")] = 1,
    iterations: Annotated[
        int, typer.Option("--iterations", rich_help_panel=LATENCY, min=1, help="Timed runs at most (also at most 5 s).")
    ] = 50,
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            rich_help_panel=LATENCY,
            min=0.001,
            max=MAX_SECONDS,
            callback=finite,
            help="Most seconds that one inference of an .onnx or .plan may take.",
        ),
    ] = 600.0,
    forms: Annotated[
        bool,
        typer.Option(
            "--forms",
            rich_help_panel=RUNTIMES,
            help="Build engines of every form for the GPU here, measure them and packed networks, name the fastest.",
        ),
    ] = False,
    pipeline: Annotated[
        bool,
        typer.Option(
            "--pipeline",
            rich_help_panel=LATENCY,
            help="Measure frames to masks instead: copies, resizing, network, classes, and all of it overlapped.",
        ),
    ] = False,
    layers: Annotated[bool, typer.Option("--layers", hidden=True, help="Now: fp4deploy profile.")] = False,
    streams: Annotated[
        list[int] | None, typer.Option("--streams", min=1, hidden=True, help="Now: fp4deploy throughput.")
    ] = None,
    trace: Annotated[Path | None, typer.Option("--trace", hidden=True, help="Now: fp4deploy profile.")] = None,
    out: JsonOutOption = None,
    compiled: CompileOption = True,
    model: NamedModelOption = None,
    rest: RestOption = None,
) -> None:
    """Measure mIoU or AP and latency; a drop below the baseline exits 1, an engine neither run nor emulated here 3."""
    expect(model)
    engine = [*(source or []), *(engine or [])]
    if max_drop is not None and baseline is None and not forms:
        raise InputError("--max-drop is of the drop below a baseline, and there is none. Add: --baseline FILE")
    allowed = MAX_DROP if max_drop is None else max_drop
    if layers or streams or trace is not None:
        _moved(engine, layers, streams, trace, batch, iterations, out)
        return
    if pipeline and (given := [name for name in given_options(context) if name in NOT_OF_PIPELINE]):
        raise InputError(f"--pipeline takes no {', '.join(given)}: leave it out, or measure without --pipeline.")
    from fp4deploy.bench.gate.baseline import find_baseline
    from fp4deploy.bench.gate.decision import doubt, gate_drop, require_passed
    from fp4deploy.bench.runtimes.like import read_like
    from fp4deploy.data import MEASURED
    from fp4deploy.system.files import require_writable

    if split not in MEASURED:
        raise InputError(f"--split is '{split}'; what a model is measured on is {' or '.join(MEASURED)}.")
    require_writable(None if out in (None, "-") else Path(str(out)), keep)
    paths = find_artifacts(engine)
    card = read_like(like) if like is not None else None
    refused: dict[str, str] = {}
    if forms:
        paths, refused = _every_form(paths)
    chosen = _with_settings(paths, provider, form, rest)
    where = data or _data(paths)
    if pipeline:
        from .pipeline import pipeline as measure_pipeline

        measure_pipeline(chosen, where, split, batch, timeout, card, out)
        return
    part = f"{counted(limit, 'image')} of " if limit is not None else ""
    note(f"Measuring on {part}the split {split} of {shown(where)}.")
    reference = None
    if baseline is not None:
        resolved = baseline if baseline.suffix == ".json" else find_artifacts([baseline])[0]
        reference = find_baseline(resolved, where, max_dets, split, timeout, baseline_artefact, limit, card)
    found = _measure(chosen, where, split, batch, iterations, max_dets, keep, timeout, limit, card)
    decisions: list[Decision] = []
    try:
        if reference is not None:
            decisions = gate_drop(found, reference, allowed)
    finally:
        chosen_form = {**_fastest(found, allowed), "not_built": refused} if forms else {}
        _write(found, split, reference, decisions, out, limit, chosen_form)
    if keep is not None:
        _draw(found, decisions, reference, where, split, keep, card)
    if reference is not None:
        if (weak := doubt(reference)) is not None:
            note(weak)
        require_passed(decisions)
        note(f"Within {allowed:g} points of the baseline's {100 * reference.value:.2f} % {reference.metric}.")
    if any(not path.is_dir() for path in engine):
        _require_run(found)


def _moved(
    engine: list[Path] | None,
    layers: bool,
    streams: list[int] | None,
    trace: Path | None,
    batch: int,
    iterations: int,
    out: str | None,
) -> None:
    """Options of earlier versions for what are commands now."""
    from .profile import profile
    from .throughput import throughput

    if layers:
        note("bench --layers is a command of its own now: fp4deploy profile")
        profile(engine, batch, iterations, trace, out)
    elif trace is not None:
        raise InputError("--trace is an option of: fp4deploy profile")
    else:
        note("bench --streams is a command of its own now: fp4deploy throughput")
        throughput(engine, streams, batch, out)


def _every_form(paths: list[Path]) -> tuple[list[Path], dict[str, str]]:
    """Engines of every form of the ONNX files, built for the GPU at hand, and the packed networks.

    Returns:
        The artefacts; and the engines that did not build, each with the reason.

    Raises:
        UnavailableError: no GPU, or no library that builds engines with FP4 for it; naming what is not run.
        InputError: there is no ONNX file.
    """
    import torch

    from fp4deploy.architecture import Architecture
    from fp4deploy.export.engine.forms import backend_for, build_forms, expected
    from fp4deploy.runs import run_of

    from .build import canonical

    models = [path for path in paths if canonical(path)]
    if not models:
        raise InputError("--forms builds engines of ONNX files, and there is none. Export them with: fp4deploy export")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "--forms times engines on the GPU that they are built for, and here is no CUDA GPU. Not built and not run: "
            f"{', '.join(expected(models))}. Give the same command on a machine with an RTX 50, DGX Spark or B200; "
            "what runs without a GPU is timed by: fp4deploy bench"
        )
    arch = str(Architecture.of_device())
    run = run_of(models[0])
    folder = (run.engine_dir if run is not None else models[0].parent) / "forms"
    plans, refused = build_forms(models, folder, backend_for(arch), arch, lambda text: note(f"  {text}"))
    return [*plans, *(path for path in paths if path.suffix == ".fp4")], refused


def _fastest(found: list[ArtifactEntry], max_drop: float) -> dict[str, str | None]:
    """The fastest artefact that is accurate enough, as part of the JSON; said on stderr."""
    from fp4deploy.bench.gate.decision import fastest

    best = fastest(found, max_drop)
    if best is None or best.latency_ms is None:
        note("Nothing that ran is accurate enough to be chosen.")
        return {"fastest": None}
    accuracy = "" if best.accuracy is None else f", {best.metric} {100 * best.accuracy:.2f} %"
    note(f"Fastest within {max_drop:g} points: {best.path}, {best.latency_ms.p50:.3g} ms{accuracy}.")
    return {"fastest": best.path}


def _require_run(found: list[ArtifactEntry]) -> None:
    """An engine that was asked for and not run is no success; without --engine the table of a run may have such rows.

    Raises:
        UnavailableError: naming it, with the reason.
    """
    from fp4deploy.bench.artifact import EMULATED, OK

    missing = [entry for entry in found if entry.status not in (OK, EMULATED)]
    if missing:
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UnavailableError(f"{missing[0].path} was not run{more}: {missing[0].reason}")


def _draw(
    found: list[ArtifactEntry],
    decisions: list[Decision],
    reference: Baseline | None,
    data: Path,
    split: str,
    folder: Path,
    like: Like | None,
) -> None:
    """Overlays of the images that lost most; without a baseline of those with most wrong pixels (semantic models)."""
    from fp4deploy.report.figures.lost import draw_lost, most_wrong

    names = {decision.artefact: [name for name, _ in decision.images] for decision in decisions}
    for entry in found:
        if entry.evidence is None or (entry.miou is None and entry.path not in names):
            continue
        images = names[entry.path] if entry.path in names else most_wrong(entry.evidence)
        baseline = Path(reference.artefact) if reference is not None else None
        target = folder if len(found) == 1 else folder / Path(entry.path).name
        if images and draw_lost(Path(entry.path), baseline, images, data, split, target, like):
            note(f"Wrote overlays to {shown(target)}.")


def _data(paths: list[Path]) -> Path:
    from fp4deploy.bench.locate import data_of

    return data_of(paths[0])


def _with_settings(
    paths: list[Path], providers: list[str] | None, forms: list[str] | None, rest: str | None
) -> list[tuple[Path, dict[str, Any]]]:
    """Each artefact once, an .onnx once for each provider, a checkpoint once for each form of torch."""
    from fp4deploy.bench.runtimes.open import PROVIDERS
    from fp4deploy.bench.runtimes.pytorch import FORMS

    if rest is not None and all(path.suffix != ".safetensors" for path in paths):
        raise InputError("--rest is of checkpoints, and none is measured: other files have theirs from export --rest.")
    other = {} if rest is None else {"rest": rest}
    by_suffix: dict[str, list[dict[str, Any]]] = {
        ".onnx": [{"provider": name} for name in _each(providers, PROVIDERS, "--provider")],
        ".safetensors": [{"form": name, **other} for name in _each(forms, FORMS, "--torch")],
    }
    return [(path, settings) for path in paths for settings in by_suffix.get(path.suffix, [{}])]


def _each(given: list[str] | None, valid: Sequence[str], option: str) -> list[str]:
    """What was asked for, each once; the first of the valid ones where nothing was."""
    chosen = list(dict.fromkeys(given or valid[:1]))
    for name in chosen:
        if name not in valid:
            raise InputError(f"{option} is '{name}'. Valid: {', '.join(valid)}.")
    return chosen


def _measure(
    paths: list[tuple[Path, dict[str, Any]]],
    data: Path,
    split: str,
    batch: int,
    iterations: int,
    max_dets: int | None,
    keep: Path | None,
    timeout: float,
    limit: int | None,
    like: Like | None,
) -> list[ArtifactEntry]:
    from fp4deploy.bench.artifact import bench_artifact, bench_or_explain
    from fp4deploy.bench.environment import cpu_name
    from fp4deploy.bench.locate import model_of
    from fp4deploy.provenance import outdated
    from fp4deploy.runs import run_of
    from fp4deploy.system.processors import busy
    from fp4deploy.system.progress import progress

    others = busy()  # before this process keeps the processors busy itself
    run_one = bench_artifact if len(paths) == 1 else bench_or_explain
    found = []
    for path, settings in paths:
        note(f"  {shown(path)} ...")
        stale = outdated(path)
        if stale is not None:
            note(f"  {stale}")
        model = model_of(path, run_of(path))
        folder = _folder(keep, path, model, len(paths), *settings.values()) if keep is not None else None
        with progress("images", then="scores and latency") as bar:
            found.append(
                run_one(
                    path,
                    data,
                    progress=bar.advance,
                    model=model,
                    batch=batch,
                    iterations=iterations,
                    max_detections=max_dets,
                    results=folder,
                    split=split,
                    timeout=timeout,
                    limit=limit,
                    like=like,
                    **settings,
                )
            )
        if limit is None and "rest" not in settings:  # else it is no measurement of the file as it is
            _keep(path, found[-1], data)
        if folder is not None and found[-1].instances is not None:
            note(f"  Wrote the instances to {shown(folder)}.")
    if others is not None and any(entry.latency_ms and entry.device == cpu_name() for entry in found):
        note(others)
    return found


def _keep(path: Path, entry: ArtifactEntry, data: Path) -> None:
    """Note the measurement in the run; a run that cannot be written (a read-only disk) costs no result."""
    from fp4deploy.bench.kept import keep

    try:
        keep(path, entry, data)
    except InputError as error:
        note(f"  The report will not show this. {error}")


def _folder(keep: Path, path: Path, model: str | None, count: int, setting: str = "cpu") -> Path:
    """`keep` itself for one artefact, a folder of its own in there for each of several."""
    if count == 1:
        return keep
    name = f"{model}-checkpoint" if model and path.suffix == ".safetensors" else path.name
    return keep / (name if setting in ("cpu", "eager") else f"{name}-{setting}")


def _write(
    found: list[ArtifactEntry],
    split: str,
    reference: Baseline | None,
    decisions: list[Decision],
    out: str | None,
    limit: int | None,
    more: dict[str, Any],
) -> None:
    from fp4deploy.bench.environment import environment

    document = {
        **more,
        "artifacts": [entry.model_dump(mode="json") for entry in found],
        "split": split,
        **({"limit": limit} if limit is not None else {}),
        "baseline_miou": reference.value if reference and reference.metric == "mIoU" else None,
        "baseline_ap": reference.value if reference and reference.metric == "AP" else None,
        "gate": [decision.to_json() for decision in decisions] if reference else None,
        "environment": environment(),
        "evidence": [entry.evidence and entry.evidence.model_dump(mode="json") for entry in found],
    }
    if out != "-":
        write_json(document, out)
    print_table(found, reference.value if reference else None, to_stderr=out == "-")
    _print_details(found, decisions, to_stderr=out == "-")
    if out == "-":
        write_json(document, out)


def _print_details(found: list[ArtifactEntry], decisions: list[Decision], *, to_stderr: bool) -> None:
    """Boundaries and objects by size, and what the gate found."""
    from fp4deploy.bench import tables

    console = notes() if to_stderr else results()
    lines = tables.details(found)
    for decision in decisions:
        lines += [decision.text(), *decision.losses()]
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def print_table(
    entries: list[ArtifactEntry], baseline: float | None = None, *, to_stderr: bool = False, reasons: bool = True
) -> None:
    """The comparison table; reasons of rows that were not run follow it.

    In a narrow terminal backend and precision stand below the name of the file, instead of columns of a few letters,
    and p90 and p99 below p50.
    """
    from rich.table import Table

    from fp4deploy.bench import tables

    console = notes() if to_stderr else results()
    wide, paths = console.width >= WIDE, tables.names(entries)
    longest = max(map(len, paths), default=0)
    table = Table(box=None, pad_edge=False)
    head = tables.head(entries)
    for name in head:
        if wide or name not in NOT_NARROW:
            whole, right = wide and name == "artefact" and longest <= MAX_LETTERS, name in tables.NUMERIC
            title = name if wide or name != "p50 ms" else "ms: p50\np90\np99"
            table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=whole)
    columns = tables.metrics(entries)
    body = tables.rows(entries) if baseline is None else [tables.cells(entry, baseline, columns) for entry in entries]
    for entry, row, path in zip(entries, body, paths, strict=True):
        model, _, backend, precision, *_ = row
        texts = (path, backend, precision) if wide else (f"{path}\n{backend}\n{precision}",)
        found = dict(zip(head[4:], row[4:], strict=True))
        if not wide and entry.latency_ms is not None:
            found["p50 ms"] = "\n".join(found[name] for name in ("p50 ms", "p90 ms", "p99 ms"))
        table.add_row(model, *texts, *(cell for name, cell in found.items() if wide or name not in NOT_NARROW))
    console.print(table)
    for entry in entries:
        if reasons and entry.memory:
            console.print(tables.memory(entry.path, entry.memory), markup=False, soft_wrap=True)
        if reasons and entry.reason:
            about = "" if entry.reason.startswith(entry.path) else f"{entry.path}: "
            console.print(f"{about}{entry.reason}", markup=False, soft_wrap=True)
