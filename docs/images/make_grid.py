"""Draw the pictures of docs/numerics.md: python docs/images/make_grid.py

`e2m1.svg`           what each magnitude rounds to, nearest with ties to even, and the mean of stochastic rounding
`four_over_six.svg`  one block on both grids of 4/6, with the errors that `formats` computes
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from fp4deploy.formats import E2M1_VALUES, FourOverSix, quantize_nvfp4, round_e2m1

FOLDER = Path(__file__).parent
BLUE, VERMILION, GREEN, GREY = "#0072B2", "#D55E00", "#009E73", "#555555"  # Okabe and Ito: safe for colour blindness
BLOCK = [1.0, 0.82, -0.78, 0.74, -0.8, 0.76, 0.5, -0.48, 0.36, -0.27, 0.24, 0.13, -0.12, 0.05, -0.02, 0.0]


def draw_e2m1() -> None:
    """Steps of nearest rounding, a filled dot where a tie goes; the diagonal of stochastic rounding."""
    figure, axes = plt.subplots(figsize=(7.2, 5.0))
    u = torch.linspace(0, 7, 1401)
    axes.plot([0, 6, 7], [0, 6, 6], color=VERMILION, linestyle="--", linewidth=1.4, label="stochastic, mean")
    ties = [(low + high) / 2 for low, high in pairwise(E2M1_VALUES)]
    edges = [0.0, *ties, 7.0]
    for index, (value, left, right) in enumerate(zip(E2M1_VALUES, edges, edges[1:], strict=False)):
        label = "nearest, ties to the even code" if index == 0 else None
        axes.plot([left, right], [value, value], color=BLUE, linewidth=2.4, solid_capstyle="butt", label=label)
        for edge in (left, right):
            if edge in ties:
                owns = round_e2m1(torch.tensor([edge])).item() == value
                axes.plot(edge, value, "o", markersize=6, color=BLUE, markerfacecolor=BLUE if owns else "white")
    assert set(round_e2m1(u).tolist()) == set(E2M1_VALUES)
    axes.set_xticks([*ties, 6, 7], [f"{tick:g}" for tick in (*ties, 6, 7)])
    axes.set_yticks(E2M1_VALUES, [f"{value:g}   (code {code})" for code, value in enumerate(E2M1_VALUES)])
    axes.set_xlabel("magnitude |x·e|, ticks at the ties")
    axes.set_ylabel("E2M1 value")
    axes.set(xlim=(0, 7), ylim=(-0.2, 6.5))
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(loc="lower right", frameon=False)
    _save(figure, "e2m1.svg")


def draw_four_over_six() -> None:
    """The magnitudes of `BLOCK` and what either mapping makes of them."""
    x = torch.tensor([BLOCK])
    six = quantize_nvfp4(x).dequantize()  # the block holds the tensor's amax: its scale is exact
    choice = quantize_nvfp4(x, four_over_six=FourOverSix())
    four = choice.dequantize()
    assert choice.scales.float().item() == 384  # 1.5 times 256: the block chose 4
    figure, rows = plt.subplots(2, 1, figsize=(8.0, 3.8), sharex=True)
    for axes, values, largest, colour in ((rows[0], six, 6.0, BLUE), (rows[1], four, 4.0, VERMILION)):
        _draw_mapping(axes, x.abs()[0], values.abs()[0], largest, colour)
        error = (values - x).abs().sum().item()
        text = f"amax → {largest:g}\n$\\Sigma$ |error| = {error:.2f}"
        axes.set_ylabel(text, rotation=0, ha="right", va="center", fontsize=11)
    rows[1].set_xlabel("magnitude / amax. Dots: the block's elements; lines: the grid; arrows: where they round to")
    _save(figure, "four_over_six.svg")


def _draw_mapping(axes: Axes, x: torch.Tensor, rounded: torch.Tensor, largest: float, colour: str) -> None:
    for value in E2M1_VALUES:
        if value <= largest:
            axes.axvline(value / largest, ymax=0.62, color=colour, linewidth=1.6)
            axes.text(value / largest, 0.68, f"{value:g}", ha="center", va="bottom", fontsize=9, color=colour)
    for index, (start, end) in enumerate(sorted(zip(x.tolist(), rounded.tolist(), strict=True))):
        height = 0.07 + 0.5 * (index * 3 % 8) / 7
        if abs(end - start) > 0.01:
            arrow = {"arrowstyle": "->", "color": GREY, "shrinkA": 2, "shrinkB": 0}
            axes.annotate("", (end, height), (start, height), arrowprops=arrow)
        axes.plot(start, height, "o", markersize=5, color=GREEN)
    axes.set(yticks=[], xlim=(-0.03, 1.03), ylim=(0, 1))
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)


def _save(figure: plt.Figure, name: str) -> None:
    figure.tight_layout()
    figure.savefig(FOLDER / name, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "fp4deploy"  # the same file every time
    draw_e2m1()
    draw_four_over_six()
