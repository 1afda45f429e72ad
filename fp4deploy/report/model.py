"""report.json as types: the one model of a run that every reader, renderer and figure works on.

| key of report.json | type |
|---|---|
| `models` | name -> `ModelEntry` |
| `artifacts` | `ArtifactEntry`, one a file: size, accuracy, latency, or why it was not run |
| `ledgers` | `EngineEntry`, one an engine: which layer runs in which precision |
| `environment` | `Machine` |

`bench.records` defines the units, and how older files, unknown keys and NaN are read.
"""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field

from fp4deploy.bench.records import ArtifactEntry, Machine, Record, Scores
from fp4deploy.errors import counted
from fp4deploy.export.ledger.shares import in_words
from fp4deploy.models.card import TaskName

MODEL_TITLES = {"fp16": "FP16", "nvfp4": "NVFP4", "fp16_control": "FP16 control", "nvfp4_ptq": "NVFP4 PTQ"}


class ModelEntry(Record):
    """A trained model: what it is, and the accuracy of its checkpoint."""

    precision: str | None
    architecture: str
    scale: float | None
    digits: bool
    recipe: str | None
    target: str | None
    rest: str = "fp16"
    height: int | None
    width: int | None
    class_names: list[str]
    epochs: int
    checkpoint: str
    task: TaskName
    miou: float | None
    ap: float | None
    ap50: float | None
    top1: float | None = None
    per_class: Scores
    accuracy_from: Literal["measured", "validation during training"]

    @property
    def accuracy(self) -> float | None:
        """mIoU of a semantic model, AP of an instance model, top-1 of a classifier."""
        return next((value for value in (self.miou, self.top1) if value is not None), self.ap)


class EngineEntry(Record):
    """The ledger of an engine: shares of the multiply-accumulates by precision, `layers` as rows under `columns`.

    counts: layers by kind, for readers of report.json; no page shows them.
    """

    engine: str
    model: str
    built: str
    statement: str
    summary: str
    fp4_mac_share: float
    counts: dict[str, int]
    requested: dict[str, float]
    actual: dict[str, float]
    not_as_requested: int
    columns: list[str]
    layers: list[list[str]]

    @property
    def fallbacks(self) -> int:
        """Layers that have not even the planned precision."""
        return self.counts.get("fallbacks", 0)


class StageTime(Record):
    """A stage of `fp4deploy run` and what it took."""

    stage: str
    seconds: float


class Measurement(Record):
    """What is known only while it happens: results of the bench, times, commands, the machine.

    `fp4deploy run` makes it; `fp4deploy report` takes it out of report.json.
    """

    created: str | None = None
    data: str | None = None
    artifacts: list[ArtifactEntry]
    stages: list[StageTime] = Field(default_factory=list)
    remarks: list[str] = Field(default_factory=list)
    commands: list[str] = Field(default_factory=list)
    environment: Machine | None = None


class ReportData(Record):
    """All of report.json."""

    run: str
    created: str
    rewritten: str | None = None
    data: str
    task: TaskName
    fine_tuned: bool
    models: dict[str, ModelEntry]
    artifacts: list[ArtifactEntry]
    sizes: dict[str, tuple[int, int]]  # suffix -> bytes of the NVFP4 and of the FP16 file
    ledgers: list[EngineEntry]
    stages: list[StageTime]
    remarks: list[str]
    commands: list[str]
    environment: Machine | None
    summary: list[str] = Field(default_factory=list)

    def title(self, model: str | None) -> str:
        """Of a model: "FP16", which is BF16 or FP32 where its card says so, "NVFP4", ..."""
        plain = self.models[model].rest.upper() if model in self.models else "FP16"
        return re.sub(r"^FP16", plain, MODEL_TITLES.get(str(model), str(model)))

    def to_json(self) -> dict[str, object]:
        """JSON values in the order of the fields; `rewritten` only in a report that was written once more."""
        found = self.model_dump(mode="json")
        if self.rewritten is None:
            del found["rewritten"]
        return found


ENGINE_HEAD = ("engine", "built by", "requested", "actual", "layers not as requested", "fallbacks")


def engine_row(entry: EngineEntry) -> tuple[str, ...]:
    """The cells under `ENGINE_HEAD`; precisions by their shares of the multiply-accumulates."""
    shares = (in_words(entry.requested), in_words(entry.actual))
    return (entry.engine, entry.built, *shares, str(entry.not_as_requested), str(entry.fallbacks))


def described(machine: Machine | None) -> dict[str, str]:
    """A machine for a person: title -> text; empty where nothing was recorded."""
    if machine is None:
        return {}
    return {
        "CPU": f"{machine.cpu}, {counted(machine.cores, 'core')}",
        "GPU": ", ".join(f"{gpu.name} ({gpu.arch})" for gpu in machine.gpus) or "none",
        "system": f"{machine.platform}, Python {machine.python}",
        "packages": ", ".join(f"{name} {version}" for name, version in machine.packages.items()),
    }
