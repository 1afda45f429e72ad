"""Files of benchmarks/results, and how their numbers are written."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fp4deploy.experiments.sweep.results import gap_text, interval
from tools.results import origin_of

ROOT = Path(__file__).resolve().parents[2]

RESULTS = ROOT / "benchmarks" / "results"

MINUS = "\N{MINUS SIGN}"
NOT_MEASURED = "not measured"


def result(name: str) -> Any:
    """One JSON file of benchmarks/results, by its name without the suffix; `as_of` says that it was read."""
    read[name] = document(name)
    return read[name]


@lru_cache
def document(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


read: dict[str, Any] = {}


def as_of() -> str:
    """Dates and commits of what was read since `read` was cleared."""
    runs = [run for document in read.values() for run in document.get("runs", ()) if isinstance(run, dict)]
    measured = [*read.values(), *(run for run in runs if "commit" in (run.get("machine") or ()))]  # at several times
    found = dict.fromkeys(str(origin_of(each)) for each in measured)
    return f"*As of {', '.join(found)}.*"


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; columns with numbers are aligned to the right, but for the first `left`, and text to the left."""
    body = [list(row) for row in rows]
    numbers = [any(re.match(r"[*<+−-]*\d", row[at]) for row in body) for at in range(len(head))]
    rule = ["---:" if at >= left and number else "---" for at, number in enumerate(numbers)]
    lines = [head, rule, *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def wilson(hits: int, of: int) -> tuple[float, float]:
    """Wilson's interval of a share at 95 %."""
    z, share = 1.96, hits / of
    middle, half = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return (middle - half) / (1 + z * z / of), (middle + half) / (1 + z * z / of)


def spread(value: dict[str, float]) -> str:
    """Mean and standard deviation over seeds, in points; of one seed its score."""
    deviation = "" if value["sd"] is None else f" ± {100 * value['sd']:.2f}"
    return f"{100 * value['mean']:.2f}{deviation}"


def points(values: Sequence[float]) -> str:
    """Scores of several seeds in points: "57.3, 56.1 and 56.3"."""
    texts = [f"{100 * value:.1f}" for value in values]
    return f"{', '.join(texts[:-1])} and {texts[-1]}"


def gap(value: dict[str, Any] | None) -> str:
    """A difference paired by seed, in points, with its 95 % interval where there are several seeds."""
    return "" if value is None else gap_text(value).replace("-", MINUS)


def shown(value: dict[str, Any] | None) -> str:
    """A gap, bold where its interval lies on one side of zero."""
    if value is None:
        return NOT_MEASURED
    return f"**{gap(value)}**" if value["low"] > 0 or value["high"] < 0 else gap(value)


def difference(values: Sequence[float]) -> dict[str, Any]:
    """Mean of paired differences with its 95 % interval, as sweeps have it."""
    low, high = interval(list(values))
    return {"mean": statistics.fmean(values), "low": low, "high": high}


def microseconds(row: dict[str, float], key: str = "ms") -> str:
    """A time in microseconds."""
    return f"{row[key] * 1e3:.1f}"
