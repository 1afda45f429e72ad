"""Curves of training loss and validation score by epoch: of the models of one run, or of several runs.

A fine-tuned model starts where FP16 ended, so its epochs are drawn after FP16's: the picture shows the dip of
quantisation and what fine-tuning wins back. One run has a colour a model. Several runs have a colour and a marker a
run and a line style a model; the colours are Okabe and Ito's without yellow, which is hardly visible on paper. Where a
page is dark, a style sheet in the picture makes text and axes light: SVG knows the colour scheme of where it stands.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fp4deploy.report.history import Epoch
from fp4deploy.report.model import MODEL_TITLES
from fp4deploy.report.run_folder import RunData
from fp4deploy.runs import Run
from fp4deploy.system.files import write_whole

MODEL_COLOURS = {"fp16": "#4c6ef5", "nvfp4": "#0ca678", "fp16_control": "#adb5bd", "nvfp4_ptq": "#f08c00"}
RUN_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
LINES: dict[str, Any] = {"fp16": "-", "nvfp4": "--", "fp16_control": ":", "nvfp4_ptq": "None"}
METRICS = {"miou": "mIoU", "ap": "AP", "top1": "top-1"}
STYLE: Any = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#ced4da",
    "axes.labelcolor": "#495057",
    "axes.grid": True,
    "grid.color": "#eef0f2",
    "xtick.color": "#495057",
    "ytick.color": "#495057",
    "svg.hashsalt": "fp4deploy",
}

_DARK = {"#495057": "#adb5bd", "#ced4da": "#4a525a", "#eef0f2": "#2d333a", "#000000": "#e6e9ec"}  # by STYLE's colours
_DARK_RULES = "text,g[id^=text] use{fill:#e6e9ec}" + "".join(
    f'[style*="{name}: {light}"]{{{name}:{dark}!important}}'
    for light, dark in _DARK.items()
    for name in ("fill", "stroke")
)

Histories = dict[str, list[Epoch]]  # model -> its epochs


def run_colour(place: int) -> str:
    """Colour of the run at a place of a comparison."""
    return RUN_COLOURS[place % len(RUN_COLOURS)]


def draw_curves(
    histories: Histories, fine_tuned: bool, title: Callable[[str], str] = MODEL_TITLES.__getitem__
) -> str | None:
    """SVG of loss and score of one run; None when there is nothing to draw. title: of a model."""
    plt = _pyplot()
    drawn = {model: epochs for model, epochs in histories.items() if epochs}
    if not drawn:
        return None
    metric = (_metrics([drawn]) or ["miou"])[0]
    offset = _fp16_epochs(drawn) if fine_tuned else 0
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
        for model, epochs in drawn.items():
            style = {"color": MODEL_COLOURS[model], "label": title(model), "linewidth": 2}
            _plot(axes, ("loss", metric), epochs, 0 if model == "fp16" else offset, marker="o", markersize=3, **style)
        _finish(axes, ("loss", metric))
        for axis in axes:
            axis.legend(frameon=False, loc="best")
        return _svg(figure)


def draw_comparison(runs: Sequence[RunData], histories: Sequence[Histories]) -> str | None:
    """SVG of loss and score of several runs; None where no run has an epoch."""
    plt = _pyplot()
    from matplotlib.lines import Line2D

    models = [model for model in LINES if any(found.get(model) for found in histories)]
    if not models:
        return None
    keys = ("loss", *_metrics(histories))
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(1, len(keys), figsize=(10, 3.9), layout="constrained", squeeze=False)
        for place, (run, found) in enumerate(zip(runs, histories, strict=True)):
            offset = 0 if run.config.get("train.from_scratch") else _fp16_epochs(found)
            for model, epochs in found.items():
                style = {"color": run_colour(place), "marker": MARKERS[place % len(MARKERS)], "linestyle": LINES[model]}
                before = 0 if model == "fp16" else offset
                _plot(grid[0], keys, epochs, before, linewidth=1.8, markersize=4, **style)
        _finish(grid[0], keys)
        handles = [Line2D([], [], color=run_colour(n), marker=MARKERS[n % len(MARKERS)]) for n in range(len(runs))]
        handles += [
            Line2D([], [], color="#495057", linestyle=LINES[model], marker="." if model == "nvfp4_ptq" else None)
            for model in models
        ]
        names = [*(run.label.replace("$", r"\$") for run in runs), *(MODEL_TITLES[model] for model in models)]
        figure.legend(handles, names, loc="outside lower center", ncols=6, frameon=False, fontsize=9)
        return _svg(figure)


def save_curves(run: Run, svg: str) -> Path:
    """Keep the picture as a file too, for slides."""
    path = run.path / "plots" / "training.svg"
    write_whole(path, svg)
    return path


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _metrics(histories: Sequence[Histories]) -> list[str]:
    """Metrics that any epoch has, AP last."""
    epochs = [epoch for found in histories for lines in found.values() for epoch in lines]
    return [key for key in METRICS if any(getattr(epoch, key) is not None for epoch in epochs)]


def _fp16_epochs(histories: Histories) -> int:
    return max((epoch.epoch for epoch in histories.get("fp16", [])), default=0)


def _plot(axes: Any, keys: Sequence[str], epochs: Sequence[Epoch], before: int, **style: Any) -> None:
    for axis, key in zip(axes, keys, strict=True):
        points = [(epoch.epoch, value) for epoch in epochs if (value := getattr(epoch, key)) is not None]
        factor = 1 if key == "loss" else 100
        axis.plot([before + epoch for epoch, _ in points], [factor * value for _, value in points], **style)


def _finish(axes: Any, keys: Sequence[str]) -> None:
    for axis, key in zip(axes, keys, strict=True):
        axis.set(title="training loss" if key == "loss" else f"validation {METRICS[key]}, %", xlabel="epoch")
        axis.xaxis.get_major_locator().set_params(integer=True)


def _svg(figure: Any) -> str:
    target = io.StringIO()
    date = os.environ.pop("SOURCE_DATE_EPOCH", None)  # matplotlib parses it, though no date is written
    try:
        figure.savefig(target, format="svg", metadata={"Date": None}, transparent=True)
    finally:
        if date is not None:
            os.environ["SOURCE_DATE_EPOCH"] = date
        _pyplot().close(figure)
    text = target.getvalue()
    text = text[text.index("<svg") :]
    start = text.index(">") + 1
    return f"{text[:start]}<style>@media(prefers-color-scheme:dark){{{_DARK_RULES}}}</style>{text[start:]}"
