"""plots/telemetry.html: every heatmap of a run on one page, with contents, sorting, zoom and the values of cells.

The page holds the numbers as JSON and draws them on canvases (`templates/telemetry.js`), so that it needs neither the
files of the single heatmaps nor plotly.js: one or two megabytes for two UNets of scale 0.25. Values have four digits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp4deploy.report.figures.heatmap import MISSING, Heatmap
from fp4deploy.report.figures.heatmap_page import colorscale
from fp4deploy.report.figures.telemetry import heatmap_folder, model_heatmaps, read_snapshots, save_heatmaps
from fp4deploy.report.html import environment
from fp4deploy.runs import MODELS, Run
from fp4deploy.system.files import write_whole
from fp4deploy.train.logging.trackers import log_pictures

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase
    from fp4deploy.train.sections import TelemetrySection

NAME = "telemetry.html"
LONG = 12  # snapshots from which a training leaves single heatmaps: two hundred, as three files each
DIGITS = 4


def page_path(run: Run) -> Path:
    """Where the page of a run lies."""
    return run.path / "plots" / NAME


def draw_trained(
    run: Run, models: Sequence[str], settings: TelemetrySection, progress: Phase | None = None
) -> dict[str, list[Path]]:
    """What is drawn after a training, unless its settings switch it off: the page, and single heatmaps of a training of
    `LONG` snapshots or more and where TensorBoard, W&B or MLflow tracked it, which get them too.

    Raises:
        InputError: a file cannot be written.
    """
    wanted = settings.plots and settings.every and "jsonl" in settings.trackers
    models = [name for name in models if wanted and read_snapshots(run, name)]  # a calibration leaves none
    if not models:
        return {}
    single = [name for name in models if settings.trackers != ["jsonl"] or len(read_snapshots(run, name)) >= LONG]
    drawn = draw_telemetry_of(run, models, progress, single)
    for model in models:
        _show(run, model, settings)
    return drawn


def _show(run: Run, model: str, settings: TelemetrySection) -> None:
    folder, snapshots = heatmap_folder(run, model), read_snapshots(run, model)
    files = {
        f"heatmaps/{path.relative_to(folder).with_suffix('').as_posix()}": path
        for path in sorted(folder.rglob("*.png"))
    }
    if files and snapshots:
        step = snapshots[-1].step
        log_pictures(settings.trackers, run.model_dir(model), settings.project, settings.wandb_mode, files, step)


def draw_telemetry_of(
    run: Run, models: Sequence[str], progress: Phase | None = None, single: Sequence[str] | None = None
) -> dict[str, list[Path]]:
    """Draw the heatmaps of some models of a run and the page of all that were tracked; the files by model.

    progress: as of `save_heatmaps`. single: the models, of `models`, whose heatmaps are files of their own too; None
    for all of them.

    Raises:
        InputError: one of `models` left no telemetry, or a file cannot be written.
    """
    files: dict[str, list[Path]] = {}
    page: list[tuple[str, Path, Heatmap]] = []
    tracked = [model for model in MODELS if model in models or read_snapshots(run, model)]
    for model in tracked:
        found = model_heatmaps(run, model)
        page += [(model, *placed) for placed in found]
        if model in (models if single is None else single):
            files[model] = save_heatmaps(run, model, found, progress=progress)
    write_page(run, page)
    return files


def write_page(run: Run, heatmaps: Iterable[tuple[str, Path, Heatmap]]) -> Path:
    """Write the page of (model, place in its folder, heatmap); the models come in the order of the heatmaps.

    Raises:
        InputError: the file cannot be written.
    """
    path = page_path(run)
    write_whole(path, render_page(run.path.name, heatmaps))
    return path


def render_page(title: str, heatmaps: Iterable[tuple[str, Path, Heatmap]]) -> str:
    """The page as text; `title` names the run."""
    from markupsafe import Markup

    maps = [_entry(number, *entry) for number, entry in enumerate(heatmaps)]
    names = {entry["colours"] for entry in maps}
    data = {
        "maps": maps,
        "colours": {name: [stop for _, stop in colorscale(name)] for name in sorted(names)},
        "missing": MISSING,
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    escaped = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return (
        environment()
        .get_template("telemetry.html.j2")
        .render(
            title=title,
            models=list(dict.fromkeys(entry["model"] for entry in maps)),
            maps=len(maps),
            data=Markup(escaped),
        )
    )


def _entry(number: int, model: str, place: Path, heatmap: Heatmap) -> dict[str, Any]:
    low, high, log = heatmap.limits()
    return {
        "id": f"map-{number}",
        "model": model,
        "group": place.parent.as_posix(),
        "name": place.name,
        "title": heatmap.title,
        "note": heatmap.note,
        "rows": list(heatmap.rows),
        "columns": list(heatmap.columns),
        "row_title": heatmap.row_title,
        "column_title": heatmap.column_title,
        "unit": heatmap.unit,
        "colours": heatmap.colours,
        "low": low,
        "high": high,
        "log": log,
        "ticks": None if heatmap.ticks is None else list(heatmap.ticks),
        "layers": heatmap.cell is None,
        "values": [[_rounded(value) for value in row] for row in heatmap.values],
    }


def _rounded(value: float | None) -> float | None:
    if value is None:
        return None
    short = float(f"{value:.{DIGITS}g}")
    return int(short) if short == int(short) else short
