"""The report of a run: `report.json` for programs, `report.md` for a pull request, `report.html` for a person.

The JSON holds every fact; the other two are made from it, plus the pictures. Nothing is projected: an engine that this
machine built and cannot run has a size and a ledger, and no accuracy or latency.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fp4deploy.bench import tables
from fp4deploy.bench.artifact import NOT_RUN, ArtifactResult
from fp4deploy.bench.environment import environment
from fp4deploy.bench.ledgers import engines
from fp4deploy.files import atomic_write
from fp4deploy.models import read_card
from fp4deploy.report.figures.curves import draw_curves, history, save_curves
from fp4deploy.report.figures.heatmaps import telemetry_pictures
from fp4deploy.report.figures.instance_overlays import draw_instance_overlays
from fp4deploy.report.figures.overlays import Overlay, draw_overlays
from fp4deploy.runs import Run
from fp4deploy.train.tasks import METRICS

PER_CLASS = {"semantic": "IoU", "instance": "AP"}


@dataclass(frozen=True)
class Report:
    """Paths of the three files, and the facts they hold."""

    json: Path
    markdown: Path
    html: Path
    facts: dict[str, Any]


@dataclass
class Journal:
    """What a chain of stages did: (title, seconds) of each, remarks, and the commands that repeat it."""

    stages: list[tuple[str, float]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)


def write_report(run: Run, artifacts: Sequence[ArtifactResult], data: Path, journal: Journal | None = None) -> Report:
    """Write `report.{json,md,html}` into the run's folder.

    Raises:
        InputError: the folder cannot be written, or the data no longer fits the models.
    """
    facts = collect(run, artifacts, data, journal or Journal())
    return save_report(run, facts, data)


def save_report(run: Run, facts: dict[str, Any], data: Path | None) -> Report:
    """Draw the pictures and write the three files; `data` None, no samples.

    Raises:
        InputError: the folder cannot be written, or the data no longer fits the models.
    """
    paths = [run.path / f"report.{suffix}" for suffix in ("json", "md", "html")]
    page = draw_page(run, facts, data)
    texts = json.dumps(facts, indent=2, allow_nan=False) + "\n", render_markdown(facts), page
    for path, text in zip(paths, texts, strict=True):
        with atomic_write(path) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return Report(paths[0], paths[1], paths[2], facts)


def draw_page(run: Run, facts: dict[str, Any], data: Path | None) -> str:
    """report.html, its pictures drawn; the curves are kept under plots/ as well."""
    from fp4deploy.report.run_html import render_html

    histories = {model: history(run, model) for model in run.models()}
    curves = draw_curves(histories, fine_tuned=facts["fine_tuned"])
    if curves:
        save_curves(run, curves)
    pair = run.checkpoint("fp16"), run.checkpoint("nvfp4")
    draw = draw_instance_overlays if facts["task"] == "instance" else draw_overlays
    overlays: list[Overlay] = draw(*pair, data) if data and all(path.is_file() for path in pair) else []
    return render_html(facts, curves, overlays, telemetry_pictures(run, facts["models"]))


def collect(run: Run, artifacts: Sequence[ArtifactResult], data: Path, journal: Journal) -> dict[str, Any]:
    """Every fact of the report as JSON values; paths of artefacts are relative to the run."""
    entries = [{**result.to_json(), "path": _inside(result.path, run)} for result in artifacts]
    facts = {
        "run": run.path.name,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": str(data),
        "task": _task(run),
        "fine_tuned": _fine_tuned(run),
        "models": {model: _model(run, model, entries) for model in run.models()},
        "artifacts": entries,
        "sizes": size_pairs(entries),
        "ledgers": engines(run),
        "stages": [{"stage": title, "seconds": round(seconds, 2)} for title, seconds in journal.stages],
        "remarks": journal.remarks,
        "commands": journal.commands,
        "environment": environment(),
    }
    return {**facts, "summary": summary(facts)}


def _inside(path: Path, run: Run) -> str:
    try:
        return str(path.resolve().relative_to(run.path.resolve()))
    except ValueError:
        return str(path)


def _task(run: Run) -> str:
    models = run.models()
    return read_card(run.checkpoint(models[0])).task if models else "semantic"


def _fine_tuned(run: Run) -> bool:
    from fp4deploy.train import load_config

    return not load_config(run.config_path, []).train.from_scratch


def _model(run: Run, model: str, entries: list[dict[str, Any]]) -> dict[str, Any]:
    card = read_card(run.checkpoint(model))
    lines = history(run, model)
    checkpoint = next((e for e in entries if e["model"] == model and e["path"].endswith(".safetensors")), None)
    return {
        "precision": card.precision,
        "architecture": card.architecture,
        "scale": card.scale,
        "digits": card.digits,
        "recipe": card.recipe,
        "height": card.height,
        "width": card.width,
        "class_names": list(card.class_names),
        "epochs": len(lines),
        "checkpoint": _inside(run.checkpoint(model), run),
        "task": card.task,
        "miou": checkpoint["miou"] if checkpoint else None,
        "ap": checkpoint["ap"] if checkpoint else None,
        "ap50": checkpoint["ap50"] if checkpoint else None,
        "per_class": checkpoint["per_class"] if checkpoint else {},
    }


def summary(facts: dict[str, Any]) -> list[str]:
    """What the run showed, in whole sentences, from measured numbers only."""
    sentences = []
    found = {name: tables.accuracy(model) for name, model in facts["models"].items()}
    control = "fp16_control" if found.get("fp16_control") is not None else "fp16"
    first, second = found.get(control), found.get("nvfp4")
    if first is not None and second is not None:
        lost = 100 * (first - second)
        verb = "loses" if lost > 0 else "gains"
        title = "the FP16 control" if control == "fp16_control" else "FP16"
        sentences.append(
            f"NVFP4 {verb} {abs(lost):.2f} points of {METRICS[facts['task']]} against {title} "
            f"({100 * second:.2f} and {100 * first:.2f})."
        )
        if control == "fp16" and facts["fine_tuned"]:
            extra = facts["models"]["nvfp4"]["epochs"]
            sentences.append(
                f"NVFP4 was trained {extra} epochs longer, which alone helps; --models fp16,fp16_control,nvfp4 adds an "
                "FP16 model trained as long."
            )
    sizes = facts["sizes"]
    if ".onnx" in sizes:
        small, large = sizes[".onnx"]
        sentences.append(f"{_sizes('ONNX file', small, large)}.")
    if ".fp4" in sizes:
        small, large = sizes[".fp4"]
        sentences.append(f"{_sizes('packed file', small, large)}.")
    if ".plan" in sizes:
        small, large = sizes[".plan"]
        sentences.append(f"{_sizes('engine', small, large)}; in engines compiled kernels lie beside the weights.")
    for ledger in facts["ledgers"]:
        if ledger["model"] == "nvfp4":
            sentences.append(f"{ledger['engine']}: {ledger['summary']}")
    for entry in facts["artifacts"]:
        if entry["model"] == "nvfp4" and entry.get("memory"):
            sentences.append(tables.memory(entry["path"], entry["memory"]))
    plans = [entry for entry in facts["artifacts"] if entry["path"].endswith(".plan")]
    unrun = any(entry["status"] == NOT_RUN for entry in plans)
    if unrun and all(entry["latency_ms"] is None for entry in plans):
        sentences.append("This machine cannot run the engines, so they have no accuracy and no latency here.")
    return sentences


def _sizes(what: str, small: int, large: int) -> str:
    return (
        f"Its {what} has {tables.size(small)} where FP16's has {tables.size(large)}, {small / large:.2f} of the bytes"
    )


def size_pairs(artifacts: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Bytes of the NVFP4 and of the FP16 file of each kind, by suffix; kinds that lack one of them are left out."""
    found: dict[str, dict[str, int]] = {}
    for entry in artifacts:
        found.setdefault(Path(entry["path"]).suffix, {}).setdefault(entry["model"], entry["size_bytes"])
    return {kind: (by["nvfp4"], by["fp16"]) for kind, by in found.items() if {"nvfp4", "fp16"} <= by.keys()}


def render_markdown(facts: dict[str, Any]) -> str:
    """report.md: summary, table, per-class IoU, ledger, environment."""
    parts = [f"# {facts['run']}\n", " ".join(facts["summary"]) + "\n"]
    parts.append(tables.markdown(tables.head(facts["artifacts"]), tables.rows(facts["artifacts"])))
    reasons = [f"* {entry['reason']}" for entry in facts["artifacts"] if entry["reason"]]
    parts += (
        ["\n".join([*reasons, *(f"* {remark}" for remark in facts["remarks"])]) + "\n"]
        if reasons or facts["remarks"]
        else []
    )
    if facts["ledgers"]:
        body = [[entry["engine"], entry["built"], *map(str, entry["counts"].values())] for entry in facts["ledgers"]]
        parts += ["## Engines\n", tables.markdown(("engine", "built by", *facts["ledgers"][0]["counts"]), body)]
    parts += [f"## {PER_CLASS[facts['task']]} per class, points\n", per_class_markdown(facts["models"])]
    machine = facts["environment"]
    place = (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['platform']}, Python {machine['python']}; "
        + ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        + ".\n"
        if machine
        else "Not recorded.\n"
    )
    parts += ["## Measured on\n", place]
    return "\n".join(parts)


def per_class_markdown(models: dict[str, Any]) -> str:
    """One row a class, one column a model."""
    names = next((list(model["per_class"]) for model in models.values() if model["per_class"]), [])
    body = [[name, *(tables.points(model["per_class"].get(name)) for model in models.values())] for name in names]
    return tables.markdown(("class", *models), body)
