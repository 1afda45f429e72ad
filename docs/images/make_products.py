"""Draw the curves of trainings through FP4 GEMMs: python docs/images/make_products.py

Loss and mIoU by epoch from benchmarks/results/fp4_products_sweep_h200.json: each seed as a thin line, their mean as a
thick one. The loss is that of an epoch's training batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib import pyplot as plt
from matplotlib.ticker import MaxNLocator

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "fp4_products_sweep_h200.json"
STAGES = {
    "from random weights": {"fp16": "FP16", "scratch_emulated": "emulated", "scratch_fp4": "FP4 GEMMs"},
    "fine-tuned from FP16": {"control": "FP16", "tuned_emulated": "emulated", "tuned_fp4": "FP4 GEMMs"},
}
COLOURS = {"FP16": "#7f7f7f", "emulated": "#ff7f0e", "FP4 GEMMs": "#1f77b4"}
QUANTITIES = {"loss": ("loss", 1), "miou": ("mIoU, %", 100)}


def main() -> None:
    """Read the result, write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("fp4_products.png"))
    arguments = parser.parse_args()
    matplotlib.use("Agg")
    variants = json.loads(RESULT.read_text(encoding="utf-8"))["variants"]
    figure, panels = plt.subplots(2, 2, figsize=(9, 5.4), sharex="col", layout="constrained")
    for column, (stage, names) in enumerate(STAGES.items()):
        for row, (key, (title, factor)) in enumerate(QUANTITIES.items()):
            panel = panels[row][column]
            for name, label in names.items():
                curves = [by_epoch(run["curve"], key) for run in variants[name]["runs"].values()]
                for curve in curves:
                    points = [factor * value for value in curve.values()]
                    panel.plot(list(curve), points, lw=0.8, alpha=0.4, color=COLOURS[label])
                shared = sorted(set.intersection(*(set(curve) for curve in curves)))
                means = [factor * statistics.fmean(curve[epoch] for curve in curves) for epoch in shared]
                panel.plot(shared, means, "-o", ms=3, lw=2, color=COLOURS[label], label=label)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
            panel.set_ylabel(title)
            panel.grid(axis="y", color="#e0e0e0")
            panel.spines[["top", "right"]].set_visible(False)
        panels[0][column].set_title(stage, fontsize=10, loc="left")
        panels[1][column].set_xlabel("epoch")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(arguments.out, dpi=130)
    plt.close(figure)


def by_epoch(curve: list[dict[str, Any]], key: str) -> dict[int, float]:
    """The epochs that measured a quantity."""
    return {line["epoch"]: line[key] for line in curve if line.get(key) is not None}


if __name__ == "__main__":
    main()
