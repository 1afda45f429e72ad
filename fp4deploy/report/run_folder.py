"""Reading the folder of one run, without training or measuring anything.

| what | from |
|---|---|
| settings, task, data, planned epochs | config.yaml |
| best and last score, scores of classes | <model>/metrics.jsonl: the validation of the training |
| size, accuracy and latency of artefacts | report.json of `fp4deploy run`, bench.jsonl of `bench`; the later |
| machine, commands | report.json, else commands.jsonl, which every training writes |
| artefacts that nobody measured | the files themselves: a size, and "not measured"; engines: "built, not run" |

The two accuracies of a model differ a little: a training validates the weights it has, a report measures them as they
ship, rounded to FP16. They are never mixed in one difference. A number in report.json belongs to a file: where the file
has changed since (its SHA-256 differs), the number is dropped and the reason given.

A folder may be interrupted, half deleted or of an older version. What cannot be read becomes a sentence in `remarks`;
only a folder without config.yaml is an error.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import Field, ValidationError

from fp4deploy.bench.artifact import NOT_RUN, OK
from fp4deploy.bench.commands import recorded
from fp4deploy.bench.kept import FILE as KEPT_FILE
from fp4deploy.bench.kept import KeptEntry
from fp4deploy.bench.kept import kept as kept_entries
from fp4deploy.bench.ledgers import built_by, ledger_of
from fp4deploy.bench.locate import model_of, run_artifacts
from fp4deploy.bench.records import NOT_MEASURED, ArtifactEntry, Machine, Record, Scores
from fp4deploy.bench.runtimes.precision import of_engine
from fp4deploy.errors import InputError, counted
from fp4deploy.models import read_card
from fp4deploy.models.card import TaskName
from fp4deploy.report.history import Epoch, history
from fp4deploy.report.model import Measurement, StageTime
from fp4deploy.runs import DEFAULT_MODELS, MODELS, Run
from fp4deploy.system.files import file_digest
from fp4deploy.system.schema import parse_json, read_text, read_yaml
from fp4deploy.tasks import TASKS
from fp4deploy.train.schedule import epochs_of

if TYPE_CHECKING:
    from fp4deploy.train import Config

VALIDATION = "val"  # split of the numbers in a report
CHANGED = "changed since"  # status of a file that is another one than the one that was measured


class EpochScore(Record):
    """The accuracy of one epoch's validation."""

    epoch: int
    score: float
    loss: float | None = None
    per_class: Scores = Field(default_factory=dict)


class CardData(Record):
    """What a report shows of a model card; `checkpoint` is False where there is no checkpoint that can be read."""

    checkpoint: bool = True
    architecture: str = "unet"
    precision: str | None = None
    recipe: str | None = None
    target: str | None = None
    rest: str = "fp16"
    scale: float | None = None
    digits: bool = False
    height: int | None = None
    width: int | None = None
    class_names: list[str] = Field(default_factory=list)


class TrainedModel(CardData):
    """One model of a run: its training, and what a bench measured of its checkpoint.

    planned: epochs that the settings ask for, None where they do not say. measured: accuracy of the checkpoint.
    """

    epochs: int
    planned: int | None
    best: EpochScore | None = None
    last: EpochScore | None = None
    measured: float | None = None
    measured_per_class: Scores = Field(default_factory=dict)
    instances: Scores | None = None

    def scores(self) -> dict[str, float | None]:
        """Accuracy of the best and the last epoch, and of the measured checkpoint."""
        best = self.best.score if self.best else None
        return {"best": best, "last": self.last.score if self.last else None, "measured": self.measured}


class RunData(Record):
    """Everything one run holds; `label` is its name in tables, `config` its settings by flat name ("train.lr")."""

    label: str
    path: str
    created: str | None
    task: TaskName
    class_names: list[str]
    data: str | None
    config: dict[str, Any]
    models: dict[str, TrainedModel]
    artifacts: list[ArtifactEntry]
    stages: list[StageTime]
    commands: list[str]
    commands_recorded: bool
    environment: Machine | None
    remarks: list[str]


def read_run(run: Run, label: str | None = None, measurement: Measurement | None = None) -> RunData:
    """Read one run; `label` is by default the folder's name.

    measurement: of this moment, which then stands for report.json and for the files of artefacts.
    """
    remarks: list[str] = []
    config = _config(run, remarks)
    settings = flat(config.model_dump(mode="json")) if config else _settings_as_they_are(run)
    task = cast(TaskName, settings.get("task", "semantic"))
    models = {model: found for model in MODELS if (found := _model(run, model, task, config, remarks)) is not None}
    benched = [] if measurement else _benched(run, settings.get("data.root"), remarks)
    kept = measurement or _recorded_measurement(run, benched, remarks)
    artifacts = measurement.artifacts if measurement else _artifacts(run, kept, benched, remarks)
    for name, model in models.items():
        checkpoint = checkpoint_entry(artifacts, name)
        if checkpoint is not None:
            model.measured = getattr(checkpoint, TASKS[task].key)
            model.measured_per_class = checkpoint.per_class
            model.instances = checkpoint.instances
    if not models:
        remarks.append(f"no model has been trained here yet; continue with: fp4deploy train --resume --out {run.path}")
    before = recorded(run)
    machines = [line.environment for line in (benched or before)]
    machine = machines[-1] if machines else None
    commands = kept.commands or [entry.command for entry in before]
    names = next((model.class_names for model in models.values() if model.class_names), None)
    names = names or next((list(model.best.per_class) for model in models.values() if model.best), [])
    return RunData(
        label=label or run.path.name,
        path=str(run.path),
        created=kept.created,
        task=task,
        class_names=names,
        data=_text(settings.get("data.root")) or kept.data,
        config=settings,
        models=models,
        artifacts=artifacts,
        stages=kept.stages,
        commands=commands or [f"fp4deploy train --config {run.config_path} --models {_names(models)}"],
        commands_recorded=bool(commands),
        environment=kept.environment or machine,
        remarks=remarks,
    )


def checkpoint_entry(artifacts: list[ArtifactEntry], model: str) -> ArtifactEntry | None:
    """The entry of a model's checkpoint."""
    return next((e for e in artifacts if e.model == model and e.path.endswith(".safetensors")), None)


def flat(tree: dict[str, object], prefix: str = "") -> dict[str, Any]:
    """{"train": {"lr": 1}} -> {"train.lr": 1}; an empty mapping stays a value."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return found


def readable(path: str | None, run: Path) -> Path | None:
    """The data folder `path` of a run: as named, from here or from the run's neighbours; or the run's own data/."""
    if path is None:
        return None
    for folder in (Path(path), run.parent / path, run.parent.parent / path, run / "data"):
        if folder.is_dir():
            return folder
    return None


def _names(models: dict[str, TrainedModel]) -> str:
    return ",".join(models or DEFAULT_MODELS)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _config(run: Run, remarks: list[str]) -> Config | None:
    """The settings with today's defaults for what an older run does not name; None where they are not valid today."""
    from fp4deploy.train import load_config

    try:
        return load_config(run.config_path, [])
    except InputError as error:
        remarks.append(f"config.yaml is not valid today, so its settings are compared as they are. {error}")
        return None


def _settings_as_they_are(run: Run) -> dict[str, object]:
    try:
        tree = read_yaml(run.config_path)
    except InputError:
        tree = None
    settings = flat(tree) if isinstance(tree, dict) else {}
    if settings.get("task", "semantic") not in TASKS:
        settings["task"] = "semantic"
    plain: dict[str, Any] = json.loads(json.dumps(settings, default=str))  # noqa: TID251  of this process
    return plain


def _recorded_measurement(run: Run, benched: list[KeptEntry], remarks: list[str]) -> Measurement:
    """What report.json holds; nothing where there is none or it is damaged. NaN becomes None."""
    path = run.path / "report.json"
    if not path.is_file():
        if not benched:
            remarks.append("its artefacts have not been measured; measure them with: fp4deploy bench")
        return Measurement(artifacts=[])
    try:
        return Measurement.model_validate(parse_json(read_text(path), path, nan="none"))
    except (InputError, ValidationError):
        remarks.append("its report.json cannot be read, so its artefacts count as not measured")
        return Measurement(artifacts=[])


def _model(run: Run, model: str, task: TaskName, config: Config | None, remarks: list[str]) -> TrainedModel | None:
    """Scores of one model, None where nothing of it is there."""
    epochs = history(run, model)
    has_file = run.checkpoint(model).is_file()
    if not epochs and not has_file:
        return None
    card = _card(run, model, remarks) if has_file else {"checkpoint": False}
    scored = [found for entry in epochs if (found := _score(entry, task)) is not None]
    done, planned = max((entry.epoch for entry in epochs), default=0), config and epochs_of(config, model)
    if planned and done < planned:
        remarks.append(
            f"{model} is unfinished, {done} of {counted(planned, 'epoch')}: its scores are those so far. Continue "
            f"with: fp4deploy train --resume --out {run.path}"
        )
    best = max(scored, key=lambda entry: entry.score, default=None)
    last = scored[-1] if scored else None
    return TrainedModel(epochs=done, planned=planned, best=best, last=last, **card)


def _card(run: Run, model: str, remarks: list[str]) -> dict[str, object]:
    """What a report shows of the card inside a checkpoint; its types are checked, as the file may be anyone's."""
    try:
        card = read_card(run.checkpoint(model))
        return CardData.model_validate(card, from_attributes=True).model_dump()
    except (InputError, ValidationError) as error:
        remarks.append(f"{model}: {error}" if isinstance(error, InputError) else f"{model}: its card is damaged.")
        return {"checkpoint": False}


def _score(entry: Epoch, task: TaskName) -> EpochScore | None:
    score = entry.score(task)
    if score is None:
        return None
    return EpochScore(epoch=entry.epoch, score=score, loss=entry.loss, per_class=entry.per_class)


def _artifacts(run: Run, kept: Measurement, benched: list[KeptEntry], remarks: list[str]) -> list[ArtifactEntry]:
    """Entries of report.json or of a later bench, checked against their files, and files that were not measured."""
    latest = {(entry.path, entry.backend): entry for entry in kept.artifacts if entry.status != NOT_MEASURED}
    for later in benched:
        if later.at >= (kept.created or ""):
            for key in [key for key in latest if key[0] == later.entry.path and latest[key].status != OK]:
                del latest[key]
            latest[later.entry.path, later.entry.backend] = later.entry
    entries = [_checked(run, entry) for entry in latest.values()]
    known = {entry.path for entry in entries}
    for path in run_artifacts(run).values():
        name = path.relative_to(run.path).as_posix()
        if name not in known and not name.endswith(".portable.onnx"):
            entries.append(_unmeasured(run, path, name))
    changed = sum(entry.status == CHANGED for entry in entries)
    if changed:
        verb = "has" if changed == 1 else "have"
        remarks.append(
            f"{counted(changed, 'artefact')} {verb} changed since the measurement; the old numbers are left out"
        )
    order = {model: place for place, model in enumerate(MODELS)}
    return sorted(entries, key=lambda entry: order.get(str(entry.model), len(order)))  # stable: as they were listed


def _unmeasured(run: Run, path: Path, name: str) -> ArtifactEntry:
    """A file that nobody measured: its size, and of an engine with a ledger that it was built, for what and by what."""
    entry = ArtifactEntry(path=name, model=model_of(path, run), size_bytes=path.stat().st_size)
    try:
        ledger = ledger_of(path) if path.suffix == ".plan" else None
    except InputError:  # `collect` names it
        ledger = None
    if ledger is None:
        return entry
    precision = of_engine(ledger, ledger.precision)
    return entry.model_copy(update={"status": NOT_RUN, "backend": built_by(ledger), "precision": precision})


def _benched(run: Run, data: object, remarks: list[str]) -> list[KeptEntry]:
    """What `fp4deploy bench` measured on the run's own validation split; other data gets a remark, and no place."""
    own = {str(folder.resolve()) for folder in (readable(_text(data), run.path), run.path / "data") if folder}
    every = kept_entries(run)
    found = [line for line in every if line.data in own and line.entry.split in (None, VALIDATION)]
    others = sorted({f"{line.data} ({line.entry.split})" for line in every if line not in found})
    if others:
        remarks.append(f"measurements on other data are in {KEPT_FILE} and not shown: {', '.join(others[:3])}")
    return found


def _checked(run: Run, entry: ArtifactEntry) -> ArtifactEntry:
    """The entry without its numbers where the file is another one by now; a deleted file keeps them."""
    path = run.path / entry.path
    if not entry.sha256 or not os.path.isfile(path):  # isfile: a name in the file may be longer than the system takes
        return entry
    size = path.stat().st_size
    if size == entry.size_bytes and file_digest(path) == entry.sha256:
        return entry
    reason = f"{entry.path} has changed since it was measured. Measure it with: fp4deploy bench --engine {path}"
    kept = entry.model_dump(include={"path", "model", "backend", "precision", "sha256"})
    return ArtifactEntry(**kept, size_bytes=size, status=CHANGED, reason=reason)
