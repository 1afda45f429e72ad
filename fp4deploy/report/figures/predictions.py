"""Predictions of the models of several runs on the same validation images, for a comparison.

The images are evenly spaced over the validation split. Those with the most classes or objects are shown, and last the
one on which the models differ most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data import IGNORE
from fp4deploy.data.palette import Palette, colours, tinted
from fp4deploy.data.sample import spread
from fp4deploy.detection.draw import draw_boxes
from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.instances import decode
from fp4deploy.instances.draw import draw_instances
from fp4deploy.models.heads import InstanceHead
from fp4deploy.report.comparison import Member, comparable
from fp4deploy.report.figures.box_overlays import find_boxes, true_boxes, unmatched_share
from fp4deploy.report.figures.instance_overlays import different
from fp4deploy.report.figures.overlays import MAX_RUNS, PictureRow, most_telling, png_uri
from fp4deploy.report.model import MODEL_TITLES
from fp4deploy.report.run_folder import RunData, readable
from fp4deploy.runs import Run
from fp4deploy.tasks import task_of

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
    if len(usable) > MAX_RUNS:
        missing.append(f"Only the first {MAX_RUNS} runs are drawn.")
    return usable[:MAX_RUNS], missing


def _rows(
    runs: Sequence[RunData], chosen: Sequence[Member], data: Path
) -> tuple[list[PictureRow], list[tuple[str, tuple[int, int, int]]]]:
    models = [TorchRuntime(Run(Path(runs[place].path)).checkpoint(model)) for place, model in chosen]
    titles = [f"{runs[place].label}: {MODEL_TITLES[model]}" for place, model in chosen]
    card = models[0].card
    if card.volume is not None:
        return [], []  # the report of each run has slices
    kind = KINDS[card.task]
    dataset: Any = task_of(card).for_card(card, data, labelled=True)
    if not len(dataset):
        raise InputError(f"the validation split of {data} holds no images.")
    palette = colours(card.class_names, card.background)
    found = []
    for index in spread(len(dataset), CANDIDATES):
        sample = dataset.load(index)
        predictions = [kind.predict(model, sample) for model in models]
        differing = [kind.differing(predictions[0], each) for each in predictions[1:]]
        found.append((sample, predictions, max(differing, default=0.0), kind.richness(sample)))
    rows = []
    for sample, predictions, most_differing, _ in most_telling(
        found, lambda each: each[2], lambda each: each[3], SHOWN
    ):
        drawn = [kind.truth(sample, palette), *(kind.draw(sample.image, each, palette) for each in predictions)]
        named = zip(("image", "truth", *titles), (sample.image, *drawn), strict=True)
        unlike = f": up to {100 * most_differing:.2f} % of {kind.unit} differ from {titles[0]}"
        difference = "" if len(models) < 2 else unlike
        rows.append(
            PictureRow(f"{sample.name}{difference}", [(title, png_uri(pixels, LARGEST)) for title, pixels in named])
        )
    legend = [(n, c) for n, c in zip(card.class_names, palette, strict=True) if c] if kind.legend else []
    return rows, legend


@dataclass(frozen=True)
class _Kind:
    """How predictions of one task are made, compared and drawn; `richness` orders images, `unit` is what differs."""

    predict: Callable[[TorchRuntime, Any], Any]
    differing: Callable[[Any, Any], float]
    richness: Callable[[Any], int]
    truth: Callable[[Any, Palette], Any]
    draw: Callable[[Any, Any, Palette], Any]
    unit: str = "pixels"
    legend: bool = False


def _classes(model: TorchRuntime, sample: Any) -> NDArray[Any]:
    """Class ids [H, W] at the image's own size."""
    height, width = sample.mask.shape
    mask = Image.fromarray(_output(model, sample).argmax(0).astype(np.uint8))
    return np.asarray(mask.resize((width, height), Image.Resampling.NEAREST))


def _class_of_image(model: TorchRuntime, sample: Any) -> NDArray[Any]:
    """The class of the image at each of its pixels, [H, W]."""
    return np.full(sample.mask.shape, _output(model, sample).argmax(), np.uint8)


def _numbers(model: TorchRuntime, sample: Any) -> NDArray[Any]:
    """Numbers of objects [H, W] at the image's own size."""
    head = model.card.head
    assert isinstance(head, InstanceHead)
    height, width = sample.mask.shape
    return np.asarray(decode(torch.from_numpy(_output(model, sample)), head, (height, width)).ids)


def _output(model: TorchRuntime, sample: Any) -> NDArray[Any]:
    card = model.card
    image = task_of(card).transform(card.size, card.mean, card.std)(sample)[0].numpy()[None]
    return model.infer(image)[0]


KINDS = {
    "semantic": _Kind(
        predict=_classes,
        differing=lambda first, second: float((first != second).mean()),
        richness=lambda sample: len(np.unique(sample.mask)),
        truth=lambda sample, palette: tinted(sample.image, sample.mask, palette),
        draw=tinted,
        legend=True,
    ),
    "instance": _Kind(
        predict=_numbers,
        differing=lambda first, second: float(different(first, second).mean()),
        richness=lambda sample: int(sample.instances.max(initial=0)),
        truth=lambda sample, _: draw_instances(sample.image, sample.instances, sample.mask == IGNORE),
        draw=lambda image, found, _: draw_instances(image, found),
    ),
    "detection": _Kind(
        predict=find_boxes,
        differing=unmatched_share,
        richness=lambda sample: len(sample.boxes),
        truth=lambda sample, _: draw_boxes(sample.image, true_boxes(sample)),
        draw=lambda image, found, _: draw_boxes(image, found),
        unit="boxes",
    ),
}
KINDS["classification"] = replace(KINDS["semantic"], predict=_class_of_image)
