"""A sweep as one picture: every variant's score on the left, its paired difference with the interval on the right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4deploy.experiments.panels import BLUE, GREY, ORANGE, panels, png
from fp4deploy.system.files import write_whole


def draw_sweep(results: dict[str, Any], out: Path) -> Path | None:
    """Write sweep.png into `out`; None, and no file, where no run is finished.

    Raises:
        InputError: the file cannot be written.
    """
    from matplotlib.lines import Line2D

    key = results["score"]
    rows = [(name, row) for name, row in results["variants"].items() if row[key] is not None]
    if not rows:
        return None
    figure, (left, right) = panels((10, 1.6 + 0.36 * len(rows)), 2, sharey=True, width_ratios=(1, 1.25))
    figure.set_dpi(150)
    for place, (_, row) in enumerate(rows):
        colour = ORANGE if row["model"].startswith("nvfp4") else BLUE
        scores = [100 * run[key] for run in row["runs"].values() if run["status"] == "done"]
        left.plot(scores, [place] * len(scores), "o", ms=4, color=colour, alpha=0.5)
        left.plot(100 * row[key]["mean"], place, "|", ms=16, mew=2.5, color=colour)
        gap = row[f"gap_{key}"]
        if gap is None:
            continue
        if gap["low"] is not None:
            right.plot([gap["low"], gap["high"]], [place, place], "-", lw=2, color=colour)
        right.plot(list(gap["by_seed"].values()), [place] * len(gap["by_seed"]), "o", ms=4, color=colour, alpha=0.5)
        right.plot(gap["mean"], place, "|", ms=16, mew=2.5, color=colour)
    right.axvline(0, color=GREY, lw=1)
    left.set_yticks(range(len(rows)), [name for name, _ in rows])
    left.set_ylim(len(rows) - 0.5, -0.5)
    left.set_xlabel(f"{results['metric']} of the {key} epoch, %")
    right.set_xlabel("difference, points (right: better)")
    left.set_title("each seed (dots) and the mean (bar)", fontsize=10, loc="left")
    lines = any(row[f"gap_{key}"] and row[f"gap_{key}"]["low"] is not None for _, row in rows)
    right.set_title(f"{_others(rows)}, paired by seed{', 95 % interval' if lines else ''}", fontsize=10, loc="left")
    handles = [Line2D([], [], color=c, marker="o", ls="", label=n) for n, c in (("NVFP4", ORANGE), ("FP16", BLUE))]
    figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False)
    path = out / "sweep.png"
    write_whole(path, png(figure))
    return path


def _others(rows: list[tuple[str, Any]]) -> str:
    others = list(dict.fromkeys(row["against"] for _, row in rows if row["against"]))
    return f"minus {others[0]}" if len(others) == 1 else "minus its control"
