"""Numbers on the command line that Typer's ranges let through: NaN is in no order, so it is in every range."""

from __future__ import annotations

import math

import typer

MAX_DROP = 0.5  # points of accuracy, where --max-drop is not given
MAX_SECONDS = 1e8  # three years; a timer of the system takes no more than some hundred


def finite(value: float | None) -> float | None:
    """The value of an option.

    Raises:
        typer.BadParameter: it is NaN or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value
