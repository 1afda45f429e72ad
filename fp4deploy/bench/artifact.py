"""One artefact's line in `report.json`: what it is, how large, how accurate, how fast, or why it was not run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.bench.evaluate import Progress, evaluate_task
from fp4deploy.bench.latency import measure
from fp4deploy.bench.ledgers import built_by, ledger_of
from fp4deploy.bench.records import ArtifactEntry, Quantiles, Record
from fp4deploy.bench.runtimes.open import open_runtime
from fp4deploy.data import VAL
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.export.ledger.ledger import sha256
from fp4deploy.instances import InstanceScores
from fp4deploy.metrics import Scores
from fp4deploy.schema import Share, read_json, validated

OK = "ok"
NOT_RUN = "built, not run"
UNAVAILABLE = "unavailable"


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
    provider: str = "cpu",
) -> ArtifactEntry:
    """Measure one artefact: accuracy on a split of `data` (left out when None), and latency.

    max_detections, results: of instance models, as of `instances.evaluate_instances`.
    timeout, provider: of an ONNX file, as of `open_runtime`.

    The bytes of weights and activations are in the entry where the runtime knows them (`runtimes.packed.memory`).

    Raises:
        InputError: the file is not an artefact, or the data does not fit it.
        UnavailableError: this machine cannot run it.
    """
    path = Path(path)
    runtime = open_runtime(path, timeout, provider)
    found = None
    if data is not None:
        found = evaluate_task(
            runtime, data, progress=progress, max_detections=max_detections, results=results, split=split
        )
    scores = found if isinstance(found, Scores) else None
    instances = found if isinstance(found, InstanceScores) else None
    timed = measure(runtime, batch=batch, iterations=iterations)
    return ArtifactEntry(
        path=str(path),
        model=model or runtime.card.precision,
        backend=runtime.name,
        precision=runtime.precision,
        size_bytes=path.stat().st_size,
        sha256=sha256(path),
        miou=_finite(scores.miou) if scores else None,
        ap=_finite(instances.ap) if instances else None,
        ap50=_finite(instances.ap50) if instances else None,
        instances=instances.to_json() if instances else None,
        pixel_accuracy=_finite(scores.pixel_accuracy) if scores else None,
        per_class=dict(found.per_class) if found else {},
        latency_ms=Quantiles(p50=timed.p50, p90=timed.p90, p99=timed.p99),
        images_per_s=timed.images_per_s,
        batch=timed.batch,
        timed_runs=timed.runs,
        device=timed.device,
        memory=getattr(runtime, "memory", None),
        status=OK,
    )


def bench_or_explain(path: Path, data: Path | None, *, model: str | None = None, **settings: Any) -> ArtifactEntry:
    """Like `bench_artifact`, but an engine that cannot run here becomes a row saying so, without numbers."""
    try:
        return bench_artifact(path, data, model=model, **settings)
    except UnavailableError as error:
        return not_run(path, str(error), model=model, provider=settings.get("provider", "cpu"))


def not_run(path: Path, reason: str, *, model: str | None = None, provider: str = "cpu") -> ArtifactEntry:
    """The row of an engine, or of an ONNX file and a provider, that cannot run on this machine."""
    ledger = ledger_of(path) if path.suffix == ".plan" else None
    precision = ledger.precision if ledger else "unknown"
    builder = f"ONNX Runtime ({provider})" if path.suffix == ".onnx" else "unknown builder"
    return ArtifactEntry(
        path=str(path),
        model=model or precision,
        backend=built_by(ledger) if ledger else builder,
        precision={"nvfp4": "NVFP4", "fp16": "FP16"}.get(precision, precision),
        size_bytes=path.stat().st_size,
        sha256=sha256(path),
        status=UNAVAILABLE if path.suffix == ".onnx" else NOT_RUN,
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


class _Recorded(Record):
    """What a baseline needs of an entry."""

    miou: Share | None
    ap: Share | None = None


class _RecordedBench(Record):
    artifacts: list[_Recorded]


def _recorded(path: Path) -> Baseline | None:
    """The accuracy of the first entry that has one."""
    advice = f"Write a baseline with: fp4deploy bench --engine unet-fp16.onnx --json {path}"
    for entry in validated(_RecordedBench, read_json(path, advice), f"The baseline {path}", advice).artifacts:
        if entry.miou is not None:
            return Baseline("mIoU", entry.miou)
        if entry.ap is not None:
            return Baseline("AP", entry.ap)
    return None


def gate_drop(results: list[ArtifactEntry], baseline: Baseline, max_drop: float) -> None:
    """Fail when an artefact's accuracy is more than `max_drop` points (hundredths) below the baseline's.

    Raises:
        GateError: one is, or one was run and could not be scored, or none could be measured.
        InputError: an artefact has another metric than the baseline.
    """
    measured = [(result.accuracy, result) for result in results if result.accuracy is not None]
    if not measured:
        raise GateError(f"The gate --max-drop cannot be judged: no artefact gave an {baseline.metric} on this machine.")
    unscored = next((result for result in results if result.accuracy is None and result.status == OK), None)
    if unscored is not None:
        raise GateError(
            f"{Path(unscored.path).name} has no {baseline.metric}: the data holds nothing that can be scored, or its "
            "outputs are NaN, so the gate --max-drop cannot be judged."
        )
    other = next((result for _, result in measured if result.metric != baseline.metric), None)
    if other is not None:
        raise InputError(
            f"{Path(other.path).name} has an {other.metric} and the baseline an {baseline.metric}: they are models of "
            "different tasks. Give a baseline of the same task."
        )
    accuracy, worst = min(measured, key=lambda pair: pair[0])
    drop = 100 * (baseline.value - accuracy)
    if drop > max_drop:
        raise GateError(
            f"{Path(worst.path).name} has {100 * accuracy:.2f} {worst.metric}, {drop:.2f} points below the baseline's "
            f"{100 * baseline.value:.2f}; --max-drop allows {max_drop:g}. Train NVFP4 longer, or keep more layers in "
            "FP16."
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
