"""Training steps of benchmarks/results, and the fastest FP16 form that each is compared with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from docs.tables.results import result

STEP_IMAGES = 16  # BATCH of benchmarks/training_step.py
Steps = dict[tuple[float, str], dict[str, Any]]


def steps(name: str = "training_step_h200") -> Steps:
    """Rows of a result by scale and case."""
    return {(row["scale"], row["case"]): row for row in result(name)["rows"]}


def best_fp16(found: Steps, scale: float) -> dict[str, Any]:
    """The FP16 step of least time in a CUDA graph, of every form that a run measured."""
    rows = (row for (own, case), row in found.items() if own == scale and case.startswith("fp16") and "graph_ms" in row)
    return min(rows, key=lambda row: float(row["graph_ms"]))


def images(report: dict[str, Any]) -> int:
    """Images a step of a result, as its command says."""
    return int(report["command"].partition("--batch ")[2].split()[0])


def over_best(row: dict[str, Any]) -> float:
    """A row of fp4_training_h200 over the FP16 step of the same run, both in a CUDA graph where there is one."""
    rows = result("fp4_training_h200")["rows"]
    same = (other for other in rows if (other["scale"], other["run"]) == (row["scale"], row["run"]))
    (best,) = (other for other in same if not other["recipe"])
    return float(row.get("graph_ms", row["ms"]) / best["graph_ms"])


def span(values: Iterable[float], form: str = ",") -> str:
    """From and to, or the one value that all have."""
    found = sorted(values)
    low, high = format(found[0], form), format(found[-1], form)
    return low if low == high else f"{low} to {high}"
