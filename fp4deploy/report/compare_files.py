"""Writing a comparison: one HTML file with everything inside, and the same facts as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write
from fp4deploy.report.compare import compare, labels, main_model, model_groups
from fp4deploy.report.compare_html import render_comparison
from fp4deploy.report.figures.compare_curves import draw_comparison
from fp4deploy.report.figures.compare_images import draw_samples, draw_telemetry, read_looks, telemetry_numbers
from fp4deploy.report.figures.curves import history
from fp4deploy.report.run_data import read_run
from fp4deploy.runs import Run, open_run


def open_runs(paths: Sequence[Path]) -> list[Run]:
    """Open runs to compare.

    Raises:
        InputError: naming every folder that is no run, or one that is given twice.
    """
    found, problems = [], []
    for path in paths:
        try:
            found.append(open_run(path))
        except InputError as error:
            inside = sorted({p.parent for p in [*path.glob("*/config.yaml"), *path.glob("*/*/config.yaml")]})
            listed = " ".join(map(str, inside[:4])) + (" ..." if len(inside) > 4 else "")
            problems.append(f"{path} is a folder of runs; give them by name: {listed}" if inside else str(error))
    if problems:
        raise InputError(" ".join(problem if problem.endswith(".") else f"{problem}." for problem in problems))
    whole = [run.path.resolve() for run in found]
    twice = next((str(run.path) for run, path in zip(found, whole, strict=True) if whole.count(path) > 1), None)
    if twice is not None:
        raise InputError(f"{twice} is given twice; a comparison takes different runs.")
    return found


def default_page(runs: Sequence[Run]) -> Path:
    """Where a comparison goes when nobody says: beside the first run."""
    names = [name.replace("/", "-") for name in labels([run.path for run in runs])]
    kept = names if len(names) < 4 else [*names[:2], f"{len(names) - 2}-more"]
    return runs[0].path.resolve().parent / f"report-{'-'.join(kept)}.html"


def write_comparison(runs: Sequence[Run], out: Path) -> dict[str, Any]:
    """Compare runs and write the page; returns the facts.

    Raises:
        InputError: the page cannot be written.
    """
    named = labels([run.path for run in runs])
    read = [read_run(run, label) for run, label in zip(runs, named, strict=True)]
    facts = compare(read)
    looks = read_looks(read)
    facts["telemetry"] = telemetry_numbers(read, looks)
    groups = model_groups(read)
    chosen = groups[0] if groups else [(place, m) for place, run in enumerate(read) if (m := main_model(run))]
    samples = draw_samples(read, chosen)
    facts["samples"] = {"images": [row.caption for row in samples.rows], "missing": samples.missing}
    curves = draw_comparison(
        read, [{model: history(run, model) for model in r["models"]} for run, r in zip(runs, read, strict=True)]
    )
    page = render_comparison(facts, curves, samples, draw_telemetry(read, looks))
    with atomic_write(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return facts
