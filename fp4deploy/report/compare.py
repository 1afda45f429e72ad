"""Several runs beside each other: what differs in their settings, and what that did.

The first run is what the others are compared with. Two differences are given, both of scores of one kind:

    to the first run     score of a model - score of the same model in the first run
    to the control       score of a model - score of the FP16 control of the same run (of FP16, where there is none)

The second takes out what data, seed and length of a run do to all its models, which is more than most settings do. One
pair of runs is one pair: how far a difference would move with another seed is what `fp4deploy sweep` is for.

Models are compared under one name. Where no two runs share a model (the variants of a sweep), each run stands for its
last one. mIoU and AP, or means over other classes, are never subtracted; what was left out stands in `cannot`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fp4deploy.report.run import PER_CLASS
from fp4deploy.report.run_data import METRIC_KEYS
from fp4deploy.train.tasks import METRICS

TITLES = {"fp16": "FP16", "nvfp4": "NVFP4", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4 PTQ"}
PREFERRED = ("nvfp4", "nvfp4_ptq", "fp16_control", "fp16")  # the model that a run was made for
SIZES = {"ap": "all", "ap_small": "small", "ap_medium": "medium", "ap_large": "large"}
HARMLESS = ("data.workers", "data.cache_gib", "train.save_minutes")

Facts = dict[str, Any]


def labels(paths: Sequence[Path]) -> list[str]:
    """Names for runs: the folder's, with as many parents as make them distinct."""
    parts = [Path(path).resolve().parts for path in paths]
    for length in range(1, max(map(len, parts), default=1) + 1):
        found = ["/".join(part[-length:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    return [str(path) for path in paths]


def compare(runs: Sequence[Facts]) -> Facts:
    """Every fact of the comparison as JSON values; `runs` as `read_run` gives them, the first is the reference."""
    groups = model_groups(runs)
    facts: Facts = {
        "runs": list(runs),
        "differences": differences(runs),
        "scores": scores(runs, groups),
        "classes": [table for group in groups if (table := class_changes(runs, group))],
        "sizes": [table for group in groups if (table := size_changes(runs, group))],
        "artifacts": artifacts(runs),
        "cannot": cannot(runs),
    }
    return {"summary": summary(facts), **facts}


def main_model(run: Facts) -> str | None:
    """The model that a run was made for."""
    return next((model for model in PREFERRED if model in run["models"]), None)


def model_groups(runs: Sequence[Facts]) -> list[list[tuple[int, str]]]:
    """(place of the run, model) of what is compared with each other: one task, and one model where runs share one."""
    scored = [
        (place, model)
        for place, run in enumerate(runs)
        for model, found in run["models"].items()
        if found["best"] or found["measured"] is not None
    ]
    tasks = list(dict.fromkeys(run["task"] for run in runs))
    groups = [
        [member for member in scored if member[1] == model and runs[member[0]]["task"] == task]
        for task in tasks
        for model in PREFERRED
    ]
    if any(len(group) > 1 for group in groups):
        return [group for group in groups if len(group) > 1]
    mains = [member for member in scored if member[1] == main_model(runs[member[0]])]
    groups = [[member for member in mains if runs[member[0]]["task"] == task] for task in tasks]
    return [group for group in groups if len(group) > 1]


def differences(runs: Sequence[Facts]) -> list[Facts]:
    """Settings whose values differ: key, a value a run (None where it has none), whether it can change a result."""
    keys = list(dict.fromkeys(key for run in runs for key in run["config"]))
    found = []
    for key in keys:
        values = [run["config"].get(key) for run in runs]
        if any(value != values[0] for value in values):
            harmless = key in HARMLESS or key.startswith("telemetry.")
            found.append({"key": key, "values": values, "changes_results": not harmless})
    return found


def comparable(one: Facts, other: Facts) -> bool:
    """Whether scores of the two runs are of one kind: the same task and classes."""
    return bool(one["task"] == other["task"] and one["class_names"] == other["class_names"])


def scores(runs: Sequence[Facts], groups: Sequence[Sequence[tuple[int, str]]]) -> list[Facts]:
    """One row a trained model, scores and differences in [-1, 1]; None where there is nothing to subtract."""
    references = _references(runs, groups)
    found = []
    for place, run in enumerate(runs):
        control = next((name for name in ("fp16_control", "fp16") if name in run["models"]), None)
        for name, model in run["models"].items():
            row: Facts = {"run": run["label"], "model": name, "metric": METRICS[run["task"]]}
            row |= {"epochs": model["epochs"], "planned": model["planned"], "measured": model["measured"]}
            for which in ("best", "last"):
                entry = model[which]
                row |= {which: entry and entry["score"], f"{which}_epoch": entry and entry["epoch"]}
            row["control"] = control if control != name else None
            row |= _gaps("control", row, run["models"].get(row["control"]))
            first = references.get((place, name))
            row["first"] = [runs[first[0]]["label"], first[1]] if first else None
            row |= _gaps("first", row, runs[first[0]]["models"][first[1]] if first else None)
            found.append(row)
    return found


def _references(
    runs: Sequence[Facts], groups: Sequence[Sequence[tuple[int, str]]]
) -> dict[tuple[int, str], tuple[int, str]]:
    """Of each (run, model) the first of its group that can be subtracted from it."""
    found = {}
    for group in groups:
        for number, member in enumerate(group):
            earlier = (other for other in group[:number] if comparable(runs[other[0]], runs[member[0]]))
            reference = next(earlier, None)
            if reference is not None:
                found[member] = reference
    return found


def _gaps(name: str, row: Facts, other: Facts | None) -> Facts:
    found = {}
    for which in ("best", "last", "measured"):
        theirs = other and other[which]
        theirs = theirs["score"] if isinstance(theirs, dict) else theirs
        gap = row[which] - theirs if row[which] is not None and theirs is not None else None
        found[f"{which}_to_{name}"] = gap
    return found


def class_changes(runs: Sequence[Facts], group: Sequence[tuple[int, str]]) -> Facts | None:
    """Scores of classes and their changes to the group's first, largest loss first; of the best epoch where known."""
    told, key = "the best epoch", "best"
    members = [(place, model) for place, model in group if runs[place]["models"][model][key]]
    if len(members) < 2:
        told, key = "the measured checkpoint", "measured_per_class"
        members = [(place, model) for place, model in group if runs[place]["models"][model][key]]
    found = [runs[place]["models"][model][key] for place, model in members]
    columns = [entry["per_class"] for entry in found] if key == "best" else found
    names = [name for name in (columns[0] if columns else []) if sum(name in column for column in columns) > 1]
    if len(members) < 2 or not names:
        return None
    rows = [_row(name, [column.get(name) for column in columns]) for name in names]
    metric = PER_CLASS[runs[members[0][0]]["task"]]
    return {**_group(runs, members), "metric": metric, "of": told, "rows": _sorted(rows)}


def size_changes(runs: Sequence[Facts], group: Sequence[tuple[int, str]]) -> Facts | None:
    """AP by the size of objects, of measured checkpoints; None where fewer than two were measured."""
    members = [member for member in group if runs[member[0]]["models"][member[1]]["instances"]]
    if len(members) < 2:
        return None
    columns = [runs[place]["models"][model]["instances"] for place, model in members]
    rows = [_row(title, [column.get(key) for column in columns]) for key, title in SIZES.items()]
    return {**_group(runs, members), "metric": "AP", "of": "the measured checkpoint", "rows": rows}


def _group(runs: Sequence[Facts], members: Sequence[tuple[int, str]]) -> Facts:
    models = {model for _, model in members}
    title = TITLES[next(iter(models))] if len(models) == 1 else "each run's last model"
    return {"title": title, "columns": [{"run": runs[place]["label"], "model": model} for place, model in members]}


def _row(name: str, values: list[float | None]) -> Facts:
    first = values[0]
    changes = [value - first if value is not None and first is not None else None for value in values]
    return {"name": name, "values": values, "changes": changes}


def _sorted(rows: list[Facts]) -> list[Facts]:
    def mean(row: Facts) -> float:
        known = [change for change in row["changes"][1:] if change is not None]
        return sum(known) / len(known) if known else float("inf")

    return sorted(rows, key=mean)


def artifacts(runs: Sequence[Facts]) -> list[Facts]:
    """Every artefact of every run, the same one of all runs together."""
    paths = list(dict.fromkeys(entry["path"] for run in runs for entry in run["artifacts"]))
    found = []
    for path in paths:
        for run in runs:
            entry = next((entry for entry in run["artifacts"] if entry["path"] == path), None)
            if entry is not None:
                kept = ("path", "model", "backend", "size_bytes", "latency_ms", "device", "status", "reason")
                accuracy = entry[METRIC_KEYS[run["task"]]]
                found.append(
                    {"run": run["label"], **{name: entry[name] for name in kept}, "metric": METRICS[run["task"]]}
                    | {"accuracy": accuracy}
                )
    return found


def cannot(runs: Sequence[Facts]) -> list[str]:
    """What is not compared or only with care, in sentences."""
    found = []
    tasks = {task: [run["label"] for run in runs if run["task"] == task] for task in METRICS}
    if all(tasks.values()):
        listed = "; ".join(f"{METRICS[task]} of {', '.join(named)}" for task, named in tasks.items())
        found.append(f"The runs learn different tasks, which are not subtracted from each other: {listed}.")
    for task in METRICS:
        same = [run for run in runs if run["task"] == task and run["class_names"]]
        other = [run for run in same if run["class_names"] != same[0]["class_names"]]
        if other:
            shared = [name for name in same[0]["class_names"] if all(name in run["class_names"] for run in other)]
            told = f"of classes only the {len(shared)} they share" if shared else "they share none"
            listed = ", ".join(run["label"] for run in other)
            found.append(
                f"{same[0]['label']} and {listed} know different classes: their means are not subtracted, and {told}."
            )
    sources = {run["data"] for run in runs if run["data"] is not None}
    if len(sources) > 1:
        listed = ", ".join(f"{run['label']}: {run['data']}" for run in runs)
        found.append(f"The runs name different data ({listed}); if the validation images differ, so do their scores.")
    pixels = {(run["config"].get("data.height"), run["config"].get("data.width")) for run in runs}
    if len(pixels) > 1 and {run["task"] for run in runs} == {"semantic"}:
        found.append("Input sizes differ, and mIoU is counted at the size of the input: on other pixels in each run.")
    return found


def summary(facts: Facts) -> list[str]:
    """The main results in whole sentences."""
    runs, found = facts["runs"], []
    told = set()
    for row in sorted(facts["scores"], key=lambda row: PREFERRED.index(row["model"])):
        which = "best" if row["best_to_first"] is not None else "measured"
        gap = row[f"{which}_to_first"]
        if gap is None or row["run"] in told:
            continue
        told.add(row["run"])
        label, model = row["first"]
        theirs = "" if model == row["model"] else f"'s {TITLES[model]}"
        verb = "the same as" if round(100 * gap, 2) == 0 else f"{abs(100 * gap):.2f} {'above' if gap > 0 else 'below'}"
        found.append(
            f"{row['run']}: {TITLES[row['model']]} reaches {100 * row[which]:.2f} points of {row['metric']}, "
            f"{verb} {label}{theirs} ({100 * (row[which] - gap):.2f})."
        )
    real = [entry["key"] for entry in facts["differences"] if entry["changes_results"]]
    shown = ", ".join(real[:6]) + (f" and {len(real) - 6} more" if len(real) > 6 else "")
    other = len(facts["differences"]) - len(real)
    idle = f" ({other} more that change no result)" if other else ""
    found.append(
        f"Settings that differ: {shown}{idle}." if real else f"No setting that changes a result differs{idle}."
    )
    quiet = [run["label"] for run in runs if not run["models"]]
    if quiet:
        found.append(f"No model yet: {', '.join(quiet)}.")
    return found
