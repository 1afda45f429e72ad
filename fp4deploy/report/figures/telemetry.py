"""The heatmaps of a model's training, from the files that it left: telemetry.jsonl, checkpoint, last gradients.

    plots/heatmaps/plotly.min.js                         shared by the pages
    plots/heatmaps/<model>/weights/prequantize/          <task>_mean, _std, _kurtosis: layers x steps
                                                         <task>_<layer>: a window of the weight itself
    plots/heatmaps/<model>/weights/quantized/            <task>_saturation, _underflow, _flips, _entropy_bits, ...
                                                         <task>_occupancy: layers x codes; <task>_<layer>: the codes
    plots/heatmaps/<model>/weights/dequantized/          <task>_sqnr_db, _correlation, ...; <task>_<layer>
                                                         <task>_raw_against_dequantized: a 2-D histogram
    plots/heatmaps/<model>/activations/...               as weights, statistics only
    plots/heatmaps/<model>/gradients/                    of the weights: <task>_mean, ...; <task>_<layer>
    plots/heatmaps/<model>/output_gradients/...          where the recipe quantises them, as activations

Each as .png, .html and .json, of a long training at its end and of any on request (`telemetry_page`). This module draws
the statistics, `weights` the windows. telemetry.jsonl has one line a snapshot, of every N-th step of a training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError

from fp4deploy.bench.records import Record
from fp4deploy.errors import InputError, counted
from fp4deploy.formats import E2M1_VALUES
from fp4deploy.report.comparison import PREFERRED
from fp4deploy.report.figures.heatmap import AMOUNT, COUNT, PHASES, SIGNED, Heatmap
from fp4deploy.report.figures.heatmap_files import picture, save_heatmap
from fp4deploy.report.figures.heatmap_page import save_script
from fp4deploy.report.figures.overlays import MAX_RUNS, PictureRow, themed_uri
from fp4deploy.report.figures.weights import weight_heatmaps
from fp4deploy.report.model import MODEL_TITLES
from fp4deploy.report.run_folder import RunData
from fp4deploy.runs import Run
from fp4deploy.system.schema import read_yaml
from fp4deploy.tasks import TASKS

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

TITLES = {
    "weight": "weights",
    "activation": "activations",
    "gradient": "weight gradients",
    "output_gradient": "gradients of the outputs",
}
FOLDERS = {
    "weight": "weights",
    "activation": "activations",
    "gradient": "gradients",
    "output_gradient": "output_gradients",
}
NUMBERS = {
    "weight SQNR, dB": ("weight", "sqnr_db", 1.0),
    "activation SQNR, dB": ("activation", "sqnr_db", 1.0),
    "codes flipped, %": ("weight", "flips", 100.0),
    "activations saturated, %": ("activation", "saturation", 100.0),
    "activation kurtosis": ("activation", "kurtosis", 1.0),
    "weight kurtosis": ("weight", "kurtosis", 1.0),
}


Placed = tuple[Path, Heatmap]


@dataclass(frozen=True)
class Shown:
    """How a statistic is shown: where, its unit, its colours."""

    phase: str
    name: str
    unit: str
    colours: str = AMOUNT
    log: bool = False
    low: float | None = None
    factor: float = 1.0


STATISTICS: dict[str, Shown] = {
    "mean": Shown("prequantize", "mean", "mean", SIGNED),
    "std": Shown("prequantize", "standard deviation", "std", log=True),
    "kurtosis": Shown("prequantize", "kurtosis (Pearson, normal 3)", "kurtosis", log=True),
    "coded_mean": Shown("quantized", "mean of the E2M1 values", "E2M1 units", SIGNED),
    "coded_std": Shown("quantized", "standard deviation of the E2M1 values", "E2M1 units"),
    "coded_kurtosis": Shown("quantized", "kurtosis of the E2M1 values (Pearson)", "kurtosis", log=True),
    "entropy_bits": Shown("quantized", "entropy of the codes", "bits of 4"),
    "saturation": Shown("quantized", "saturated elements", "%", low=0.0, factor=100),
    "underflow": Shown("quantized", "blocks whose scale underflowed", "%", low=0.0, factor=100),
    "lost": Shown("quantized", "blocks lost to a scale of 0", "%", low=0.0, factor=100),
    "zero": Shown("quantized", "blocks of zeros", "%", low=0.0, factor=100),
    "flips": Shown("quantized", "codes that changed since the snapshot before", "%", low=0.0, factor=100),
    "dequantized_mean": Shown("dequantized", "mean", "mean", SIGNED),
    "dequantized_std": Shown("dequantized", "standard deviation", "std", log=True),
    "dequantized_kurtosis": Shown("dequantized", "kurtosis (Pearson, normal 3)", "kurtosis", log=True),
    "sqnr_db": Shown("dequantized", "signal to quantisation noise", "dB"),
    "correlation": Shown("dequantized", "correlation of raw and dequantised", "Pearson"),
}


REPORTED = {
    "weights/quantized/flips": "codes of the weights that changed since the snapshot before",
    "weights/quantized/occupancy": "codes of the weights, at the end",
    "weights/dequantized/sqnr_db": "signal to quantisation noise of the weights",
    "activations/prequantize/kurtosis": "kurtosis of the activations",
    "activations/dequantized/sqnr_db": "signal to quantisation noise of the activations",
    "gradients/std": "standard deviation of the weight gradients",
}


class Snapshot(Record):
    """The statistics of one step: layer -> tensor -> statistic -> value, and how often each of the 16 codes occurs."""

    step: int
    layers: dict[str, dict[str, dict[str, float | None]]]
    codes: dict[str, dict[str, Annotated[list[int], Field(min_length=16, max_length=16)]]]


def read_snapshots(run: Run, model: str) -> list[Snapshot]:
    """The snapshots of a model's telemetry.jsonl in order; lines of other types or shapes are left out."""
    from fp4deploy.train.logging.jsonl_tracker import FILE, read_entries
    from fp4deploy.train.logging.tracker import SAMPLE

    found = []
    for entry in read_entries(run.model_dir(model) / FILE):
        if entry.kind == SAMPLE:
            with suppress(ValidationError):
                found.append(Snapshot.model_validate(entry, from_attributes=True))
    return found


def model_heatmaps(run: Run, model: str) -> list[Placed]:
    """Every heatmap of a model, with its place in the folder of the model and its name.

    Raises:
        InputError: the model left no telemetry.
    """
    from fp4deploy.train.logging.jsonl_tracker import FILE

    snapshots = read_snapshots(run, model)
    if not snapshots:
        raise InputError(
            f"{run.model_dir(model)} holds no telemetry to draw ({FILE}). Train with: fp4deploy train "
            "--telemetry-every 200 (with the tracker jsonl)"
        )
    return [*time_series(snapshots, model), *weight_heatmaps(run, model)]


def save_heatmaps(
    run: Run,
    model: str,
    heatmaps: Sequence[Placed],
    progress: Phase | None = None,
) -> list[Path]:
    """Write the three files of each heatmap; their names begin with the run's task.

    progress: is called with what is drawn, the heatmaps done and all of them.

    Raises:
        InputError: a file cannot be written.
    """
    folder, task = heatmap_folder(run, model), task_of_run(run)
    script = folder.parent / "plotly.min.js"
    save_script(script)
    written = []
    for number, (stem, heatmap) in enumerate(heatmaps):
        if progress:
            progress(f"heatmaps of {model}", number, len(heatmaps))
        written += save_heatmap(heatmap, folder / stem.parent / f"{task}_{stem.name}", script)
    return written


def task_of_run(run: Run) -> str:
    """The task in the run's settings; "semantic" where they cannot be read."""
    try:
        found = read_yaml(run.config_path)
    except InputError:
        return "semantic"
    task = found.get("task") if isinstance(found, dict) else None
    return task if task in TASKS else "semantic"


def heatmap_folder(run: Run, model: str) -> Path:
    """The folder of a model's heatmaps."""
    return run.path / "plots" / "heatmaps" / model


def telemetry_pictures(run: Run, models: Iterable[str]) -> list[tuple[str, str]]:
    """(caption, data URI) of the heatmaps that a report shows, of NVFP4 where it was tracked."""
    for model in sorted(models, key=lambda name: name != "nvfp4"):
        snapshots = read_snapshots(run, model)
        if snapshots:
            found = {place.as_posix(): heatmap for place, heatmap in time_series(snapshots, model)}
            shown = [(caption, found[name]) for name, caption in REPORTED.items() if name in found]
            return [(f"{model}: {caption}", _themed(heatmap)) for caption, heatmap in shown]
    return []


def _themed(heatmap: Heatmap) -> str:
    return themed_uri(picture(heatmap), picture(heatmap, dark=True))


def time_series(snapshots: Sequence[Snapshot], model: str) -> Iterator[tuple[Path, Heatmap]]:
    """Layers x steps of every statistic, layers x codes of the last snapshot."""
    layers = list(dict.fromkeys(layer for snapshot in snapshots for layer in snapshot.layers))
    steps = [str(snapshot.step) for snapshot in snapshots]
    for tensor, title in TITLES.items():
        coded = tensor != "gradient"
        for name, shown in STATISTICS.items():
            rows = {
                layer: [
                    _scaled(found.layers.get(layer, {}).get(tensor, {}).get(name), shown.factor) for found in snapshots
                ]
                for layer in layers
            }
            rows = {layer: values for layer, values in rows.items() if any(v is not None for v in values)}
            if not rows:
                continue
            phase = f", {PHASES[shown.phase]}" if coded else ""
            place = Path(FOLDERS[tensor]) / shown.phase if coded else Path(FOLDERS[tensor])
            yield (
                place / name,
                Heatmap(
                    f"{model}, {title}{phase}: {shown.name}",
                    f"{counted(len(rows), 'layer')}, {counted(len(snapshots), 'snapshot')}; a grey cell is undefined",
                    list(rows),
                    steps,
                    "layer",
                    "optimiser step",
                    list(rows.values()),
                    shown.unit,
                    shown.colours,
                    shown.log,
                    shown.low,
                    more={"statistic": name, "tensor": tensor, "factor": shown.factor},
                ),
            )
        yield from _occupancy(snapshots[-1], model, tensor, title)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor if factor != 1 else value


def _occupancy(snapshot: Snapshot, model: str, tensor: str, title: str) -> Iterator[tuple[Path, Heatmap]]:
    counts = {layer: tensors[tensor] for layer, tensors in snapshot.codes.items() if tensor in tensors}
    if not counts:
        return
    order = [*range(15, 7, -1), *range(8)]  # by value, -6 to 6
    values = [[100 * found[code] / max(1, sum(found)) for code in order] for found in counts.values()]
    names = [f"{'-' if code > 7 else ''}{E2M1_VALUES[code % 8]:g}" for code in order]
    yield (
        Path(FOLDERS[tensor]) / "quantized" / "occupancy",
        Heatmap(
            f"{model}, {title}: how often each code occurs",
            f"step {snapshot.step}; 16 codes, 6.25 % each if evenly distributed",
            list(counts),
            names,
            "layer",
            "code, by its E2M1 value",
            values,
            "%",
            COUNT,
            low=0.0,
            more={"codes": order, "counts": dict(counts)},
        ),
    )


COMPARED = {
    "weights/quantized/flips": "codes of the weights that changed since the snapshot before",
    "weights/dequantized/sqnr_db": "signal to quantisation noise of the weights",
    "activations/prequantize/kurtosis": "kurtosis of the activations",
    "gradients/std": "standard deviation of the weight gradients",
}
Tracked = tuple[int, str, list[Snapshot]]  # place of a run, model, its snapshots


def tracked_models(runs: Sequence[RunData]) -> list[Tracked]:
    """Of every run the most quantised model that was tracked."""
    found = []
    for place, run in enumerate(runs):
        for model in PREFERRED:
            snapshots = read_snapshots(Run(Path(run.path)), model)
            if snapshots:
                found.append((place, model, snapshots))
                break
    return found


def telemetry_numbers(runs: Sequence[RunData], tracked: Sequence[Tracked]) -> list[dict[str, str | int | float | None]]:
    """Of each tracked run: means over the layers at the last snapshot."""
    found = []
    for place, model, snapshots in tracked:
        last = snapshots[-1]
        row: dict[str, str | int | float | None] = {"run": runs[place].label, "model": model, "step": last.step}
        for title, (tensor, name, factor) in NUMBERS.items():
            values = [layer.get(tensor, {}).get(name) for layer in last.layers.values()]
            known = [factor * value for value in values if value is not None]
            row[title] = sum(known) / len(known) if known else None
        found.append({**row, "snapshots": len(snapshots)})
    return found


def draw_telemetry(runs: Sequence[RunData], tracked: Sequence[Tracked]) -> list[PictureRow]:
    """A row a statistic, a heatmap a run. One statistic has one colour scale: equal colours are equal numbers."""
    drawn = [
        (
            f"{runs[place].label}: {MODEL_TITLES[model]}",
            {str(stem): found for stem, found in time_series(snapshots, model)},
        )
        for place, model, snapshots in tracked[:MAX_RUNS]
    ]
    rows = []
    for stem, caption in COMPARED.items():
        present = [(title, found[stem]) for title, found in drawn if stem in found]
        if present:
            alike = _one_scale(present)
            rows.append(PictureRow(caption, [(found.title, _themed(found)) for found in alike]))
    return rows


def _one_scale(present: Sequence[tuple[str, Heatmap]]) -> list[Heatmap]:
    ends = [heatmap.limits() for _, heatmap in present]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    return [replace(heatmap, title=title, low=low, high=high) for title, heatmap in present]
