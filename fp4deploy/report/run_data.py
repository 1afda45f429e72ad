"""What the folder of one run tells, read without training or measuring anything.

| fact | from |
|---|---|
| settings, task, data, planned epochs | config.yaml |
| best and last score, score per class | <model>/metrics.jsonl: the validation of the training |
| size, accuracy and latency of artefacts | report.json, where `fp4deploy run` wrote one |
| machine, commands | report.json, else commands.jsonl, which every training writes |
| artefacts that nobody measured | the files themselves: a size, and "not measured" |

The two accuracies of a model differ a little: a training validates the weights it has, a report measures them as they
ship, rounded to FP16. They are never mixed in one difference. A number in report.json belongs to a file: where the file
has changed since (its SHA-256 differs), the number is dropped and the reason given.

Folders are as they are: interrupted, half deleted, of an older version. What cannot be read becomes a sentence in
`remarks`, and only a folder without config.yaml is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fp4deploy.bench.commands import recorded
from fp4deploy.bench.environment import is_machine
from fp4deploy.bench.locate import model_of, run_artifacts
from fp4deploy.errors import InputError
from fp4deploy.export.ledger.ledger import sha256
from fp4deploy.models import read_card
from fp4deploy.report.figures.curves import history
from fp4deploy.runs import DEFAULT_MODELS, MODELS, Run

METRIC_KEYS = {"semantic": "miou", "instance": "ap"}
ENTRY: dict[str, Any] = {
    "path": "", "model": None, "backend": "–", "precision": "–", "size_bytes": None, "sha256": None, "miou": None,
    "ap": None, "ap50": None, "instances": None, "pixel_accuracy": None, "per_class": {}, "latency_ms": None,
    "images_per_s": None, "batch": None, "timed_runs": None, "device": None, "memory": None, "status": "not measured",
    "reason": None,
}  # fmt: skip
MEASURED = ("miou", "ap", "ap50", "instances", "pixel_accuracy", "per_class", "latency_ms", "images_per_s", "memory")


def read_run(run: Run, label: str | None = None) -> dict[str, Any]:
    """Everything one run tells, as JSON values; `label` is its name in tables, by default the folder's."""
    remarks: list[str] = []
    label = label or run.path.name
    tree = _config(run, remarks)
    report = _report(run, remarks)
    task = str(tree.get("task", "semantic"))
    models = {model: found for model in MODELS if (found := _model(run, model, task, tree, remarks)) is not None}
    artifacts = _artifacts(run, report, remarks)
    for name, model in models.items():
        entry = next((e for e in artifacts if e["model"] == name and e["path"].endswith(".safetensors")), ENTRY)
        model["measured"] = entry[METRIC_KEYS[task]]
        model["measured_per_class"] = entry["per_class"]
        model["instances"] = entry["instances"]
    if not models:
        remarks.append(f"no model has been trained here yet; continue with: fp4deploy train --resume --out {run.path}")
    before = recorded(run)
    commands = report.get("commands") or [entry["command"] for entry in before]
    names = next((model["class_names"] for model in models.values() if model["class_names"]), None)
    names = names or next((list(model["best"]["per_class"]) for model in models.values() if model["best"]), [])
    return {
        "label": label,
        "path": str(run.path),
        "created": report.get("created"),
        "task": task,
        "class_names": names,
        "data": tree.get("data.root") or report.get("data"),
        "config": tree,
        "models": models,
        "artifacts": artifacts,
        "stages": report.get("stages") or [],
        "commands": commands or [f"fp4deploy train --config {run.config_path} --models {_trained(models)}"],
        "commands_recorded": bool(commands),
        "environment": report.get("environment") or (before[-1]["environment"] if before else None),
        "remarks": remarks,
    }


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}; an empty mapping stays a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def _trained(models: dict[str, Any]) -> str:
    return ",".join(models or DEFAULT_MODELS)


def _config(run: Run, remarks: list[str]) -> dict[str, Any]:
    """Flat settings, with today's defaults for what an older run does not name; as they stand where not valid."""
    from fp4deploy.train import load_config

    try:
        return flat(load_config(run.config_path, []).model_dump(mode="json"))
    except InputError as error:
        remarks.append(f"config.yaml is not valid today, so its settings are compared as they stand. {error}")
    import yaml

    try:
        tree = yaml.safe_load(run.config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        tree = None
    settings = flat(tree) if isinstance(tree, dict) else {}
    if settings.get("task", "semantic") not in METRIC_KEYS:
        settings["task"] = "semantic"
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))
    return plain


def _report(run: Run, remarks: list[str]) -> dict[str, Any]:
    """report.json, or {} where there is none or it is none; NaN becomes None."""
    path = run.path / "report.json"
    if not path.is_file():
        remarks.append("it has no report.json: its artefacts have not been measured (fp4deploy run measures them)")
        return {}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
        whole = _is_whole(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        remarks.append("its report.json cannot be read, so its artefacts count as not measured")
        return {}
    return found


def _is_whole(report: dict[str, Any]) -> bool:
    """Whether report.json has the shape that this package writes; may raise what a wrong type raises."""
    entries = all(
        isinstance(entry["path"], str)
        and isinstance(entry.get("per_class", {}), dict)
        and isinstance(entry.get("instances") or {}, dict)
        and isinstance((entry.get("latency_ms") or {"p50": 0})["p50"], int | float)
        for entry in report["artifacts"]
    )
    stages = all(isinstance(stage["seconds"], int | float) and stage["stage"] for stage in report.get("stages", []))
    commands = all(isinstance(command, str) for command in report.get("commands", []))
    machine = report.get("environment")
    return entries and stages and commands and (not machine or is_machine(machine))


def _model(run: Run, model: str, task: str, tree: dict[str, Any], remarks: list[str]) -> dict[str, Any] | None:
    """Scores of one model, None where nothing of it is there."""
    lines = history(run, model)
    has_file = run.checkpoint(model).is_file()
    if not lines and not has_file:
        return None
    card = None
    if has_file:
        try:
            card = read_card(run.checkpoint(model))
        except InputError as error:
            remarks.append(f"{model}: {error}")
    key = METRIC_KEYS[task]
    scored = [line for line in lines if isinstance(line.get(key), int | float)]
    best = max(scored, key=lambda line: float(line[key]), default=None)
    epochs, planned = max((int(line["epoch"]) for line in lines), default=0), _planned(model, tree)
    if planned and epochs < planned:
        remarks.append(
            f"{model} is unfinished, {epochs} of {planned} epochs: its scores are those so far. Continue with: "
            f"fp4deploy train --resume --out {run.path}"
        )
    return {
        "epochs": epochs,
        "planned": planned,
        "checkpoint": has_file and card is not None,
        "precision": card.precision if card else None,
        "recipe": card.recipe if card else None,
        "scale": card.scale if card else None,
        "digits": card.digits if card else False,
        "height": card.height if card else None,
        "width": card.width if card else None,
        "class_names": list(card.class_names) if card else [],
        "best": _score(best, key),
        "last": _score(scored[-1] if scored else None, key),
    }


def _score(line: dict[str, Any] | None, key: str) -> dict[str, Any] | None:
    if line is None:
        return None
    classes = line.get("per_class")
    return {
        "epoch": line["epoch"],
        "score": float(line[key]),
        "loss": line.get("loss"),
        "per_class": classes if isinstance(classes, dict) else {},
    }


def _planned(model: str, tree: dict[str, Any]) -> int | None:
    """Epochs that the settings ask for; None where they do not say."""
    if model == "nvfp4_ptq":
        return 0
    long = model == "fp16" or (model == "nvfp4" and tree.get("train.from_scratch"))
    found = tree.get("train.epochs" if long else "train.finetune_epochs")
    return found if isinstance(found, int) else None


def _artifacts(run: Run, report: dict[str, Any], remarks: list[str]) -> list[dict[str, Any]]:
    """Entries of report.json whose files are as they were, and the files that it does not know."""
    entries = [_checked(run, {**ENTRY, **entry}) for entry in report.get("artifacts", [])]
    entries = [entry for entry in entries if entry["status"] != ENTRY["status"]]  # listed anew below
    known = {entry["path"] for entry in entries}
    for path in run_artifacts(run).values():
        name = path.relative_to(run.path).as_posix()
        if name not in known and not name.endswith(".portable.onnx"):
            found = {**ENTRY, "path": name, "model": model_of(path, run), "size_bytes": path.stat().st_size}
            entries.append(found)
    missing = sum(entry["status"] == "changed since" for entry in entries)
    if missing:
        what = "1 artefact has" if missing == 1 else f"{missing} artefacts have"
        remarks.append(f"{what} changed since the measurement, whose numbers are left out there")
    order = {model: place for place, model in enumerate(MODELS)}
    return sorted(entries, key=lambda entry: order.get(entry["model"], len(order)))  # stable: as they were listed


def _checked(run: Run, entry: dict[str, Any]) -> dict[str, Any]:
    """The entry without its numbers where the file is another one by now; a deleted file keeps them."""
    path = run.path / entry["path"]
    if not path.is_file() or not entry["sha256"]:
        return entry
    if path.stat().st_size == entry["size_bytes"] and sha256(path) == entry["sha256"]:
        return entry
    cleared = {name: ENTRY[name] for name in MEASURED}
    reason = f"{entry['path']} has changed since it was measured. Measure it with: fp4deploy bench --engine {path}"
    return {**entry, **cleared, "size_bytes": path.stat().st_size, "status": "changed since", "reason": reason}


def readable(path: str | None, run: Path) -> Path | None:
    """The data folder `path` of a run: as named, from here or from the run's neighbours; or the run's own data/."""
    if path is None:
        return None
    for folder in (Path(path), run.parent / path, run.parent.parent / path, run / "data"):
        if folder.is_dir():
            return folder
    return None
