"""Several runs compared: which settings differ, and what that did to scores, classes and artefacts.

The first run is what the others are compared with. Two differences are given, both of scores of one kind:

    to the first run     score of a model - score of the same model in the first run
    to the control       score of a model - score of the FP16 control of the same run (of FP16, where there is none)

The second takes out what data, seed and length of a run do to all its models, which is more than most settings do. One
pair of runs is one pair: how far a difference would move with another seed is what `fp4deploy sweep` is for.

Models are compared under one name. Where no two runs share a model (the variants of a sweep), each run is represented
by its most quantised one. mIoU and AP, or means over other classes, are never subtracted; what was left out is said in
`cannot`. Scores and differences lie in [-1, 1]; None stands where there is nothing to subtract.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from fp4deploy.bench.records import Record
from fp4deploy.report.model import MODEL_TITLES
from fp4deploy.report.run_folder import RunData, TrainedModel
from fp4deploy.tasks import TASKS

PREFERRED = ("nvfp4", "nvfp4_ptq", "fp16_control", "fp16")  # the most quantised model of a run first
SIZES = {"ap": "all", "ap_small": "small", "ap_medium": "medium", "ap_large": "large"}
NO_EFFECT = ("data.workers", "data.cache_gib", "train.save_minutes")  # settings that change no result
EVERY_LAST = "the most quantised model of each run"

Member = tuple[int, str]  # place of a run, name of a model in it


class Difference(Record):
    """A setting that differs: a value a run, None where it has none."""

    key: str
    values: list[object]
    changes_results: bool


class ScoreRow(Record):
    """Scores of one model of one run, and their differences to its control and to the first run."""

    run: str
    model: str
    metric: str
    epochs: int
    planned: int | None
    measured: float | None
    best: float | None
    best_epoch: int | None
    last: float | None
    last_epoch: int | None
    control: str | None
    best_to_control: float | None
    last_to_control: float | None
    measured_to_control: float | None
    first: tuple[str, str] | None
    best_to_first: float | None
    last_to_first: float | None
    measured_to_first: float | None


class Column(Record):
    """The model of a run that a column shows."""

    run: str
    model: str


class ChangeRow(Record):
    """Values of one class or size, a column each, and their changes to the first column."""

    name: str
    values: list[float | None]
    changes: list[float | None]


class ChangeTable(Record):
    """Scores by class or by size; `of` says which checkpoint they are of."""

    title: str
    columns: list[Column]
    metric: str
    of: str
    rows: list[ChangeRow]


class ArtifactRow(Record):
    """One artefact of one run; `accuracy` is of the metric that is named."""

    run: str
    path: str
    model: str | None
    backend: str
    size_bytes: int | None
    latency_ms: dict[str, float] | None
    device: str | None
    status: str
    reason: str | None
    metric: str
    accuracy: float | None


class SampleImages(Record):
    """Captions of the images that were drawn, and why others were not."""

    images: list[str] = Field(default_factory=list)
    missing: list[str] = Field(default_factory=list)


class Comparison(Record):
    """All that the page and `fp4deploy report --json` show; `runs[0]` is the reference."""

    summary: list[str] = Field(default_factory=list)
    runs: list[RunData]
    differences: list[Difference]
    scores: list[ScoreRow]
    classes: list[ChangeTable]
    sizes: list[ChangeTable]
    artifacts: list[ArtifactRow]
    cannot: list[str]
    telemetry: list[dict[str, str | int | float | None]] = Field(default_factory=list)
    samples: SampleImages = Field(default_factory=SampleImages)


def labels(paths: Sequence[Path]) -> list[str]:
    """Names for runs: the folder's, with as many parents as make them distinct."""
    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def compare(runs: Sequence[RunData]) -> Comparison:
    """Compare runs as `read_run` gives them; the first is the reference."""
    groups = model_groups(runs)
    found = Comparison(
        runs=list(runs),
        differences=differences(runs),
        scores=scores(runs, groups),
        classes=[table for group in groups if (table := class_changes(runs, group))],
        sizes=[table for group in groups if (table := size_changes(runs, group))],
        artifacts=artifacts(runs),
        cannot=cannot(runs),
    )
    return found.model_copy(update={"summary": summary(found)})


def main_model(run: RunData) -> str | None:
    """The most quantised model of a run."""
    return next((model for model in PREFERRED if model in run.models), None)


def model_groups(runs: Sequence[RunData]) -> list[list[Member]]:
    """Models that are compared with each other: of one task, and under one name where runs share one."""
    scored = [
        (place, name)
        for place, run in enumerate(runs)
        for name, model in run.models.items()
        if model.best or model.measured is not None
    ]
    tasks = list(dict.fromkeys(run.task for run in runs))
    groups = [
        [member for member in scored if member[1] == model and runs[member[0]].task == task]
        for task in tasks
        for model in PREFERRED
    ]
    if any(len(group) > 1 for group in groups):
        return [group for group in groups if len(group) > 1]
    mains = [member for member in scored if member[1] == main_model(runs[member[0]])]
    groups = [[member for member in mains if runs[member[0]].task == task] for task in tasks]
    return [group for group in groups if len(group) > 1]


def differences(runs: Sequence[RunData]) -> list[Difference]:
    """Settings whose values differ."""
    found = []
    for key in dict.fromkeys(key for run in runs for key in run.config):
        values = [run.config.get(key) for run in runs]
        if any(value != values[0] for value in values):
            idle = key in NO_EFFECT or key.startswith("telemetry.")
            found.append(Difference(key=key, values=values, changes_results=not idle))
    return found


def comparable(one: RunData, other: RunData) -> bool:
    """Whether scores of the two runs are of one kind: the same task and classes."""
    return one.task == other.task and one.class_names == other.class_names


def scores(runs: Sequence[RunData], groups: Sequence[Sequence[Member]]) -> list[ScoreRow]:
    """One row a trained model."""
    references = _references(runs, groups)
    found = []
    for place, run in enumerate(runs):
        control = next((name for name in ("fp16_control", "fp16") if name in run.models), None)
        for name, model in run.models.items():
            against = control if control != name else None
            first = references.get((place, name))
            found.append(
                ScoreRow(
                    run=run.label,
                    model=name,
                    metric=TASKS[run.task].metric,
                    epochs=model.epochs,
                    planned=model.planned,
                    best_epoch=model.best.epoch if model.best else None,
                    last_epoch=model.last.epoch if model.last else None,
                    control=against,
                    first=(runs[first[0]].label, first[1]) if first else None,
                    **model.scores(),
                    **_gaps("control", model, run.models[against] if against else None),
                    **_gaps("first", model, runs[first[0]].models[first[1]] if first else None),
                )
            )
    return found


def _references(runs: Sequence[RunData], groups: Sequence[Sequence[Member]]) -> dict[Member, Member]:
    """Of each model the first of its group that can be subtracted from it."""
    found = {}
    for group in groups:
        for number, member in enumerate(group):
            earlier = (other for other in group[:number] if comparable(runs[other[0]], runs[member[0]]))
            reference = next(earlier, None)
            if reference is not None:
                found[member] = reference
    return found


def _gaps(name: str, model: TrainedModel, other: TrainedModel | None) -> dict[str, float | None]:
    theirs = other.scores() if other else {}
    return {f"{which}_to_{name}": _gap(score, theirs.get(which)) for which, score in model.scores().items()}


def _gap(one: float | None, other: float | None) -> float | None:
    return one - other if one is not None and other is not None else None


def class_changes(runs: Sequence[RunData], group: Sequence[Member]) -> ChangeTable | None:
    """Scores of classes and their changes to the group's first, largest loss first; of the best epoch where known."""
    models = [(member, runs[member[0]].models[member[1]]) for member in group]
    of, columns = "the best epoch", [(member, model.best.per_class) for member, model in models if model.best]
    if len(columns) < 2:
        of = "the measured checkpoint"
        columns = [(member, model.measured_per_class) for member, model in models if model.measured_per_class]
    names = [name for name in (columns[0][1] if columns else []) if sum(name in found for _, found in columns) > 1]
    if len(columns) < 2 or not names:
        return None
    rows = [_row(name, [found.get(name) for _, found in columns]) for name in names]
    members = [member for member, _ in columns]
    metric = TASKS[runs[members[0][0]].task].per_class
    return ChangeTable(**_columns(runs, members), metric=metric, of=of, rows=sorted(rows, key=_mean_change))


def size_changes(runs: Sequence[RunData], group: Sequence[Member]) -> ChangeTable | None:
    """AP by the size of objects, of measured checkpoints; None where fewer than two were measured."""
    found = [
        (member, instances)
        for member in group
        if (instances := runs[member[0]].models[member[1]].instances) is not None
    ]
    if len(found) < 2:
        return None
    rows = [_row(title, [instances.get(key) for _, instances in found]) for key, title in SIZES.items()]
    members = [member for member, _ in found]
    return ChangeTable(**_columns(runs, members), metric="AP", of="the measured checkpoint", rows=rows)


def _columns(runs: Sequence[RunData], members: Sequence[Member]) -> dict[str, object]:
    models = {model for _, model in members}
    title = MODEL_TITLES[next(iter(models))] if len(models) == 1 else EVERY_LAST
    return {"title": title, "columns": [Column(run=runs[place].label, model=model) for place, model in members]}


def _row(name: str, values: list[float | None]) -> ChangeRow:
    return ChangeRow(name=name, values=values, changes=[_gap(value, values[0]) for value in values])


def _mean_change(row: ChangeRow) -> float:
    known = [change for change in row.changes[1:] if change is not None]
    return sum(known) / len(known) if known else float("inf")


def artifacts(runs: Sequence[RunData]) -> list[ArtifactRow]:
    """Every artefact of every run, the same one of all runs together."""
    found = []
    for path in dict.fromkeys(entry.path for run in runs for entry in run.artifacts):
        for run in runs:
            entry = next((entry for entry in run.artifacts if entry.path == path), None)
            if entry is not None:
                accuracy = getattr(entry, TASKS[run.task].key)
                kept = entry.model_dump(exclude={"metric", "accuracy"})
                found.append(ArtifactRow(**kept, run=run.label, metric=TASKS[run.task].metric, accuracy=accuracy))
    return found


def cannot(runs: Sequence[RunData]) -> list[str]:
    """What is not compared or only with care, in sentences."""
    found = []
    tasks = {task: named for task in TASKS if (named := [run.label for run in runs if run.task == task])}
    if len(tasks) > 1:
        listed = "; ".join(f"{TASKS[task].metric} of {', '.join(named)}" for task, named in tasks.items())
        found.append(f"The runs learn different tasks, which are not subtracted from each other: {listed}.")
    for task in TASKS:
        same = [run for run in runs if run.task == task and run.class_names]
        other = [run for run in same if run.class_names != same[0].class_names]
        if other:
            shared = [name for name in same[0].class_names if all(name in run.class_names for run in other)]
            only = f"only the {len(shared)} classes they share are compared" if shared else "they share no class"
            only = "only the 1 class they share is compared" if len(shared) == 1 else only
            listed = ", ".join(run.label for run in other)
            found.append(
                f"{same[0].label} and {listed} know different classes: their means are not subtracted, and {only}."
            )
    if len({run.data for run in runs if run.data is not None}) > 1:
        listed = ", ".join(f"{run.label}: {run.data}" for run in runs)
        found.append(f"The runs name different data ({listed}); if the validation images differ, so do their scores.")
    pixels = {(run.config.get("data.height"), run.config.get("data.width")) for run in runs}
    scored = {TASKS[run.task] for run in runs}
    if len(pixels) > 1 and len(scored) == 1 and all(task.at_input_size for task in scored):
        metric = scored.pop().metric
        found.append(
            f"Input sizes differ, and {metric} is computed at the size of the input: on other pixels in each run."
        )
    return found


def summary(found: Comparison) -> list[str]:
    """The main results in whole sentences."""
    sentences, done = [], set()
    for row in sorted(found.scores, key=lambda row: PREFERRED.index(row.model)):
        best = row.best_to_first is not None
        gap, score = (row.best_to_first, row.best) if best else (row.measured_to_first, row.measured)
        if gap is None or score is None or row.first is None or row.run in done:
            continue
        done.add(row.run)
        label, model = row.first
        whose = label if model == row.model else f"{label}'s {MODEL_TITLES[model]}"
        verb = (
            "the same as"
            if round(100 * gap, 2) == 0
            else f"{abs(100 * gap):.2f} points {'above' if gap > 0 else 'below'}"
        )
        sentences.append(
            f"{row.run}: {MODEL_TITLES[row.model]} reaches {100 * score:.2f} % {row.metric}, "
            f"{verb} {whose} ({100 * (score - gap):.2f} %)."
        )
    real = [entry.key for entry in found.differences if entry.changes_results]
    shown = ", ".join(real[:6]) + (f" and {len(real) - 6} more" if len(real) > 6 else "")
    other = len(found.differences) - len(real)
    idle = f" ({other} more without effect on results)" if other else ""
    sentences.append(
        f"Settings that differ: {shown}{idle}." if real else f"No setting that changes a result differs{idle}."
    )
    quiet = [run.label for run in found.runs if not run.models]
    if quiet:
        sentences.append(f"No model yet: {', '.join(quiet)}.")
    return sentences
