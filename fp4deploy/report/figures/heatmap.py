"""One heatmap as three files: a picture (png), an interactive page (html, `heatmap_page`), the numbers (json).

Pictures are drawn on figures with fixed margins that are used again: there are a hundred of them at the end of a
training, and making new axes for each would take longer than drawing it.

Colours: viridis for amounts, PuOr for what has a sign and cividis for counts; all three stay distinct to colour-blind
readers. A cell without a value is grey.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp4deploy.files import atomic_write
from fp4deploy.report.figures.heatmap_page import MISSING, page

AMOUNT, SIGNED, COUNT = "viridis", "PuOr", "cividis"
PHASES = {"prequantize": "before quantisation", "quantized": "codes", "dequantized": "dequantised"}
MOST_TICKS = 17
STEPS = (1, 2, 4, 10, 16, 20, 40, 100, 200, 400, 1000)  # between labels
INCH = {"cell": 0.19, "letter": 0.072, "left": 0.55, "right": 1.35, "top": 0.62, "bottom": 0.62}
Cell = float | int | None


@dataclass(frozen=True)
class Heatmap:
    """A table of numbers with names.

    title: what is shown, of which model; note: a second, smaller line.
    rows, columns: labels; row_title, column_title: what they are, with units.
    values: one list a row, None where there is no value; unit: of the values.
    colours: AMOUNT, SIGNED (symmetric about 0) or COUNT; log: colours by the logarithm, where all values are positive.
    low, high: ends of the colour scale, None for those of the values.
    ticks: values that the colour bar names, None to choose.
    cell: width and height of a cell in inches (a matrix), None to fill the width (a time series).
    more: further entries of the JSON file.
    """

    title: str
    note: str
    rows: Sequence[str]
    columns: Sequence[str]
    row_title: str
    column_title: str
    values: Sequence[Sequence[Cell]]
    unit: str
    colours: str = AMOUNT
    log: bool = False
    low: float | None = None
    high: float | None = None
    ticks: Sequence[float] | None = None
    cell: float | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def limits(self) -> tuple[float, float, bool]:
        """(low, high, logarithmic) of the colours."""
        known = [value for row in self.values for value in row if value is not None]
        low = self.low if self.low is not None else min(known, default=0.0)
        high = self.high if self.high is not None else max(known, default=1.0)
        if self.colours == SIGNED:
            high = max(abs(low), abs(high))
            low = -high
        log = self.log and low > 0 and high > 10 * low
        if not high > low:
            low, high = low - (abs(low) or 1.0) / 2, low + (abs(low) or 1.0) / 2
        return low, high, log


def save_heatmap(heatmap: Heatmap, stem: Path, script: Path) -> list[Path]:
    """Write `stem`.png, .html and .json, each whole or not at all; `script` is the shared plotly.min.js.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("json", "html", "png")]
    contents = _json(heatmap), page(heatmap, stem.parent, script).encode(), picture(heatmap)
    for path, content in zip(paths, contents, strict=True):
        with atomic_write(path) as temporary:
            temporary.write_bytes(content)
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


def picture(heatmap: Heatmap) -> bytes:
    """The picture as PNG."""
    import numpy as np

    low, high, log = heatmap.limits()
    longest = max((len(label) for label in heatmap.rows), default=0)
    shape = (len(heatmap.rows), len(heatmap.columns))
    wide = heatmap.cell * shape[1] if heatmap.cell else min(7.0, max(3.4, INCH["cell"] * 2 * shape[1]))
    width = max(INCH["left"] + INCH["letter"] * longest + wide + INCH["right"], _needed(heatmap))
    labels = (tuple(heatmap.rows), tuple(heatmap.columns), heatmap.row_title, heatmap.column_title, heatmap.unit)
    ticks = None if heatmap.ticks is None else tuple(heatmap.ticks)
    canvas = _canvas(
        *labels, heatmap.colours, log, log and high < 300 * low, heatmap.cell, ticks, wide, round(width, 1)
    )
    values = np.array([[np.nan if v is None else v for v in row] for row in heatmap.values], dtype=float)
    canvas.image.set_data(np.ma.masked_invalid(values.reshape(shape)))
    canvas.image.set_clim(low, high)
    canvas.title.set_text(_plain(heatmap.title))
    canvas.note.set_text(_plain(heatmap.note))
    target = io.BytesIO()
    canvas.figure.savefig(target, format="png", metadata={"Software": None}, pil_kwargs={"compress_level": 4})
    return target.getvalue()


def _needed(heatmap: Heatmap) -> float:
    return max(0.085 * len(heatmap.title), 0.068 * len(heatmap.note)) + 0.4


@dataclass(frozen=True)
class _Canvas:
    """A figure with axes, labels and colour bar, to which values, limits and title are given."""

    figure: Any
    image: Any
    title: Any
    note: Any


@lru_cache(maxsize=8)
def _canvas(
    rows: tuple[str, ...],
    columns: tuple[str, ...],
    row_title: str,
    column_title: str,
    unit: str,
    colours: str,
    log: bool,
    narrow: bool,
    cell: float | None,
    ticks: tuple[float, ...] | None,
    wide: float,
    width: float,
) -> _Canvas:
    """Making axes and ticks takes longer than drawing them; most pictures of a model share theirs."""
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    tall = (cell or INCH["cell"]) * max(len(rows), 3)
    left = INCH["left"] + INCH["letter"] * max((len(label) for label in rows), default=0)
    height = INCH["top"] + tall + INCH["bottom"]
    figure = Figure(figsize=(width, height), dpi=96)
    FigureCanvasAgg(figure)
    axis = figure.add_axes((left / width, INCH["bottom"] / height, wide / width, tall / height))
    bar = figure.add_axes(((left + wide + 0.15) / width, INCH["bottom"] / height, 0.14 / width, tall / height))
    image = axis.imshow(
        np.ones((len(rows), len(columns))),
        aspect="auto",
        cmap=colormaps[colours].with_extremes(bad=MISSING),
        norm=LogNorm(1, 2) if log else Normalize(0, 1),
        interpolation="nearest",
    )
    plain: dict[str, Any] = {}
    if log:
        plain = {
            "ticks": LogLocator(subs=(1, 2, 5) if narrow else (1,)),
            "format": FuncFormatter(lambda v, _: f"{v:g}"),
        }
    painted = figure.colorbar(image, cax=bar, **plain)
    painted.set_label(unit, fontsize=8.5)
    if ticks is not None:
        painted.set_ticks(list(ticks), labels=[f"{tick:g}" for tick in ticks])
    elif log:
        painted.minorformatter = NullFormatter()
    bar.tick_params(labelsize=7.5)
    _ticks(axis.set_xticks, columns, max(2, min(MOST_TICKS, int(wide / 0.36))))
    _ticks(axis.set_yticks, rows, 9 if cell else len(rows))
    axis.tick_params(labelsize=7.5, length=2)
    axis.set_xlabel(column_title, fontsize=8.5)
    axis.set_ylabel(row_title, fontsize=8.5)
    title = figure.text(0.15 / width, 1 - 0.08 / height, "", fontsize=10.5, va="top")
    note = figure.text(0.15 / width, 1 - 0.32 / height, "", fontsize=8, va="top", color="#555555")
    return _Canvas(figure, image, title, note)


def _ticks(put: Any, labels: Sequence[str], most: int) -> None:
    step = next((step for step in STEPS if step * most >= len(labels)), len(labels))
    places = list(range(0, len(labels), step))
    put(places, [_plain(labels[place]) for place in places])


def _plain(text: str) -> str:
    """Text in which matplotlib finds no mathematics."""
    return text.replace("$", r"\$")
