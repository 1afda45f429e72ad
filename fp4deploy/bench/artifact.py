"""One artefact's line in `report.json`: what it is, how large, how accurate, how fast, or why it was not run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4deploy.bench.evaluate import Progress, evaluate_task
from fp4deploy.bench.latency import Latency, measure
from fp4deploy.bench.ledgers import built_by, ledger_beside
from fp4deploy.bench.records import ArtifactEntry, Quantiles
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import VAL
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.export.ledger.ledger import sha256
from fp4deploy.instances import InstanceScores
from fp4deploy.metrics import Scores

OK = "ok"
NOT_RUN = "built, not run"


@dataclass(frozen=True)
class ArtifactResult:
    """A measured artefact; accuracy in [0, 1] and `latency` are None where it could not be run, and `reason` says why.

    miou: of semantic models. instances: scores of instance models.
    memory: bytes of weights and activations, of runtimes that know them (`runtimes.packed.memory`).
    """

    path: Path
    model: str | None
    backend: str
    precision: str
    size_bytes: int
    sha256: str
    status: str
    reason: str | None = None
    miou: float | None = None
    pixel_accuracy: float | None = None
    per_class: dict[str, float | None] = field(default_factory=dict)
    latency: Latency | None = None
    memory: dict[str, int] | None = None
    instances: InstanceScores | None = None

    @property
    def metric(self) -> str:
        """Name of the accuracy."""
        return "AP" if self.instances else "mIoU"

    @property
    def accuracy(self) -> float | None:
        """AP of an instance model, mIoU of a semantic one; None where it was not measured."""
        return _finite(self.instances.ap) if self.instances else self.miou

    def to_json(self) -> dict[str, Any]:
        """The entry of `artifacts` in report.json."""
        return self.entry().model_dump(mode="json")

    def entry(self) -> ArtifactEntry:
        """The result as it is written to JSON and shown in tables."""
        timed = self.latency
        return ArtifactEntry(
            path=str(self.path),
            model=self.model,
            backend=self.backend,
            precision=self.precision,
            size_bytes=self.size_bytes,
            sha256=self.sha256,
            miou=self.miou,
            ap=_finite(self.instances.ap) if self.instances else None,
            ap50=_finite(self.instances.ap50) if self.instances else None,
            instances=self.instances.to_json() if self.instances else None,
            pixel_accuracy=self.pixel_accuracy,
            per_class=dict(self.per_class),
            latency_ms=Quantiles(p50=timed.p50, p90=timed.p90, p99=timed.p99) if timed else None,
            images_per_s=timed.images_per_s if timed else None,
            batch=timed.batch if timed else None,
            timed_runs=timed.runs if timed else None,
            device=timed.device if timed else None,
            memory=self.memory,
            status=self.status,
            reason=self.reason,
        )


def bench_artifact(
    path: Path,
    data: Path | None,
    *,
    model: str | None = None,
    batch: int = 1,
    iterations: int = 50,
    progress: Progress | None = None,
    max_detections: int | None = None,
    results: Path | None = None,
    split: str = VAL,
    timeout: float | None = None,
) -> ArtifactResult:
    """Measure one artefact: accuracy on a split of `data` (left out when None), and latency.

    max_detections, results: of instance models, as of `instances.evaluate_instances`.
    timeout: of one inference of an ONNX file, as of `open_runtime`.

    Raises:
        InputError: the file is not an artefact, or the data does not fit it.
        UnavailableError: this machine cannot run it.
    """
    path = Path(path)
    runtime = open_runtime(path, timeout)
    found = None
    if data is not None:
        found = evaluate_task(
            runtime, data, progress=progress, max_detections=max_detections, results=results, split=split
        )
    scores = found if isinstance(found, Scores) else None
    latency = measure(runtime, batch=batch, iterations=iterations)
    return ArtifactResult(
        path=path,
        model=model or runtime.card.precision,
        backend=runtime.name,
        precision=runtime.precision,
        size_bytes=path.stat().st_size,
        sha256=sha256(path),
        status=OK,
        miou=_finite(scores.miou) if scores else None,
        pixel_accuracy=_finite(scores.pixel_accuracy) if scores else None,
        per_class=dict(found.per_class) if found else {},
        latency=latency,
        memory=getattr(runtime, "memory", None),
        instances=found if isinstance(found, InstanceScores) else None,
    )


def bench_or_explain(path: Path, data: Path | None, *, model: str | None = None, **settings: Any) -> ArtifactResult:
    """Like `bench_artifact`, but an engine that cannot run here becomes a row saying so, without numbers."""
    try:
        return bench_artifact(path, data, model=model, **settings)
    except UnavailableError as error:
        return not_run(path, str(error), model=model)


def not_run(path: Path, reason: str, *, model: str | None = None) -> ArtifactResult:
    """The row of an engine that exists and cannot run on this machine."""
    ledger = ledger_beside(path)
    precision = ledger.precision if ledger else "unknown"
    return ArtifactResult(
        path=path,
        model=model or precision,
        backend=built_by(ledger) if ledger else "unknown builder",
        precision={"nvfp4": "NVFP4", "fp16": "FP16"}.get(precision, precision),
        size_bytes=path.stat().st_size,
        sha256=sha256(path),
        status=NOT_RUN,
        reason=reason,
    )


@dataclass(frozen=True)
class Baseline:
    """What others are compared with: "mIoU" or "AP", and its value in [0, 1]."""

    metric: str
    value: float


def find_baseline(
    path: Path,
    data: Path | None,
    max_detections: int | None = None,
    split: str = VAL,
    timeout: float | None = None,
) -> Baseline:
    """Accuracy to compare with: measured when `path` is an artefact, read when it is what `bench --json` wrote.

    Raises:
        InputError: the JSON holds no accuracy, or the artefact cannot be read.
        UnavailableError: the artefact cannot run here.
    """
    if path.suffix == ".json":
        found = _recorded(path)
    else:
        result = bench_artifact(path, data, iterations=1, max_detections=max_detections, split=split, timeout=timeout)
        found = Baseline(result.metric, result.accuracy) if result.accuracy is not None else None
    if found is None:
        raise InputError(
            f"The baseline {path} has no accuracy. Give a checkpoint, an .onnx, or the file of bench --json."
        )
    return found


def _recorded(path: Path) -> Baseline | None:
    try:
        for entry in json.loads(path.read_text(encoding="utf-8"))["artifacts"]:
            if entry["miou"] is not None:
                return Baseline("mIoU", float(entry["miou"]))
            if entry.get("ap") is not None:
                return Baseline("AP", float(entry["ap"]))
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"The baseline {path} is not a file of bench --json ({error}). Write one with: "
            f"fp4deploy bench --engine unet-fp16.onnx --json {path}"
        ) from error


def gate_drop(results: list[ArtifactResult], baseline: Baseline, max_drop: float) -> None:
    """Fail when an artefact's accuracy is more than `max_drop` points (hundredths) below the baseline's.

    Raises:
        GateError: one is, or none could be measured.
        InputError: an artefact has another metric than the baseline.
    """
    measured = [(result.accuracy, result) for result in results if result.accuracy is not None]
    if not measured:
        raise GateError(f"The gate --max-drop cannot be judged: no artefact gave an {baseline.metric} on this machine.")
    other = next((result for _, result in measured if result.metric != baseline.metric), None)
    if other is not None:
        raise InputError(
            f"{other.path.name} has an {other.metric} and the baseline an {baseline.metric}: they are models of "
            "different tasks. Give a baseline of the same task."
        )
    accuracy, worst = min(measured, key=lambda pair: pair[0])
    drop = 100 * (baseline.value - accuracy)
    if drop > max_drop:
        raise GateError(
            f"{worst.path.name} has {100 * accuracy:.2f} {worst.metric}, {drop:.2f} points below the baseline's "
            f"{100 * baseline.value:.2f}; --max-drop allows {max_drop:g}. Train NVFP4 longer, or keep more layers in "
            "FP16."
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
