"""The page of a comparison, from its template: the same frame, style and rules as a run's page (`report.html`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp4deploy.bench import tables
from fp4deploy.report.comparison import PREFERRED, ChangeTable, Comparison, comparable
from fp4deploy.report.figures.curves import run_colour
from fp4deploy.report.html import Tile, environment
from fp4deploy.report.model import MODEL_TITLES, described
from fp4deploy.report.run_folder import RunData

if TYPE_CHECKING:
    from fp4deploy.report.figures.overlays import PictureRow
    from fp4deploy.report.figures.predictions import Predictions

MAX_LETTERS = 60  # of a setting's value


@dataclass(frozen=True)
class Changes:
    """A table of changes by class or size, with its heading; `by_loss`: rows come with the largest loss first."""

    table: ChangeTable
    heading: str
    by_loss: bool

    @property
    def names(self) -> list[str]:
        """Titles of the columns: runs, with their models where these differ."""
        columns = self.table.columns
        several = len({column.model for column in columns}) > 1
        return [f"{c.run} ({MODEL_TITLES[c.model]})" if several else c.run for c in columns]

    @property
    def numeric(self) -> list[str]:
        """Titles of all columns of numbers: scores, then changes to the first column."""
        return [*self.names, *(f"Δ {name}" for name in self.names[1:])]

    @property
    def largest(self) -> float:
        """The largest change, which fills a bar."""
        return max((abs(c) for row in self.table.rows for c in row.changes[1:] if c is not None), default=0.0)


def render_comparison(
    found: Comparison, curves: str | None, samples: Predictions, heatmaps: Sequence[PictureRow]
) -> str:
    """The whole page; `curves` is a data URI."""
    runs = found.runs
    tracked = {row["run"] for row in found.telemetry}
    settings = {key for run in runs for key in run.config}
    changes = [Changes(table, f"{table.metric} per class", True) for table in found.classes]
    changes += [Changes(table, "AP by object size", False) for table in found.sizes]
    template = environment().get_template("comparison.html.j2")
    return template.render(
        found=found,
        changes=changes,
        setting=_setting,
        networks=[_described(run) for run in runs],
        runs=runs,
        colours={run.label: run_colour(place) for place, run in enumerate(runs)},
        mixed=any(not comparable(runs[0], run) for run in runs),
        tiles=[_tile(found, run) for run in runs],
        remarks=_remarks(runs),
        equal_settings=len(settings) - len(found.differences),
        metrics=sorted({row.metric for row in found.scores}),
        curves=curves,
        samples=samples,
        heatmaps=heatmaps,
        untracked=[run.label for run in runs if run.label not in tracked],
        machines=_machines(runs),
    )


def _tile(found: Comparison, run: RunData) -> Tile:
    """The score of a run's most quantised model, and its distance to the first run."""
    rows = [row for row in found.scores if row.run == run.label]
    rows = [row for row in rows if row.best is not None or row.measured is not None]
    row = min(rows, key=lambda row: PREFERRED.index(row.model), default=None)
    if row is None:
        return Tile(run.label, tables.NONE, "no score yet")
    which, score, gap = (
        ("best", row.best, row.best_to_first)
        if row.best is not None
        else ("measured", row.measured, row.measured_to_first)
    )
    change = f", {tables.signed(gap)}" if gap is not None else ""
    return Tile(run.label, tables.percent(score), f"{MODEL_TITLES[row.model]}, {which} {row.metric}{change}")


def _remarks(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Remark -> labels of the runs it is about."""
    found: dict[str, list[str]] = {}
    for run in runs:
        for remark in run.remarks:
            found.setdefault(remark, []).append(run.label)
    return found


def _machines(runs: Sequence[RunData]) -> dict[str, list[str]]:
    """Title -> one text a run; empty where no run recorded its machine."""
    machines = [described(run.environment) for run in runs]
    names = dict.fromkeys(name for machine in machines for name in machine)
    return {name: [machine.get(name, "not recorded") for machine in machines] for name in names}


def _described(run: RunData) -> str:
    model = next(iter(run.models.values()), None)
    named = tables.network(model.scale, model.digits, model.architecture) if model and model.scale else ""
    network = f"{named}, " if named else ""
    pixels = f"{run.config.get('data.width', '?')} x {run.config.get('data.height', '?')} pixels"
    return f"{run.task}, {network}{pixels}, data {run.data or 'not named'}"


def _setting(value: object) -> str:
    text = tables.NONE if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…"
