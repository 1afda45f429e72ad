"""A heatmap as data: a table of numbers with names, units and colours.

Colours: viridis for amounts, PuOr for what has a sign and cividis for counts; all three stay distinct to colour-blind
readers. A cell without a value is grey.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

MISSING = "#d5d8dc"  # a cell without a value
AMOUNT, SIGNED, COUNT = "viridis", "PuOr", "cividis"
PHASES = {"prequantize": "before quantisation", "quantized": "codes", "dequantized": "dequantised"}
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
