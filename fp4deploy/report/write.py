"""Writing reports: `report.{json,md,html}` of one run, and the page of a comparison.

`report.json` holds all data, for programs; `report.md` and `report.html` are made from it, plus pictures. Nothing is
trained and nothing is measured here. A report is written at the end of `fp4deploy run` from its bench, and at any time
by `fp4deploy report` from report.json and the files of the run: then numbers of files that have changed are dropped,
and a model that was not measured has the best score of its validation during training, and the report says so.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fp4deploy.errors import InputError
from fp4deploy.report.collect import collect, now
from fp4deploy.report.comparison import Comparison, SampleImages, compare, labels, main_model, model_groups
from fp4deploy.report.comparison_html import render_comparison
from fp4deploy.report.figures.curves import draw_comparison, draw_curves, save_curves
from fp4deploy.report.figures.overlays import Overlay, data_uri, draw_overlays
from fp4deploy.report.figures.predictions import draw_predictions
from fp4deploy.report.figures.telemetry import draw_telemetry, telemetry_numbers, telemetry_pictures, tracked_models
from fp4deploy.report.history import history
from fp4deploy.report.html import Pictures, render_html
from fp4deploy.report.markdown import render_markdown
from fp4deploy.report.model import Measurement, ReportData
from fp4deploy.report.run_folder import read_run, readable
from fp4deploy.report.telemetry_page import page_path
from fp4deploy.runs import Run, open_run
from fp4deploy.system.files import write_json, write_whole
from fp4deploy.tasks import TASKS

NO_SAMPLES = "Samples are left out"


@dataclass(frozen=True)
class Report:
    """Paths of the three files, and the data that they show."""

    json: Path
    markdown: Path
    html: Path
    data: ReportData


def write_report(run: Run, measurement: Measurement, data: Path) -> Report:
    """Write `report.{json,md,html}` into the run's folder, from the measurement that has just been made.

    Raises:
        InputError: the folder cannot be written, or the data no longer fits the models.
    """
    return _save(run, collect(run, read_run(run, measurement=measurement), measurement.remarks), data)


def rewrite_report(run: Run, out: Path | None = None) -> Report:
    """Write the report from what is in the run's folder: its three files there, or only the page, to `out`.

    Raises:
        InputError: no model has a checkpoint that can be read, or a file cannot be written.
    """
    found = read_run(run)
    report = collect(run, found).model_copy(update={"rewritten": now()})
    data = readable(found.data, run.path)
    if data is not None:
        try:
            return _save(run, report, data, out)
        except InputError as error:
            report.remarks.append(f"{NO_SAMPLES}. {error}")
    else:
        report.remarks.append(f"{NO_SAMPLES}: the data of the run is no longer there.")
    return _save(run, report, None, out)


def _save(run: Run, report: ReportData, data: Path | None, out: Path | None = None) -> Report:
    """Draw the pictures and write; `data` None: no samples."""
    paths = Report(run.path / "report.json", run.path / "report.md", out or run.path / "report.html", report)
    page = draw_page(run, report, data, paths.html)
    if out is None:
        write_json(paths.json, report.to_json())
        write_whole(paths.markdown, render_markdown(report))
    write_whole(paths.html, page)
    return paths


def draw_page(run: Run, report: ReportData, data: Path | None, page: Path) -> str:
    """report.html with its pictures, as the file `page`; the curves are kept under plots/ as well."""
    curves = draw_curves({model: history(run, model) for model in run.models()}, report.fine_tuned, report.title)
    if curves:
        save_curves(run, curves)
    pair = run.checkpoint("fp16"), run.checkpoint("nvfp4")
    shown = all(path.is_file() for path in pair) and not TASKS[report.task].whole_images  # no picture shows a class
    overlays: list[Overlay] = draw_overlays(*pair, data) if data and shown else []
    all_heatmaps = page_path(run)
    link = Path(os.path.relpath(all_heatmaps, page.parent)).as_posix() if all_heatmaps.is_file() else None
    return render_html(report, Pictures(_svg(curves), telemetry_pictures(run, report.models), overlays, link))


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
    """Where a comparison is written by default: next to the first run."""
    names = [name.replace("/", "-") for name in labels([run.path for run in runs])]
    kept = names if len(names) < 4 else [*names[:2], f"{len(names) - 2}-more"]
    return runs[0].path.resolve().parent / f"report-{'-'.join(kept)}.html"


def write_comparison(runs: Sequence[Run], out: Path) -> Comparison:
    """Compare runs and write the page; returns the data that it shows.

    Raises:
        InputError: the page cannot be written.
    """
    named = labels([run.path for run in runs])
    read = [read_run(run, label) for run, label in zip(runs, named, strict=True)]
    tracked = tracked_models(read)
    groups = model_groups(read)
    chosen = groups[0] if groups else [(place, m) for place, run in enumerate(read) if (m := main_model(run))]
    samples = draw_predictions(read, chosen)
    found = compare(read).model_copy(
        update={
            "telemetry": telemetry_numbers(read, tracked),
            "samples": SampleImages(images=[row.caption for row in samples.rows], missing=samples.missing),
        }
    )
    curves = draw_comparison(
        read, [{model: history(run, model) for model in r.models} for run, r in zip(runs, read, strict=True)]
    )
    write_whole(out, render_comparison(found, _svg(curves), samples, draw_telemetry(read, tracked)))
    return found


def _svg(picture: str | None) -> str | None:
    return data_uri("svg+xml", picture.encode()) if picture else None
