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

Each as .png, .html and .json. A window is the first 32 output channels by the first 64 elements that they contract,
four blocks of 16, the same elements before, during and after quantisation.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.errors import InputError
from fp4deploy.formats import E2M1_VALUES
from fp4deploy.report.figures.heatmap_files import AMOUNT, COUNT, SIGNED, Cell, Heatmap, save_heatmap, save_script
from fp4deploy.runs import Run

if TYPE_CHECKING:
    import torch

    from fp4deploy.qat import QuantizedLayer
    from fp4deploy.train.logging.trackers import Entry

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
PHASES = {"prequantize": "before quantisation", "quantized": "codes", "dequantized": "dequantised"}
BINS, REACH = 81, 4.05  # of the 2-D histogram: a tenth of a standard deviation each, as far as four


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
    "flips": Shown("quantized", "codes that changed since the last look", "%", low=0.0, factor=100),
    "dequantized_mean": Shown("dequantized", "mean", "mean", SIGNED),
    "dequantized_std": Shown("dequantized", "standard deviation", "std", log=True),
    "dequantized_kurtosis": Shown("dequantized", "kurtosis (Pearson, normal 3)", "kurtosis", log=True),
    "sqnr_db": Shown("dequantized", "signal to quantisation noise", "dB"),
    "correlation": Shown("dequantized", "correlation of raw and dequantised", "Pearson"),
}


REPORTED = {
    "weights/quantized/*_flips": "codes of the weights that changed from look to look",
    "weights/quantized/*_occupancy": "codes of the weights, at the end",
    "weights/dequantized/*_sqnr_db": "signal to quantisation noise of the weights",
    "activations/prequantize/*_kurtosis": "kurtosis of the activations",
    "activations/dequantized/*_sqnr_db": "signal to quantisation noise of the activations",
    "gradients/*_std": "standard deviation of the weight gradients",
}


def draw_heatmaps(run: Run, model: str, task: str = "semantic") -> list[Path]:
    """Draw every heatmap of one trained model from the files in its run; returns the files.

    Raises:
        InputError: the model left no telemetry, or a file cannot be written.
    """
    from fp4deploy.train.logging.trackers import FILE, SAMPLE, read_entries

    looks = [entry for entry in read_entries(run.model_dir(model) / FILE) if entry.kind == SAMPLE]
    if not looks:
        raise InputError(
            f"{run.model_dir(model)} holds no telemetry to draw ({FILE}). Train with: fp4deploy train "
            "--telemetry-every 200 (with the tracker jsonl)"
        )
    folder = heatmap_folder(run, model)
    script = folder.parent / "plotly.min.js"
    save_script(script)
    written = []
    for stem, heatmap in (*courses(looks, model), *_matrices(run, model)):
        written += save_heatmap(heatmap, folder / stem.parent / f"{task}_{stem.name}", script)
    return written


def heatmap_folder(run: Run, model: str) -> Path:
    """Where the heatmaps of a model lie."""
    return run.path / "plots" / "heatmaps" / model


def telemetry_pictures(run: Run, models: Iterable[str]) -> list[tuple[str, str]]:
    """(caption, data URI) of the heatmaps that a report shows, of NVFP4 where it has them."""
    for model in sorted(models, key=lambda name: name != "nvfp4"):
        folder = heatmap_folder(run, model)
        found = [
            (caption, path) for name, caption in REPORTED.items() for path in sorted(folder.glob(f"{name}.png"))[:1]
        ]
        if found:
            return [
                (f"{model}: {caption}", "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode())
                for caption, path in found
            ]
    return []


def courses(looks: Sequence[Entry], model: str) -> Iterator[tuple[Path, Heatmap]]:
    """Layers x steps of every statistic, layers x codes of the last look."""
    layers = list(dict.fromkeys(layer for entry in looks for layer in entry.layers))
    steps = [str(entry.step) for entry in looks]
    for tensor, title in TITLES.items():
        coded = tensor != "gradient"
        for name, shown in STATISTICS.items():
            rows = {
                layer: [_times(entry.layers.get(layer, {}).get(tensor, {}).get(name), shown.factor) for entry in looks]
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
                    f"{len(rows)} layers, {len(looks)} looks; a grey cell is undefined",
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
        yield from _occupancy(looks[-1], model, tensor, title)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor if factor != 1 else value


def _occupancy(look: Entry, model: str, tensor: str, title: str) -> Iterator[tuple[Path, Heatmap]]:
    counts = {layer: tensors[tensor] for layer, tensors in look.codes.items() if tensor in tensors}
    if not counts:
        return
    order = [*range(15, 7, -1), *range(8)]  # by value, -6 to 6
    values = [[100 * found[code] / max(1, sum(found)) for code in order] for found in counts.values()]
    names = [f"{'-' if code > 7 else ''}{E2M1_VALUES[code % 8]:g}" for code in order]
    yield (
        Path(FOLDERS[tensor]) / "quantized" / "occupancy",
        Heatmap(
            f"{model}, {title}: how often each code occurs",
            f"step {look.step}; 16 codes, evenly 6.25 % each",
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


def _matrices(run: Run, model: str) -> Iterator[tuple[Path, Heatmap]]:
    """Windows of every layer's weight and of its last gradient, and raw against dequantised weights."""
    from fp4deploy.qat import QuantizedLayer, load_model
    from fp4deploy.qat.telemetry.collect import Watcher, contracted_axis, window
    from fp4deploy.train.logging.telemetry import read_gradients

    gradients = read_gradients(run.model_dir(model))
    checkpoint = run.checkpoint(model)
    if checkpoint.is_file():
        network, _ = load_model(checkpoint)
        layers = Watcher(network).layers
        for name, layer in layers.items():
            weight: Any = layer.weight
            axis = contracted_axis(layer)
            yield _matrix(model, "weights/prequantize", name, window(weight, axis), "weight", "of the best checkpoint")
            if isinstance(layer, QuantizedLayer) and layer.recipe.weight is not None:
                codes, values = quantized_weight(layer)
                yield _matrix(model, "weights/quantized", name, window(codes, axis), "", "of the best checkpoint")
                yield _matrix(
                    model, "weights/dequantized", name, window(values, axis), "weight", "of the best checkpoint"
                )
        quantized = {name: layer for name, layer in layers.items() if isinstance(layer, QuantizedLayer)}
        if any(layer.recipe.weight for layer in quantized.values()):
            yield _against(model, quantized)
    for name, gradient in gradients.items():
        yield _matrix(model, "gradients", name, gradient, "gradient", "of the last look, clipped")


def quantized_weight(layer: QuantizedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, dequantised values) of a layer's weight, both in its shape; to nearest."""
    from dataclasses import replace

    from fp4deploy.qat.quantizers import quantize_operand
    from fp4deploy.qat.telemetry.statistics import codes_in_place, encode

    gemms, weight = layer.gemms(), layer.weight.detach()
    assert layer.recipe.weight is not None
    spec = replace(layer.recipe.weight, rounding="nearest")
    coded = encode(weight, spec, gemms.weight_axes, gemms.weight_groups)
    values, _ = quantize_operand(weight, spec, gemms.weight_axes, None, gemms.weight_groups)
    return codes_in_place(coded, weight, spec, gemms.weight_axes, gemms.weight_groups), values


def _matrix(model: str, place: str, name: str, part: torch.Tensor, unit: str, of: str) -> tuple[Path, Heatmap]:
    phase = place.split("/")[-1]
    more: dict[str, Any] = {"layer": name}
    ticks = None
    limits: tuple[float | None, float | None] = (None, None)
    values: list[list[Cell]]
    if phase == "quantized":
        codes = part.tolist()
        more["codes"] = codes
        values = [[(-1 if code > 7 else 1) * E2M1_VALUES[code % 8] for code in row] for row in codes]
        ticks, limits, unit = [*(-v for v in E2M1_VALUES[:0:-1]), *E2M1_VALUES], (-6.0, 6.0), "E2M1 value"
    else:
        values = [[float(f"{v:.6g}") for v in row] for row in part.double().nan_to_num(0.0, 0.0, 0.0).tolist()]
    what = "weight gradient" if phase == "gradients" else f"weight, {PHASES[phase]}"
    rows, columns = part.shape
    return (
        Path(place) / name,
        Heatmap(
            f"{model}, {name}: {what}",
            f"first {rows} output channels by first {columns} elements of their products, {of}",
            [str(row) for row in range(rows)],
            [str(column) for column in range(columns)],
            "output channel",
            "input channel of the first tap, then of the next",
            values,
            unit,
            SIGNED,
            low=limits[0],
            high=limits[1],
            ticks=ticks,
            cell=0.13,
            more=more,
        ),
    )


def _against(model: str, layers: dict[str, QuantizedLayer]) -> tuple[Path, Heatmap]:
    """2-D histogram of all quantised weights before and after, each in standard deviations of its layer."""
    import torch

    total = torch.zeros(BINS, BINS, dtype=torch.float64)
    pairs, sums = 0, torch.zeros(3, dtype=torch.float64)
    for layer in layers.values():
        if layer.recipe.weight is None:
            continue
        raw = layer.weight.detach().double().flatten()
        _, values = quantized_weight(layer)
        deviation = raw.std(correction=0).clamp(min=torch.finfo(torch.float64).tiny)
        both = torch.stack((raw / deviation, values.double().flatten() / deviation), 1)
        centred = both - both.mean(0)
        sums += torch.stack((centred.prod(1).sum(), *centred.square().sum(0)))
        ends = [-REACH, REACH]
        total += torch.histogramdd(both, [BINS, BINS], range=[*ends, *ends]).hist
        pairs += len(both)
    correlation = float(sums[0] / (sums[1] * sums[2]).sqrt())
    middles = [f"{(at - BINS // 2) * 2 * REACH / BINS:.2g}" for at in range(BINS)]
    cells = [[int(v) or None for v in row] for row in total.T.flip(0).tolist()]
    shown = int(total.sum())
    return (
        Path("weights/dequantized/raw_against_dequantized"),
        Heatmap(
            f"{model}: weights before and after quantisation",
            f"{pairs} weights, correlation {correlation:.4f}; {100 * (1 - shown / max(1, pairs)):.2f} % lie outside",
            middles[::-1],
            middles,
            "dequantised, std of its layer",
            "raw, std of its layer",
            cells,
            "weights a cell",
            COUNT,
            log=True,
            cell=0.06,
            more={"correlation": correlation, "weights": pairs, "bin_width_std": 2 * REACH / BINS},
        ),
    )
