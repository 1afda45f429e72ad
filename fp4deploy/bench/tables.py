"""The comparison table as text cells, shared by the terminal, report.md and report.html.

mIoU is shown in points (hundredths); `drop` is the baseline's mIoU minus the row's, so a positive number is a loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAD = ("model", "artefact", "backend", "precision", "size", "mIoU", "drop", "p50 ms", "images/s", "status")
NUMERIC = frozenset({"size", "mIoU", "drop", "p50 ms", "images/s"})
NONE = "–"  # a cell without a number
BASELINES = ("fp16_control", "fp16")


def baseline_of(artifacts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row others are compared with: the FP16 control's first measured artefact, else the FP16 model's."""
    for model in BASELINES:
        for entry in artifacts:
            if entry["model"] == model and entry["miou"] is not None:
                return entry
    return None


def cells(entry: dict[str, Any], baseline: float | None) -> tuple[str, ...]:
    """One row of the table, in the order of `HEAD`."""
    timed = entry["latency_ms"]
    return (
        str(entry["model"]),
        entry["path"],
        entry["backend"],
        entry["precision"],
        size(entry["size_bytes"]),
        points(entry["miou"]),
        drop(entry["miou"], baseline),
        milliseconds(timed["p50"]) if timed else NONE,
        rate(entry["images_per_s"]),
        entry["status"],
    )


def rows(artifacts: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """All rows of the table."""
    found = baseline_of(artifacts)
    baseline = found["miou"] if found else None
    return [cells(entry, baseline) for entry in artifacts]


def points(miou: float | None) -> str:
    """0.8123 -> "81.23"."""
    return NONE if miou is None else f"{100 * miou:.2f}"


def drop(miou: float | None, baseline: float | None) -> str:
    """Points lost against the baseline, signed: "+0.31" is a loss, "-0.05" a gain."""
    return NONE if miou is None or baseline is None else f"{100 * (baseline - miou):+.2f}"


def size(count: int | None) -> str:
    """Bytes in decimal units: 3100000 -> "3.10 MB"."""
    if count is None:
        return NONE
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def memory(name: str, found: dict[str, int]) -> str:
    """A sentence about the bytes that `runtime_packed.memory` gives."""
    parts = [
        f"{what} {size(found[f'{kind}_bytes'])}, in FP16 {size(found[f'{kind}_bytes_fp16'])}"
        for what, kind in (("weights", "weight"), ("images alive at once", "activation"))
    ]
    return f"{name}: {'; '.join(parts)}."


def milliseconds(value: float | None) -> str:
    """Three significant digits."""
    if value is None:
        return NONE
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def rate(value: float | None) -> str:
    """Images per second, three significant digits."""
    return milliseconds(value)


def duration(seconds: float) -> str:
    """95.2 -> "1 min 35 s"."""
    minutes, rest = divmod(round(seconds), 60)
    if not minutes:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A Markdown table; columns named in `NUMERIC` are right-aligned."""
    rule = ["---:" if name in NUMERIC else "---" for name in head]
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, rule, *body)) + "\n"
