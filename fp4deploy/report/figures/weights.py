"""Heatmaps of single layers: windows of their weights before, during and after quantisation, and of their gradients.

A window is the first 32 output channels by the first 64 elements that they contract, four blocks of 16: the same
elements in every phase. The weights are those of the best checkpoint, the gradients of the last snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.formats import E2M1_VALUES
from fp4deploy.report.figures.heatmap import COUNT, PHASES, SIGNED, Cell, Heatmap
from fp4deploy.runs import Run

if TYPE_CHECKING:
    import torch

    from fp4deploy.qat import QuantizedLayer

BINS, REACH = 81, 4.05  # of the 2-D histogram: a tenth of a standard deviation each, as far as four


def weight_heatmaps(run: Run, model: str) -> Iterator[tuple[Path, Heatmap]]:
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
            yield _raw_against_dequantized(model, quantized)
    for name, gradient in gradients.items():
        yield _matrix(model, "gradients", name, gradient, "gradient", "of the last snapshot, clipped")


def quantized_weight(layer: QuantizedLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, dequantised values) of a layer's weight, both in its shape; to nearest."""
    from dataclasses import replace

    from fp4deploy.qat.operators.quantizers import quantize_operand
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
        Path(place) / name.replace("/", "_"),
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


def _raw_against_dequantized(model: str, layers: dict[str, QuantizedLayer]) -> tuple[Path, Heatmap]:
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
            f"{pairs} weights, correlation {correlation:.4f}; {100 * (1 - shown / max(1, pairs)):.2f} % are outside",
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
