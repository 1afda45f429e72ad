"""A heatmap as an interactive page, written by plotly: hovering shows a cell's value, dragging zooms in.

The pages share one `plotly.min.js`, 4.5 MB, named by a relative path: they open from the disk, without a network. The
figure is a plain dict: plotly's `Figure` checks every number, which takes a second a page, and there are a hundred of
them at the end of a training.

Text comes from telemetry and checkpoints and is never markup. plotly writes `<` and `/` in the data as JSON escapes, so
that no name can close the script element; and since plotly.js itself reads some tags in labels (`<b>`, `<a>`), names
reach it with `<` and `&` as entities. A Content-Security-Policy is a second barrier.
"""

from __future__ import annotations

import math
import os
import re
from base64 import b64encode
from functools import lru_cache
from hashlib import sha256
from html import escape
from pathlib import Path
from typing import Any

from fp4deploy.report.figures.heatmap import MISSING, Heatmap
from fp4deploy.system.files import write_whole

STANDOFF = 12  # pixels between the labels of an axis and its title; without it plotly lays one over the other
_INLINE = re.compile(r"<script\b[^>]*>(.*?)</script>", re.DOTALL)


def save_script(path: Path) -> None:
    """Write the plotly.min.js that the pages share, if it is not there."""
    if path.is_file():
        return
    from plotly.offline import get_plotlyjs

    write_whole(path, get_plotlyjs())


def page(heatmap: Heatmap, folder: Path, script: Path) -> str:
    """The page, as a file of `folder`; `script` is the shared plotly.min.js."""
    from plotly.io import to_html

    return _protected(
        to_html(
            {"data": [_trace(heatmap)], "layout": _layout(heatmap)},
            config={"responsive": True, "displaylogo": False},
            include_plotlyjs=os.path.relpath(script, folder).replace(os.sep, "/"),
            full_html=True,
            div_id="heatmap",
            validate=False,
        )
    )


def _protected(text: str) -> str:
    """The page with a Content-Security-Policy: it runs its own two scripts, by their digests, and plotly.min.js, which
    is a file beside it; nothing else runs, and nothing is loaded."""
    digests = " ".join(
        f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'" for script in _INLINE.findall(text) if script
    )
    policy = (
        f"default-src 'none'; script-src 'self' file: {digests}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    head, found, rest = text.partition("<head>")
    assert found, "plotly writes no head"
    return f'{head}{found}<meta http-equiv="Content-Security-Policy" content="{policy}">{rest}'


def _trace(heatmap: Heatmap) -> dict[str, object]:
    low, high, log = heatmap.limits()
    bar: dict[str, Any] = {"title": {"text": _text(heatmap.unit), "side": "right"}, "thickness": 14}
    if log:
        decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
        bar |= {"tickvals": list(decades), "ticktext": [f"{10.0**decade:g}" for decade in decades]}
    elif heatmap.ticks is not None:
        bar |= {"tickvals": list(heatmap.ticks), "ticktext": [f"{tick:g}" for tick in heatmap.ticks]}
    trace: dict[str, Any] = {
        "type": "heatmap",
        "z": [[math.log10(v) if log and v else v for v in row] for row in heatmap.values],
        "x": [_text(label) for label in heatmap.columns],
        "y": [_text(label) for label in heatmap.rows],
        "zmin": math.log10(low) if log else low,
        "zmax": math.log10(high) if log else high,
        "colorscale": colorscale(heatmap.colours),
        "colorbar": bar,
        "hoverongaps": False,
        "xgap": 0.5,
        "ygap": 0.5,
        "hovertemplate": "%{y}<br>%{x}<br>%{" + ("customdata" if log else "z") + "}<extra></extra>",
    }
    if log:
        trace["customdata"] = [list(row) for row in heatmap.values]
    return trace


def _layout(heatmap: Heatmap) -> dict[str, Any]:
    return {
        "title": {"text": f"{_text(heatmap.title)}<br><sup>{_text(heatmap.note)}</sup>", "x": 0.02},
        "height": max(320, 150 + (100 * heatmap.cell if heatmap.cell else 18) * len(heatmap.rows)),
        "margin": {"t": 90, "l": 10, "r": 10, "b": 60},
        "plot_bgcolor": MISSING,
        "xaxis": {
            "title": {"text": _text(heatmap.column_title), "standoff": STANDOFF},
            "type": "category",
            "automargin": True,
            "showgrid": False,
        },
        "yaxis": {
            "title": {"text": _text(heatmap.row_title), "standoff": STANDOFF},
            "type": "category",
            "autorange": "reversed",
            "automargin": True,
            "showgrid": False,
        },
    }


def _text(text: str) -> str:
    return escape(text, quote=False)


@lru_cache
def colorscale(name: str) -> list[list[Any]]:
    """Eleven (place in 0..1, colour as "#rrggbb") of a colour map."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [[index / 10, to_hex(colormaps[name](index / 10))] for index in range(11)]
