"""Panels beside each other as a PNG picture: one look for studies, searches and sweeps."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, GREY = "#0072b2", "#d55e00", "#009e73", "#999999"  # Okabe and Ito's, told apart by every eye


def panels(size: tuple[float, float], count: int, **options: Any) -> tuple[Figure, Any]:
    """A figure of so many inches, and its panels; options: of matplotlib's `Figure.subplots`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    found = figure.subplots(1, count, **options)
    for panel in found:
        panel.grid(True, color="#eef0f2")
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, found


def png(figure: Figure) -> bytes:
    """The picture, the same bytes each time."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})
    return target.getvalue()
