"""Predictions of the models of several runs on the same validation images, for a comparison.

The images are evenly spaced over the validation split. Those with the most classes or objects are shown, and last the
one on which the models differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
from fp4deploy.predict.palette import colours, tinted
from fp4deploy.report.comparison import Member, comparable
from fp4deploy.report.figures.instance_overlays import different
from fp4deploy.report.figures.overlays import MOST_RUNS, PictureRow, png_uri
from fp4deploy.report.model import MODEL_TITLES
from fp4deploy.report.run_folder import RunData, readable
from fp4deploy.runs import Run

CANDIDATES, SHOWN = 12, 3  # images compared, and images shown
LARGEST = 360  # side of a picture in pixels


@dataclass(frozen=True)
class Predictions:
    """A row an image; `missing` says in sentences why there are none, or for which runs; legend: class and colour."""

    rows: list[PictureRow]
    missing: list[str]
    legend: list[tuple[str, tuple[int, int, int]]]


def draw_predictions(runs: Sequence[RunData], chosen: Sequence[Member]) -> Predictions:
    """Predictions of (place of the run, model) on a few validation images of the first run that has its data."""
    usable, missing = _usable(runs, chosen)
    if not usable:
        return Predictions([], [*missing, "No run has a checkpoint to draw."], [])
    first = runs[usable[0][0]]
    data = next((d for place, _ in usable if (d := readable(runs[place].data, Path(runs[place].path)))), None)
    if data is None:
        return Predictions([], [*missing, f"The validation images ({first.data}) are no longer there."], [])
    try:
        rows, legend = _rows(runs, usable, data)
    except Fp4DeployError as error:
        return Predictions([], [*missing, f"Samples could not be drawn: {error}"], [])
    return Predictions(rows, missing, legend)


def _usable(runs: Sequence[RunData], chosen: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """Models that can be drawn together, and why the others cannot."""
    usable: list[Member] = []
    missing = []
    for place, model in chosen:
        run = runs[place]
        if not comparable(runs[chosen[0][0]], run):
            missing.append(f"{run.label} has another task or other classes.")
        elif not run.models[model].checkpoint:
            missing.append(f"{run.label} has no checkpoint.")
        else:
            usable.append((place, model))
    if len(usable) > MOST_RUNS:
        missing.append(f"Only the first {MOST_RUNS} runs are drawn.")
    return usable[:MOST_RUNS], missing


def _rows(
    runs: Sequence[RunData], chosen: Sequence[Member], data: Path
) -> tuple[list[PictureRow], list[tuple[str, tuple[int, int, int]]]]:
    models = [TorchRuntime(Run(Path(runs[place].path)).checkpoint(model)) for place, model in chosen]
    titles = [f"{runs[place].label}: {MODEL_TITLES[model]}" for place, model in chosen]
    card = models[0].card
    instance = card.head is not None
    dataset: Any = instance_set(card, data, numbered=True) if instance else validation_set(card, data)
    if not len(dataset):
        raise InputError(f"the validation split of {data} holds no images.")
    palette = colours(len(card.class_names), card.background)
    found = []
    for index in sorted({round(place) for place in np.linspace(0, len(dataset) - 1, CANDIDATES)}):
        sample = dataset.load(index)
        predictions = [_predict(model, sample) for model in models]
        unlike = [different(predictions[0], a) if instance else predictions[0] != a for a in predictions[1:]]
        differing = [float(pixels.mean()) for pixels in unlike]
        rich = int(sample.instances.max(initial=0)) if instance else len(np.unique(sample.mask))
        found.append((sample, predictions, max(differing, default=0.0), rich))
    most = max(found, key=lambda entry: entry[2])
    others = sorted((entry for entry in found if entry is not most), key=lambda entry: -entry[3])
    rows = []
    for sample, predictions, most_differing, _ in (*others[: SHOWN - 1], most):
        void = sample.mask == IGNORE
        if instance:
            drawn = [draw_instances(sample.image, sample.instances, void)]
            drawn += [draw_instances(sample.image, prediction) for prediction in predictions]
        else:
            drawn = [tinted(sample.image, mask, palette) for mask in (sample.mask, *predictions)]
        named = zip(("image", "truth", *titles), (sample.image, *drawn), strict=True)
        difference = (
            "" if len(models) < 2 else f": up to {100 * most_differing:.2f} % of pixels differ from {titles[0]}"
        )
        rows.append(
            PictureRow(f"{sample.name}{difference}", [(title, png_uri(pixels, LARGEST)) for title, pixels in named])
        )
    return rows, [] if instance else [(n, c) for n, c in zip(card.class_names, palette, strict=True) if c]


def _predict(model: TorchRuntime, sample: Any) -> NDArray[Any]:
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
