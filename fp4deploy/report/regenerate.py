"""The report of one run, written anew from what lies in its folder: nothing is trained, nothing is measured.

Numbers of artefacts are those of the last measurement, for the files that have not changed since; where there was none,
a model has the best score of its training's validation, and the report says so. Only the pictures are made again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4deploy.bench.ledgers import engines
from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write
from fp4deploy.report.run import Report, draw_page, save_report, size_pairs, summary
from fp4deploy.report.run_data import readable
from fp4deploy.runs import Run

MADE = "# made from config.yaml; the command of this run was not recorded"


def again(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    """The facts of report.json made of what `run_facts.read_run` found.

    Raises:
        InputError: no model of the run has a checkpoint that can be read.
    """
    models = {name: _model(name, model, facts) for name, model in facts["models"].items() if model["checkpoint"]}
    if not models:
        raise InputError(
            f"{run.path} holds no finished model to report. Train one with: fp4deploy train --resume --out {run.path}"
        )
    remarks = [f"{remark[0].upper()}{remark[1:]}" for remark in facts["remarks"]]
    unmeasured = [name for name in models if facts["models"][name]["measured"] is None]
    if unmeasured:
        remarks.append(f"The accuracy of {', '.join(unmeasured)} is the best of the validation during training.")
    found: dict[str, Any] = {
        "run": run.path.resolve().name,
        "created": facts["created"] or _now(),
        "rewritten": _now(),
        "data": str(facts["data"]),
        "task": facts["task"],
        "fine_tuned": not facts["config"].get("train.from_scratch"),
        "models": models,
        "artifacts": facts["artifacts"],
        "sizes": {kind: list(pair) for kind, pair in size_pairs(facts["artifacts"]).items() if None not in pair},
        "ledgers": _ledgers(run, remarks),
        "stages": facts["stages"],
        "remarks": remarks,
        "commands": facts["commands"] if facts["commands_recorded"] else [MADE, *facts["commands"]],
        "environment": facts["environment"],
    }
    return {**found, "summary": summary(found)}


def rewrite(run: Run, facts: dict[str, Any], out: Path | None) -> Report:
    """Write the report: into the run's folder, or only the page, to `out`.

    Raises:
        InputError: a file cannot be written.
    """
    told = again(run, facts)
    data = readable(facts["data"], run.path)
    try:
        return _write(run, told, data, out)
    except InputError as error:
        if data is None:
            raise
        told["remarks"].append(f"Samples are left out. {error}")
    return _write(run, told, None, out)


def _write(run: Run, told: dict[str, Any], data: Path | None, out: Path | None) -> Report:
    missing = "Samples are left out: the data of the run is not here any more."
    if data is None and not any(remark.startswith("Samples are left out") for remark in told["remarks"]):
        told["remarks"].append(missing)
    if out is None:
        return save_report(run, told, data)
    page = draw_page(run, told, data)
    with atomic_write(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return Report(run.path / "report.json", run.path / "report.md", out, told)


def _model(name: str, model: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """As `report.collect` has it."""
    entry = next((e for e in facts["artifacts"] if e["model"] == name and e["path"].endswith(".safetensors")), None)
    best = model["best"] or {"score": None, "per_class": {}}
    score = model["measured"] if model["measured"] is not None else best["score"]
    instance = facts["task"] == "instance"
    kept = ("precision", "scale", "digits", "recipe", "height", "width", "class_names", "epochs")
    return {
        **{key: model[key] for key in kept},
        "architecture": "unet",
        "checkpoint": f"{name}/best.safetensors",
        "task": facts["task"],
        "miou": None if instance else score,
        "ap": score if instance else None,
        "ap50": entry["ap50"] if entry else None,
        "per_class": model["measured_per_class"] or best["per_class"],
        "accuracy_from": "measured" if model["measured"] is not None else "validation during training",
    }


def _ledgers(run: Run, remarks: list[str]) -> list[dict[str, Any]]:
    try:
        return engines(run)
    except InputError as error:
        remarks.append(f"Engines are left out. {error}")
        return []


def _now() -> str:
    from datetime import datetime, timezone

    return datetime.now(timezone.utc).isoformat(timespec="seconds")
