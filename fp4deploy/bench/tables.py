"""The comparison table as text cells, shared by the terminal, report.md and report.html.

mIoU and AP are shown in points (hundredths); `drop` is the baseline's minus the row's, so a positive number is a loss.
Columns of a metric that no row has are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SEMANTIC = (("mIoU", "miou"),)  # title and key of a metric
INSTANCE = (("AP", "ap"), ("AP50", "ap50"))
NUMERIC = frozenset({"size", "mIoU", "AP", "AP50", "drop", "p50 ms", "images/s"})
NONE = "–"  # a cell without a number
BASELINES = ("fp16_control", "fp16")


def metrics(artifacts: Sequence[dict[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Title and key of the metrics to show: mIoU, or AP and AP50, or all where a table has both kinds of models."""
    instance = any(entry.get("ap") is not None for entry in artifacts)
    semantic = any(entry["miou"] is not None for entry in artifacts)
    return (SEMANTIC if semantic or not instance else ()) + (INSTANCE if instance else ())


def head(artifacts: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Titles of the columns."""
    titles = (title for title, _ in metrics(artifacts))
    return ("model", "artefact", "backend", "precision", "size", *titles, "drop", "p50 ms", "images/s", "status")


def accuracy(entry: dict[str, Any]) -> float | None:
    """mIoU of a semantic model's entry, AP of an instance model's; of an artefact or of a model."""
    return entry["miou"] if entry["miou"] is not None else entry.get("ap")


def baseline_of(artifacts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The row others are compared with: the FP16 control's first measured artefact, else the FP16 model's."""
    for model in BASELINES:
        for entry in artifacts:
            if entry["model"] == model and accuracy(entry) is not None:
                return entry
    return None


def cells(
    entry: dict[str, Any], baseline: float | None, shown: Sequence[tuple[str, str]] = SEMANTIC
) -> tuple[str, ...]:
    """One row of the table, in the order of `head`; `shown`: the metrics."""
    timed = entry["latency_ms"]
    return (
        str(entry["model"]),
        entry["path"],
        entry["backend"],
        entry["precision"],
        size(entry["size_bytes"]),
        *(points(entry.get(key)) for _, key in shown),
        drop(accuracy(entry), baseline),
        milliseconds(timed["p50"]) if timed else NONE,
        rate(entry["images_per_s"]),
        entry["status"],
    )


def rows(artifacts: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """All rows of the table."""
    found = baseline_of(artifacts)
    baseline, shown = accuracy(found) if found else None, metrics(artifacts)
    return [cells(entry, baseline, shown) for entry in artifacts]


def network(model: dict[str, Any]) -> str:
    """The network of a model in words."""
    return f"UNet of scale {model['scale']:g}{', digits' if model['digits'] else ''}"


def points(value: float | None) -> str:
    """0.8123 -> "81.23"."""
    return NONE if value is None else f"{100 * value:.2f}"


def drop(value: float | None, baseline: float | None) -> str:
    """Points lost against the baseline, signed: "+0.31" is a loss, "-0.05" a gain."""
    return NONE if value is None or baseline is None else f"{100 * (baseline - value):+.2f}"


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
