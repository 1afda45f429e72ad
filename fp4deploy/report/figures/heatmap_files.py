"""One heatmap as three files: a picture (png), an interactive page (html, `heatmap_page`), the numbers (json).

There are two hundred pictures at the end of a training, and almost all the time of one goes into its labels, which most
share. Axes, ticks and labels are therefore drawn once and kept as pixels. A picture starts from these pixels and adds
cells, colour bar and title: matplotlib's blitting, five times faster than a new figure each.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp4deploy.report.figures.heatmap import MISSING, Heatmap
from fp4deploy.report.figures.heatmap_page import page
from fp4deploy.system.files import write_whole

MAX_TICKS = 17
STEPS = (1, 2, 4, 10, 16, 20, 40, 100, 200, 400, 1000)  # between labels
_INK = dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor"), "#e6e9ec")
_DARK: Any = {**_INK, "figure.facecolor": "#15181c"}  # of style.css
INCH = {"cell": 0.19, "letter": 0.072, "left": 0.55, "right": 1.35, "top": 0.62, "bottom": 0.62}


def save_heatmap(heatmap: Heatmap, stem: Path, script: Path) -> list[Path]:
    """Write `stem`.png, .html and .json, each whole or not at all; `script` is the shared plotly.min.js.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("json", "html", "png")]
    contents = _json(heatmap), page(heatmap, stem.parent, script).encode(), picture(heatmap)
    for path, content in zip(paths, contents, strict=True):
        write_whole(path, content)
    return paths


def _json(heatmap: Heatmap) -> bytes:
    data = {
        "title": heatmap.title,
        "note": heatmap.note,
        "unit": heatmap.unit,
        "row_title": heatmap.row_title,
        "rows": list(heatmap.rows),
        "column_title": heatmap.column_title,
        "columns": list(heatmap.columns),
        "values": [list(row) for row in heatmap.values],
        **heatmap.more,
    }
    return (json.dumps(data, allow_nan=False) + "\n").encode()


def picture(heatmap: Heatmap, dark: bool = False) -> bytes:
    """The picture as PNG; dark: for a dark page."""
    from PIL import Image

    longest = max((len(label) for label in heatmap.rows), default=0)
    left = INCH["left"] + INCH["letter"] * longest
    wide = heatmap.cell * len(heatmap.columns) if heatmap.cell else _fitting(len(heatmap.columns))
    width = math.ceil(2 * max(left + wide + INCH["right"], _needed(heatmap))) / 2
    labels = tuple(heatmap.rows), tuple(heatmap.columns), heatmap.row_title, heatmap.column_title
    canvas = _canvas(dark, *labels, heatmap.cell, left, wide, width)
    canvas.draw(heatmap)
    target = io.BytesIO()
    Image.fromarray(canvas.pixels()).convert("RGB").save(target, "png", compress_level=4)
    return target.getvalue()


def _fitting(columns: int) -> float:
    return min(7.0, max(3.4, INCH["cell"] * 2 * columns))


def _needed(heatmap: Heatmap) -> float:
    return max(0.085 * len(heatmap.title), 0.068 * len(heatmap.note)) + 0.4


@lru_cache(maxsize=16)
def _canvas(dark: bool, *layout: Any) -> _Canvas:
    """layout: the arguments of `_Canvas`."""
    from matplotlib import rc_context

    with rc_context(_DARK if dark else {}):
        return _Canvas(*layout)


class _Canvas:
    """Axes with their labels, drawn once, on which tables with the same rows and columns are drawn."""

    def __init__(
        self,
        rows: Sequence[str],
        columns: Sequence[str],
        row_title: str,
        column_title: str,
        cell: float | None,
        left: float,
        wide: float,
        width: float,
    ) -> None:
        """Lengths are in inches: of a cell, of the left margin, of the cells and of the picture."""
        import numpy as np
        from matplotlib import rcParams
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D

        self.tall = (cell or INCH["cell"]) * max(len(rows), 3)
        height = INCH["top"] + self.tall + INCH["bottom"]
        self.figure = figure = Figure(figsize=(width, height), dpi=96)
        self.canvas: Any = FigureCanvasAgg(figure)
        self.low, self.share = INCH["bottom"] / height, self.tall / height
        axis = figure.add_axes((left / width, self.low, wide / width, self.share))
        _ticks(axis.set_xticks, columns, max(2, min(MAX_TICKS, int(wide / 0.36))))
        _ticks(axis.set_yticks, rows, 9 if cell else len(rows))
        axis.set_xlim(-0.5, len(columns) - 0.5)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.tick_params(labelsize=7.5, length=2)
        axis.set_xlabel(column_title, fontsize=8.5)
        axis.set_ylabel(row_title, fontsize=8.5)
        self.canvas.draw()
        self.labels = self.canvas.copy_from_bbox(figure.bbox)

        at = (left + wide + 0.15) / width
        end = at + 0.14 / width
        bar = figure.add_axes((at, self.low, end - at, self.share), xticks=[], yticks=[])
        empty = np.zeros((1, 1, 4), dtype=np.uint8)
        extent = (-0.5, len(columns) - 0.5, len(rows) - 0.5, -0.5)
        self.cells = axis.imshow(empty, aspect="auto", interpolation="nearest", extent=extent)
        self.colours = bar.imshow(empty, aspect="auto", interpolation="nearest", extent=(0, 1, 0, 1))
        self.frames = [*axis.spines.values(), *bar.spines.values()]
        self.mark = Line2D(
            [end, end + 0.04 / width], [0, 0], linewidth=0.8, color=rcParams["axes.edgecolor"], figure=figure
        )
        self.mark.set_transform(figure.transFigure)
        self.value = figure.text(end + 0.07 / width, 0, "", fontsize=7.5, va="center")
        middle = self.low + self.share / 2
        self.unit = figure.text(end + 0.66 / width, middle, "", fontsize=8.5, rotation=90, ha="left", va="center")
        self.title = figure.text(0.15 / width, 1 - 0.08 / height, "", fontsize=10.5, va="top")
        self.note = figure.text(0.15 / width, 1 - 0.32 / height, "", fontsize=8, va="top", alpha=0.7)

    def draw(self, heatmap: Heatmap) -> None:
        """Draw a table onto the labels."""
        import numpy as np
        from matplotlib.colors import LogNorm, Normalize

        low, high, log = heatmap.limits()
        norm = LogNorm(low, high) if log else Normalize(low, high)
        colours = _colours(heatmap.colours)
        shape = len(heatmap.rows), len(heatmap.columns)
        values = np.array([[np.nan if v is None else v for v in row] for row in heatmap.values], dtype=float)
        self.cells.set_data(colours(norm(np.ma.masked_invalid(values.reshape(shape))), bytes=True))
        self.colours.set_data(colours(np.linspace(1, 0, 256), bytes=True)[:, None])
        for text, content in ((self.title, heatmap.title), (self.note, heatmap.note), (self.unit, heatmap.unit)):
            text.set_text(_plain(content))
        renderer = self.canvas.get_renderer()
        self.canvas.restore_region(self.labels)
        for artist in (self.cells, self.colours, *self.frames, self.title, self.note, self.unit):
            artist.draw(renderer)
        for tick in _bar_ticks(heatmap, self.tall):
            height = self.low + self.share * float(norm(tick))
            self.mark.set_ydata([height, height])
            self.value.set(text=_plain(f"{tick:g}"), y=height)
            self.mark.draw(renderer)
            self.value.draw(renderer)

    def pixels(self) -> Any:
        """uint8 [height, width, 4] of what was drawn last."""
        import numpy as np

        return np.asarray(self.canvas.buffer_rgba())


@lru_cache
def _colours(name: str) -> Any:
    from matplotlib import colormaps

    return colormaps[name].with_extremes(bad=MISSING)


def _bar_ticks(heatmap: Heatmap, tall: float) -> list[float]:
    """Values that a colour bar of `tall` inches names."""
    from matplotlib.ticker import LogLocator, MaxNLocator

    low, high, log = heatmap.limits()
    if log:
        found = LogLocator(subs=(1, 2, 5) if high < 300 * low else (1,)).tick_values(low, high)
    elif heatmap.ticks is not None:
        found = heatmap.ticks
    else:
        found = MaxNLocator(max(2, min(9, int(tall / 0.25)))).tick_values(low, high)
    slack = 1e-9 * (high - low)
    return [float(tick) for tick in found if low - slack <= tick <= high + slack]


def _ticks(put: Any, labels: Sequence[str], most: int) -> None:
    step = next((step for step in STEPS if step * most >= len(labels)), len(labels))
    places = list(range(0, len(labels), step))
    put(places, [_plain(labels[place]) for place in places])


def _plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
