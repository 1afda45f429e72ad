"""Predictions of the models of several runs on the same validation images, for a comparison.

The images are evenly spaced over the validation split. Those with the most classes or objects are shown, and last the
one on which the models differ most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4deploy.bench.runtimes.pytorch import TorchRuntime
from fp4deploy.data.palette import colours
from fp4deploy.data.sample import spread
from fp4deploy.errors import Fp4DeployError, InputError
from fp4deploy.report.comparison import Member, comparable
from fp4deploy.report.figures.overlays import MAX_RUNS, PictureRow, png_uri
from fp4deploy.report.figures.task_pictures import PICTURES, most_telling
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
    kind, dataset = PICTURES[card.task], task_of(card).for_card(card, data, labelled=True)
    if not len(dataset):
        raise InputError(f"the validation split of {data} holds no images.")
    seen = [kind.see(card, dataset.load(index), models) for index in spread(len(dataset), CANDIDATES)]
    rows = []
    for each, differing in most_telling(kind, seen, SHOWN):
        drawn = [kind.draw(each.image, labels, card) for labels in (each.truth, *each.predictions)]
        named = zip(("image", "truth", *titles), (each.image, *drawn), strict=True)
        unlike = f": up to {100 * differing:.2f} % of {kind.unit} differ from {titles[0]}" if len(models) > 1 else ""
        rows.append(PictureRow(f"{each.name}{unlike}", [(title, png_uri(pixels, LARGEST)) for title, pixels in named]))
    palette = zip(card.class_names, colours(card.class_names, card.background), strict=True)
    return rows, [(name, colour) for name, colour in palette if colour] if kind.legend else []
