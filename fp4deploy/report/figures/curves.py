"""Training curves of a run: loss and validation mIoU or AP per epoch, every model in its own colour.

A fine-tuned model starts where FP16 ended, so its epochs are drawn after FP16's: the picture shows the dip of
quantisation and what fine-tuning wins back.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from fp4deploy.files import atomic_write
from fp4deploy.runs import Run

COLOURS = {"fp16": "#4c6ef5", "nvfp4": "#0ca678", "fp16_control": "#adb5bd", "nvfp4_ptq": "#f08c00"}
METRICS = {"miou": "mIoU", "ap": "AP"}
TITLES = {"fp16": "FP16", "nvfp4": "NVFP4", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4 PTQ"}


def history(run: Run, model: str) -> list[dict[str, Any]]:
    """Lines of <model>/metrics.jsonl that tell of an epoch; a line cut short by an interruption is skipped."""
    path = run.model_dir(model) / "metrics.jsonl"
    found: list[dict[str, Any]] = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "epoch" in entry:
            found.append(entry)
    return found


def draw_curves(histories: dict[str, list[dict[str, Any]]], fine_tuned: bool) -> str | None:
    """SVG of both panels; None when there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    drawn = {model: entries for model, entries in histories.items() if entries}
    if not drawn:
        return None
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
        metric = "ap" if any("ap" in entry for entries in drawn.values() for entry in entries) else "miou"
        offset = max((entry["epoch"] for entry in drawn.get("fp16", [])), default=0) if fine_tuned else 0
        for model, entries in drawn.items():
            before = 0 if model == "fp16" else offset
            line = {"color": COLOURS[model], "label": TITLES[model], "linewidth": 2, "marker": "o", "markersize": 3}
            for axis, name, factor in ((axes[0], "loss", 1), (axes[1], metric, 100)):
                scored = [entry for entry in entries if entry.get(name) is not None]
                epochs = [before + entry["epoch"] for entry in scored]
                axis.plot(epochs, [factor * entry[name] for entry in scored], **line)
        axes[0].set(title="training loss", xlabel="epoch")
        axes[1].set(title=f"validation {METRICS[metric]}, points", xlabel="epoch")
        axes[1].legend(frameon=False, loc="lower right")
        for axis in axes:
            axis.xaxis.get_major_locator().set_params(integer=True)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = target.getvalue()
    return text[text.index("<svg") :]


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


def save_curves(run: Run, svg: str) -> Path:
    """Keep the picture beside the report as well, for slides."""
    path = run.path / "plots" / "training.svg"
    with atomic_write(path) as temporary:
        temporary.write_text(svg)
    return path
