"""Pictures of a comparison: the same validation images by the models of several runs, and telemetry side by side.

Heatmaps of one statistic share one colour scale over all runs, so that equal colours are equal numbers. They are drawn
from telemetry.jsonl, also that of an interrupted training.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE, EvalTransform, NumberedEvalTransform, instance_set, validation_set
from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.instances import decode
from fp4deploy.instances.draw import draw_instances
from fp4deploy.report.compare import TITLES, comparable
from fp4deploy.report.figures.heatmap_files import Heatmap, picture
from fp4deploy.report.figures.heatmaps import courses
from fp4deploy.report.figures.instance_overlays import different
from fp4deploy.report.figures.overlays import Pixels, colours, tinted
from fp4deploy.report.run_data import readable
from fp4deploy.runs import Run

CANDIDATES, SHOWN = 12, 3  # images looked at, and images shown
MOST_RUNS = 4  # columns of answers and of heatmaps that stay legible
LARGEST = 360  # side of a picture in pixels
HEATMAPS = {
    "weights/quantized/flips": "codes of the weights that changed from look to look",
    "weights/dequantized/sqnr_db": "signal to quantisation noise of the weights",
    "activations/prequantize/kurtosis": "kurtosis of the activations",
    "gradients/std": "standard deviation of the weight gradients",
}
NUMBERS = {
    "weight SQNR, dB": ("weight", "sqnr_db", 1.0),
    "activation SQNR, dB": ("activation", "sqnr_db", 1.0),
    "codes flipped, %": ("weight", "flips", 100.0),
    "activations saturated, %": ("activation", "saturation", 100.0),
    "activation kurtosis": ("activation", "kurtosis", 1.0),
    "weight kurtosis": ("weight", "kurtosis", 1.0),
}


@dataclass(frozen=True)
class Row:
    """One image or statistic: caption, and (title, data URI) of its pictures."""

    caption: str
    pictures: list[tuple[str, str]]


@dataclass(frozen=True)
class Samples:
    """Rows of answers; `missing` says in a sentence why there are none, or for which runs."""

    rows: list[Row]
    missing: list[str]
    legend: list[tuple[str, tuple[int, int, int]]]


def draw_samples(runs: Sequence[dict[str, Any]], chosen: Sequence[tuple[int, str]]) -> Samples:
    """Answers of (place of the run, model) to a few validation images of the first run that has its data."""
    first = runs[chosen[0][0]] if chosen else None
    usable = [m for m in chosen if first and comparable(first, runs[m[0]]) and runs[m[0]]["models"][m[1]]["checkpoint"]]
    left = [f"{runs[place]['label']} answers another task or other classes." for place, _ in chosen
            if first and not comparable(first, runs[place])]  # fmt: skip
    left += [f"{runs[m[0]]['label']} has no checkpoint to ask." for m in chosen
             if not runs[m[0]]["models"][m[1]]["checkpoint"]]  # fmt: skip
    if len(usable) > MOST_RUNS:
        left.append(f"Only the first {MOST_RUNS} runs are drawn.")
    usable = usable[:MOST_RUNS]
    if not usable:
        return Samples([], [*left, "No run has a checkpoint to draw."], [])
    data = next((d for m in usable if (d := readable(runs[m[0]]["data"], Path(runs[m[0]]["path"])))), None)
    if data is None:
        return Samples([], [*left, f"The validation images ({first and first['data']}) are not here any more."], [])
    try:
        rows, legend = _answers(runs, usable, data)
    except Fp4DeployError as error:
        return Samples([], [*left, f"Samples could not be drawn: {error}"], [])
    return Samples(rows, left, legend)


def _answers(
    runs: Sequence[dict[str, Any]], chosen: Sequence[tuple[int, str]], data: Path
) -> tuple[list[Row], list[tuple[str, tuple[int, int, int]]]]:
    models = [TorchRuntime(Run(Path(runs[place]["path"])).checkpoint(model)) for place, model in chosen]
    titles = [f"{runs[place]['label']}: {TITLES[model]}" for place, model in chosen]
    card = models[0].card
    instance = card.head is not None
    dataset: Any = instance_set(card, data, numbered=True) if instance else validation_set(card, data)
    if not len(dataset):
        raise InputError(f"the validation split of {data} holds no images.")
    palette = colours(len(card.class_names), card.background)
    found = []
    for index in sorted({round(place) for place in np.linspace(0, len(dataset) - 1, CANDIDATES)}):
        sample = dataset.load(index)
        answers = [_ask(model, sample) for model in models]
        unlike = [different(answers[0], a) if instance else answers[0] != a for a in answers[1:]]
        differing = [float(pixels.mean()) for pixels in unlike]
        rich = int(sample.instances.max(initial=0)) if instance else len(np.unique(sample.mask))
        found.append((sample, answers, max(differing, default=0.0), rich))
    most = max(found, key=lambda entry: entry[2])
    others = sorted((entry for entry in found if entry is not most), key=lambda entry: -entry[3])
    rows = []
    for sample, answers, most_differing, _ in (*others[: SHOWN - 1], most):
        void = sample.mask == IGNORE
        if instance:
            drawn = [draw_instances(sample.image, sample.instances, void)]
            drawn += [draw_instances(sample.image, answer) for answer in answers]
        else:
            drawn = [tinted(sample.image, mask, palette) for mask in (sample.mask, *answers)]
        named = zip(("image", "truth", *titles), (sample.image, *drawn), strict=True)
        told = "" if len(models) < 2 else f": up to {100 * most_differing:.2f} % of pixels differ from {titles[0]}"
        rows.append(Row(f"{sample.name}{told}", [(title, _uri(pixels)) for title, pixels in named]))
    return rows, [] if instance else [(n, c) for n, c in zip(card.class_names, palette, strict=True) if c]


def _ask(model: TorchRuntime, sample: Any) -> NDArray[Any]:
    """Class ids, or numbers of objects, [H, W] at the image's own size."""
    card = model.card
    height, width = sample.mask.shape
    numbered = NumberedEvalTransform if card.head else EvalTransform
    image = numbered(card.height, card.width, card.mean, card.std)(sample)[0].numpy()[None]
    output = model.infer(image)[0]
    if card.head:
        return np.asarray(decode(torch.from_numpy(output), card.head, (height, width)).ids)
    mask = Image.fromarray(output.argmax(0).astype(np.uint8)).resize((width, height), Image.Resampling.NEAREST)
    return np.asarray(mask)


def _uri(pixels: Pixels) -> str:
    image = Image.fromarray(pixels)
    image.thumbnail((LARGEST, LARGEST), Image.Resampling.LANCZOS)
    target = io.BytesIO()
    image.save(target, format="PNG", optimize=True)
    return _data("png", target.getvalue())


def _data(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


def read_looks(runs: Sequence[dict[str, Any]]) -> list[tuple[int, str, list[Any]]]:
    """(place, model, looks) of every run's most quantised model that was tracked."""
    from fp4deploy.report.compare import PREFERRED
    from fp4deploy.train.logging.trackers import FILE, SAMPLE, read_entries

    found = []
    for place, run in enumerate(runs):
        for model in PREFERRED:
            path = Run(Path(run["path"])).model_dir(model) / FILE
            looks = [entry for entry in read_entries(path) if entry.kind == SAMPLE] if path.is_file() else []
            if looks:
                found.append((place, model, looks))
                break
    return found


def telemetry_numbers(runs: Sequence[dict[str, Any]], looks: Sequence[tuple[int, str, list[Any]]]) -> list[Any]:
    """Of each tracked run: means over the layers at the last look."""
    found = []
    for place, model, entries in looks:
        row: dict[str, Any] = {"run": runs[place]["label"], "model": model, "step": entries[-1].step}
        for title, (tensor, name, factor) in NUMBERS.items():
            values = [layer.get(tensor, {}).get(name) for layer in entries[-1].layers.values()]
            known = [factor * value for value in values if value is not None]
            row[title] = sum(known) / len(known) if known else None
        found.append({**row, "looks": len(entries)})
    return found


def draw_telemetry(runs: Sequence[dict[str, Any]], looks: Sequence[tuple[int, str, list[Any]]]) -> list[Row]:
    """A row a statistic, a heatmap a run, all with the same colours."""
    drawn = [
        (f"{runs[place]['label']}: {TITLES[model]}", {str(stem): heatmap for stem, heatmap in courses(entries, model)})
        for place, model, entries in looks[:MOST_RUNS]
    ]
    rows = []
    for stem, caption in HEATMAPS.items():
        present = [(title, found[stem]) for title, found in drawn if stem in found]
        if present:
            rows.append(Row(caption, [(t, _data("png", picture(h))) for t, h in _alike(present)]))
    return rows


def _alike(present: Sequence[tuple[str, Heatmap]]) -> list[tuple[str, Heatmap]]:
    ends = [heatmap.limits() for _, heatmap in present]
    low, high = min(end[0] for end in ends), max(end[1] for end in ends)
    return [(title, replace(heatmap, title=title, low=low, high=high)) for title, heatmap in present]
