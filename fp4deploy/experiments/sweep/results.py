"""The results of a sweep: each variant's mean over seeds, and its difference to another variant, paired by seed.

Trainings of one seed share the FP16 model they start from and the order of the data, and two seeds differ far more
from each other than two variants of one. The difference within a seed takes that out, so that the interval of its
mean is that of the paired t distribution: with d_1 ... d_n the differences, s their standard deviation and t the 97.5
% quantile of Student's distribution with n - 1 degrees of freedom,

    mean(d)  +-  t s / sqrt(n),                    t = 12.7 for n = 2, 4.3 for n = 3, 2.8 for n = 5

With one seed there is no interval. Numbers are read from the runs' own files, so that a table can be made at any time.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path
from typing import Any

from fp4deploy.bench.records import Record
from fp4deploy.bench.tables import signed
from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.spec import Sweep, Variant
from fp4deploy.experiments.sweep.test_split import read_test
from fp4deploy.runs import Run
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import Count, Float, Share, read_json, read_lines, validated
from fp4deploy.tasks import key_of
from fp4deploy.train.schedule import training_job
from fp4deploy.train.state import read_progress

LEVEL = 0.95
SCORES = ("best", "last", "test")  # of the best and the last epoch, and of the best checkpoint on the test split
ERROR_FILE = "error.json"
MAX_OF_AN_ERROR = 300  # characters in the table; sweep.json has all of it


def run_of(out: Path, variant: Variant, seed: int) -> Run:
    """The run of one variant and seed, an ordinary run folder."""
    return Run(out / variant.name / f"seed{seed}")


def outcome(sweep: Sweep, out: Path, variant: Variant, seed: int) -> dict[str, Any]:
    """The state of one run: status "done", "failed", "unfinished" or "missing", and its scores in [0, 1]."""
    run = run_of(out, variant, seed)
    found: dict[str, Any] = {"status": "missing", "best": None, "last": None, "path": f"{variant.name}/seed{seed}"}
    config = sweep.config(variant, seed)
    job = training_job(config, run, variant.model)
    if job.state_path.is_file():
        try:
            progress = read_progress(job.state_path)
        except InputError as error:
            return {**found, "status": "failed", "error": str(error)}
        done = progress.epoch >= job.epochs and progress.best_score >= 0
        found |= {"status": "done" if done else "unfinished", "epochs": progress.epoch, "seconds": progress.seconds}
        try:
            found |= _scores(job.metrics_path, progress.epoch, sweep.metric)
            found |= {"skipped_steps": progress.skipped}
            tested = read_test(run, variant.model, sweep.metric)
            found |= {"test": tested} if tested is not None else {}
        except InputError as error:
            return {**found, "status": "failed", "error": str(error)}
    error_file = run.path / ERROR_FILE
    if found["status"] != "done" and error_file.is_file():
        found |= {"status": "failed", "error": read_error(error_file)}
    return found


class _Failure(Record):
    error: str


def read_error(path: Path) -> str:
    """What `variant.write_error` noted; where that cannot be read, why not."""
    try:
        return validated(_Failure, read_json(path), path).error
    except InputError as error:
        return str(error)


class _Epoch(Record):
    """A line of metrics.jsonl as a sweep reads it."""

    epoch: Count
    miou: Share | None = None
    ap: Share | None = None
    top1: Share | None = None
    loss_spikes: Count | None = None
    images_per_s: Float | None = None


def _scores(metrics: Path, last_epoch: int, metric: str) -> dict[str, object]:
    every = [validated(_Epoch, line, f"{metrics}, line {number}") for number, line in read_lines(metrics)]
    lines = [line for line in every if line.epoch <= last_epoch]
    scores = [(line.epoch, getattr(line, key_of(metric))) for line in lines]
    scored = [(score, epoch) for epoch, score in scores if score is not None]
    if not scored:
        return {}
    best, best_epoch = max(scored, key=lambda pair: pair[0])
    rate = [line.images_per_s for line in lines if line.images_per_s]
    return {
        "best": best,
        "best_epoch": best_epoch,
        "last": scored[-1][0],
        "loss_spikes": sum(line.loss_spikes or 0 for line in lines),
        "images_per_s": statistics.median(rate) if rate else None,
    }


def collect(sweep: Sweep, out: Path) -> dict[str, object]:
    """Everything as JSON: of each variant its runs by seed, mean and standard deviation, and the paired difference.

    Scores are mIoU, AP or top-1 (`metric`) in [0, 1]; differences are in points, positive where the variant is better.
    """
    rows: dict[str, Any] = {}
    for variant in sweep.variants:
        runs = {str(seed): outcome(sweep, out, variant, seed) for seed in sweep.seeds}
        done = [run for run in runs.values() if run["status"] == "done"]
        rows[variant.name] = {
            "model": variant.model,
            "settings": list(variant.sets),
            "note": variant.note,
            "against": variant.against,
            "runs": runs,
            **{key: _mean([run[key] for run in done if key in run]) for key in SCORES},
        }
    for row in rows.values():
        other = rows[row["against"]]["runs"] if row["against"] else None
        for key in SCORES:
            row[f"gap_{key}"] = paired(row["runs"], other, key) if other else None
    about = {"file": sweep.file.name, "settings": list(sweep.sets), "metric": sweep.metric, "score": sweep.score}
    return {**about, "variants": rows}


def _mean(values: list[float]) -> dict[str, Any] | None:
    if not values:
        return None
    return {"mean": statistics.fmean(values), "sd": statistics.stdev(values) if len(values) > 1 else None}


def paired(runs: dict[str, Any], others: dict[str, Any], key: str) -> dict[str, object] | None:
    """Mean of the differences over the seeds that both have finished, in points, with its interval."""
    seeds = [
        seed for seed in runs if all(each[seed]["status"] == "done" and key in each[seed] for each in (runs, others))
    ]
    differences = {seed: 100 * (runs[seed][key] - others[seed][key]) for seed in seeds}
    if not differences:
        return None
    low, high = interval(list(differences.values()))
    return {
        "by_seed": differences,
        "mean": statistics.fmean(differences.values()),
        "low": low,
        "high": high,
        "level": LEVEL,
    }


def interval(values: list[float], level: float = LEVEL) -> tuple[float | None, float | None]:
    """Interval of the mean by Student's t; (None, None) for fewer than two values."""
    if len(values) < 2:
        return None, None
    from scipy.stats import t

    reach = float(t.ppf((1 + level) / 2, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    mean = statistics.fmean(values)
    return mean - reach, mean + reach


def write_results(results: dict[str, object], out: Path) -> None:
    """sweep.json and sweep.md, atomically.

    Raises:
        InputError: a file cannot be written.
    """
    for name, text in (("sweep.json", json.dumps(results, indent=1) + "\n"), ("sweep.md", markdown(results))):
        write_whole(out / name, text)


def markdown(results: dict[str, Any]) -> str:
    """The table: mIoU or AP in %; differences in points with their 95 % interval."""
    keys = [key for key in SCORES if any(row.get(key) for row in results["variants"].values()) or key != "test"]
    scores, gaps = [f"{results['metric']} {key}" for key in keys], [f"gap {key}" for key in keys]
    head = ["variant", "model", "settings", "seeds", *scores, "against", *gaps, "min"]
    lines = [_line(head), _line(["---"] * len(head))]
    notes = []
    for name, row in results["variants"].items():
        runs = row["runs"]
        done = [run for run in runs.values() if run["status"] == "done"]
        seconds = [run["seconds"] for run in done]
        lines.append(
            _line(
                [
                    name,
                    row["model"],
                    ", ".join(filter(None, [row["note"], *row["settings"]])) or "–",
                    f"{len(done)}/{len(runs)}",
                    *(_score(row[key]) for key in keys),
                    row["against"] or "–",
                    *(gap_text(row[f"gap_{key}"]) for key in keys),
                    f"{statistics.fmean(seconds) / 60:.1f}" if seconds else "–",
                ]
            )
        )
        for seed, run in runs.items():
            if run["status"] == "failed":
                notes.append(f"* {name}, seed {seed}, failed: {run['error'][:MAX_OF_AN_ERROR]}")
            elif "test" in keys and run["status"] == "done" and "test" not in run:
                notes.append(f"* {name}, seed {seed}, is not scored on the test split.")
    text = (
        f"The score of this sweep is {results['metric']} {results['score']}, in %, mean and standard deviation over "
        "seeds. Gaps are in points, paired by seed, positive where the variant is better, with a 95 % interval by "
        "Student's t."
    )
    return "\n".join([f"# {results['file']}", "", text, "", *lines, *([""] if notes else []), *notes, ""])


def gap_text(gap: dict[str, Any] | None) -> str:
    """ "+0.12 [-0.30, +0.54]", without an interval for one seed."""
    if gap is None:
        return "–"
    mean, low, high = (None if gap[key] is None else signed(gap[key] / 100) for key in ("mean", "low", "high"))
    return f"{mean}" if low is None else f"{mean} [{low}, {high}]"


def _score(value: dict[str, Any] | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value['mean']:.2f}" + (f" ± {100 * value['sd']:.2f}" if value["sd"] is not None else "")


def _line(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"
