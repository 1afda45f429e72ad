"""Curves of several runs in one picture: a colour and a marker a run, a line style a model.

The colours are Okabe and Ito's without yellow, which paper swallows. Fine-tuned epochs are drawn after those of the
run's FP16 model, as in a run's own report.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from fp4deploy.report.compare import TITLES
from fp4deploy.report.figures.curves import METRICS, STYLE

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES: dict[str, Any] = {"fp16": "-", "nvfp4": "--", "fp16_control": ":", "nvfp4_ptq": "None"}


def colour(place: int) -> str:
    """Colour of the run at a place."""
    return COLOURS[place % len(COLOURS)]


def draw_comparison(runs: Sequence[dict[str, Any]], histories: Sequence[dict[str, list[dict[str, Any]]]]) -> str | None:
    """SVG of loss and score; None where no run has an epoch. `histories`: of each run, model -> lines of epochs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.lines import Line2D

    keys = [key for key in METRICS if any(key in line for found in histories for e in found.values() for line in e)]
    models = [model for model in LINES if any(found.get(model) for found in histories)]
    if not models:
        return None
    panels = [("loss", "training loss", 1.0)]
    panels += [(key, f"validation {METRICS[key]}, points", 100.0) for key in keys]
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(panels), figsize=(10, 3.9), layout="constrained", squeeze=False)
        for place, (run, found) in enumerate(zip(runs, histories, strict=True)):
            scratch = run["config"].get("train.from_scratch")
            offset = 0 if scratch else max((line["epoch"] for line in found.get("fp16", [])), default=0)
            for model, lines in found.items():
                before = 0 if model == "fp16" else offset
                for axis, (key, _, factor) in zip(grid[0], panels, strict=True):
                    scored = [line for line in lines if isinstance(line.get(key), int | float)]
                    axis.plot(
                        [before + line["epoch"] for line in scored],
                        [factor * line[key] for line in scored],
                        color=colour(place), linestyle=LINES[model], linewidth=1.8,
                        marker=MARKERS[place % len(MARKERS)], markersize=4,
                    )  # fmt: skip
        for axis, (_, title, _) in zip(grid[0], panels, strict=True):
            axis.set(title=title, xlabel="epoch")
            axis.xaxis.get_major_locator().set_params(integer=True)
        handles = [
            Line2D([], [], color=colour(place), marker=MARKERS[place % len(MARKERS)]) for place, run in enumerate(runs)
        ]
        styles = [
            Line2D([], [], color="#495057", linestyle=LINES[model], marker="." if model == "nvfp4_ptq" else None)
            for model in models
        ]
        names = [*(run["label"] for run in runs), *(TITLES[model] for model in models)]
        figure.legend([*handles, *styles], names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = target.getvalue()
    return text[text.index("<svg") :]
