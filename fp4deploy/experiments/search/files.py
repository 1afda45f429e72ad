"""The files of a search: recipe (precision.yaml), numbers (search.json), tables (search.md), picture (pareto.png)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from fp4deploy.bench import tables
from fp4deploy.experiments.panels import BLUE, ORANGE, panels, png
from fp4deploy.experiments.search.costs import LayerCost
from fp4deploy.experiments.search.run import Found, Point, sqnr
from fp4deploy.precisions import LAYER_FORMATS, PRECISIONS
from fp4deploy.ptq.methods import find_method
from fp4deploy.runs import run_of
from fp4deploy.system.files import write_whole
from fp4deploy.tasks import key_of
from fp4deploy.train import load_config

RECIPE = "precision.yaml"


def save_search(found: Found, folder: Path, checkpoint: Path) -> list[Path]:
    """Write the four files of the search of a checkpoint.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    contents = {
        RECIPE: recipe(found, checkpoint).encode(),
        "search.json": (json.dumps(_document(found), indent=1, allow_nan=False) + "\n").encode(),
        "search.md": render(found).encode(),
        "pareto.png": _picture(found),
    }
    for name, content in contents.items():
        write_whole(folder / name, content)
    return [folder / name for name in contents]


def recipe(found: Found, checkpoint: Path) -> str:
    """Settings that `train --config` and `quantize --config` take; the card carries the choice on to `export`.

    They are those of the run that holds the checkpoint, where one does, with the layers of the search: training starts
    from the checkpoint, on the same data, with the same network.
    """
    chosen, run = found.chosen, run_of(checkpoint)
    settings: dict[str, Any] = load_config(run.config_path).model_dump(mode="json") if run is not None else {}
    layers = [name for name in found.errors if name in chosen.quantized]
    settings["recipe"] = find_method(found.method).recipe
    settings["train"] = settings.get("train", {}) | {
        "init_checkpoint": str(Path(checkpoint).resolve()),
        "from_scratch": False,
    }
    settings["quant"] = settings.get("quant", {}) | {
        "include": layers,
        "exclude": None,
        **{name: list(chosen.placed[name.upper()]) or None for name in LAYER_FORMATS},
    }
    heading = f"# {found.budget.kind}={found.budget.most:g}: {_sentence(found, found.chosen)}\n"
    return heading + yaml.safe_dump(settings, sort_keys=False)


def render(found: Found) -> str:
    """The search as Markdown."""
    layers = [
        [
            name,
            *(f"{sqnr(found.errors[name][each]):.1f}" if each in cost.precisions else "–" for each in PRECISIONS),
            _precision(found.chosen, name),
            *(f"{cost.of(each, 'bytes') / 1e3:.1f}" for each in (*PRECISIONS, "FP16")),
            *(_microseconds(cost, each) for each in (*PRECISIONS, "FP16")),
        ]
        for name, cost in found.costs.items()
    ]
    points = [
        [
            *(f"{len(layers)}" for layers in point.placed.values()),
            f"{100 * point.score:.2f}",
            f"{100 * (found.fp16.score - point.score):.2f}",
            f"{point.bytes / 1e6:.2f}",
            f"{point.ms:.3g}",
        ]
        for point in (found.fp16, *found.points)
    ]
    return "\n".join(
        (
            f"# Search: {found.budget.kind}={found.budget.most:g}, method {found.method}, {found.images} images\n",
            f"Chosen: {_sentence(found, found.chosen)} Times for {found.gpu} are {found.latency}.\n",
            tables.markdown(
                (
                    "layers in FP4",
                    *(f"in {each}" for each in PRECISIONS[1:]),
                    f"{found.metric} %",
                    "drop, points",
                    "MB",
                    "ms",
                ),
                points,
            ),
            "Each layer alone in every precision: signal to error of the logits in dB, weights, time:\n",
            tables.markdown(
                (
                    "layer",
                    *(f"{each} dB" for each in PRECISIONS),
                    "chosen",
                    *(f"{each} {unit}" for unit in ("kB", "us") for each in (*PRECISIONS, "FP16")),
                ),
                layers,
            ),
        )
    )


def _microseconds(cost: LayerCost, precision: str) -> str:
    return f"{1e3 * cost.of(precision, 'ms'):.2f}" if precision in ("FP16", *cost.precisions) else "–"


def _precision(point: Point, name: str) -> str:
    return next((precision for precision, layers in point.placed.items() if name in layers), "FP16")


def _sentence(found: Found, point: Point) -> str:
    return (
        f"{point.counts(f' of {len(found.errors)}')}, "
        f"{found.metric} {100 * point.score:.2f} % (FP16 {100 * found.fp16.score:.2f} %), "
        f"{point.bytes / 1e6:.2f} MB of weights (FP16 {found.fp16.bytes / 1e6:.2f}), "
        f"{point.ms:.3g} ms {found.timed} (FP16 {found.fp16.ms:.3g})."
    )


def _document(found: Found) -> dict[str, object]:
    """Scores under the key of their task: "miou", "top1"; layers in FP4 under "layers"."""
    key = key_of(found.metric)

    def point(of: Point) -> dict[str, object]:
        placed = {"layers" if each == "FP4" else each.lower(): layers for each, layers in of.placed.items()}
        return {**placed, "error": of.error, "bytes": of.bytes, "ms": of.ms, key: of.score}

    points = {"chosen": point(found.chosen), "fp16": point(found.fp16), "points": [*map(point, found.points)]}
    costs = {name: cost.flat for name, cost in found.costs.items()}
    return {**dataclasses.asdict(found), **points, "costs": costs, "drop": found.drop}


def _picture(found: Found) -> bytes:
    figure, (weights, time) = panels((9.5, 3.8), 2, sharey=True)
    unit, factor = ("us", 1e3) if found.fp16.ms < 0.1 else ("ms", 1.0)
    _draw_panel(weights, found, lambda each: each.bytes / 1e6)
    weights.set_xlabel("weights, MB")
    _draw_panel(time, found, lambda each: factor * each.ms)
    time.set_xlabel(f"{unit} on {found.gpu}, {found.timed}")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.axes[0].set_ylabel(f"{found.metric}, %")
    return png(figure)


def _draw_panel(panel: Any, found: Found, cost: Callable[[Point], float]) -> None:
    """The score against a cost: the Pareto front as a line, dominated placements as open dots."""
    points = {found.fp16, found.chosen, *found.points}
    best = pareto_front(points, cost)
    for some, style, looks in (
        (best, "o-", {"color": BLUE, "ms": 4, "drawstyle": "steps-post", "label": "Pareto front"}),
        (points.difference(best), "o", {"color": BLUE, "ms": 4, "mfc": "white", "label": "dominated"}),
        ([found.fp16], "s", {"color": "#666666", "ms": 9, "mfc": "none", "label": "FP16"}),
        ([found.chosen], "*", {"color": ORANGE, "ms": 14, "mfc": "none", "label": "chosen"}),
    ):
        panel.plot([cost(each) for each in some], [100 * each.score for each in some], style, **looks)
    panel.locator_params(axis="x", nbins=6)
    panel.ticklabel_format(useOffset=False)


def pareto_front(points: Iterable[Point], cost: Callable[[Point], float]) -> list[Point]:
    """The points that no other one beats in cost and score, the cheapest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda each: (cost(each), -each.score)):
        if not front or point.score > front[-1].score:
            front.append(point)
    return front
