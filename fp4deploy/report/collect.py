"""The data of a run's report, from what was read of its folder.

A report that is written at the end of `fp4deploy run` and one that `fp4deploy report` writes later are collected here
alike. They differ in where the measurement comes from: the bench that has just run, or report.json.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import PurePath

from fp4deploy.bench.ledgers import engines
from fp4deploy.bench.records import ArtifactEntry
from fp4deploy.errors import InputError
from fp4deploy.naming import model_stem, stems
from fp4deploy.report.model import EngineEntry, ModelEntry, ReportData
from fp4deploy.report.run_folder import RunData, TrainedModel, checkpoint_entry
from fp4deploy.report.summary import summary
from fp4deploy.runs import Run
from fp4deploy.tasks import TASKS

FROM_CONFIG = "# from config.yaml; the command of this run was not recorded"


def collect(run: Run, found: RunData, remarks: Sequence[str] = ()) -> ReportData:
    """Report data of a run; `remarks` come before those of the reader.

    Raises:
        InputError: no model of the run has a checkpoint that can be read.
    """
    models = {name: _model(name, model, found) for name, model in found.models.items() if model.checkpoint}
    if not models:
        raise InputError(
            f"{run.path} holds no finished model to report. Train one with: fp4deploy train --resume --out {run.path}"
        )
    remarks = [*remarks, *(f"{remark[0].upper()}{remark[1:]}" for remark in found.remarks)]
    not_measured = [name for name in models if found.models[name].measured is None]
    if not_measured:
        remarks.append(f"The accuracy of {', '.join(not_measured)} is the best of the validation during training.")
    report = ReportData(
        run=run.path.resolve().name,
        created=found.created or now(),
        data=str(found.data),
        task=found.task,
        fine_tuned=not found.config.get("train.from_scratch"),
        models=models,
        artifacts=found.artifacts,
        sizes=size_pairs(found.artifacts, run.stems),
        ledgers=_ledgers(run, remarks),
        stages=found.stages,
        remarks=remarks,
        commands=found.commands if found.commands_recorded else [FROM_CONFIG, *found.commands],
        environment=found.environment,
    )
    return report.model_copy(update={"summary": summary(report)})


def now() -> str:
    """The time in UTC, in ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def size_pairs(
    artifacts: list[ArtifactEntry], stems: Callable[[str], Sequence[str]] = stems
) -> dict[str, tuple[int, int]]:
    """Bytes of the NVFP4 and of the FP16 file of each kind, by suffix; kinds that lack one of them are left out.

    Files that `quantize` made beside those of the run's models do not count. Engines are compared for the same GPU.
    """
    found: dict[tuple[str, str], dict[str | None, int]] = {}
    for entry in artifacts:
        path = PurePath(entry.path)
        own = entry.model is not None and model_stem(path) in (*stems(entry.model), "best")
        if entry.size_bytes is not None and own:
            kind = path.suffix, path.stem.removeprefix(model_stem(path))
            found.setdefault(kind, {}).setdefault(entry.model, entry.size_bytes)
    pairs: dict[str, tuple[int, int]] = {}
    for (suffix, _), by in found.items():
        if {"nvfp4", "fp16"} <= by.keys():
            pairs.setdefault(suffix, (by["nvfp4"], by["fp16"]))
    return pairs


def _model(name: str, model: TrainedModel, found: RunData) -> ModelEntry:
    checkpoint = checkpoint_entry(found.artifacts, name)
    measured = model.measured is not None
    score = model.measured if measured else model.best and model.best.score
    key = TASKS[found.task].key
    return ModelEntry(
        precision=model.precision,
        architecture=model.architecture,
        scale=model.scale,
        digits=model.digits,
        recipe=model.recipe,
        target=model.target,
        rest=model.rest,
        height=model.height,
        width=model.width,
        class_names=model.class_names,
        epochs=model.epochs,
        checkpoint=f"{name}/best.safetensors",
        task=found.task,
        miou=score if key == "miou" else None,
        ap=score if key == "ap" else None,
        top1=score if key == "top1" else None,
        ap50=checkpoint.ap50 if checkpoint else None,
        per_class=model.measured_per_class or (model.best.per_class if model.best else {}),
        accuracy_from="measured" if measured else "validation during training",
    )


def _ledgers(run: Run, remarks: list[str]) -> list[EngineEntry]:
    try:
        return [EngineEntry.model_validate(entry) for entry in engines(run)]
    except InputError as error:
        remarks.append(f"Engines are left out. {error}")
        return []
