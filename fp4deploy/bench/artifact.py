"""One artefact's line in `report.json`: what it is, how large, how accurate, how fast, or why it was not run."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fp4deploy.bench.evaluate import Progress, evaluate
from fp4deploy.bench.latency import Latency, measure
from fp4deploy.bench.ledgers import built_by, ledger_beside
from fp4deploy.bench.runtimes import open_runtime
from fp4deploy.errors import GateError, InputError, UnavailableError
from fp4deploy.export.ledger import sha256

OK = "ok"
NOT_RUN = "built, not run"


@dataclass(frozen=True)
class ArtifactResult:
    """A measured artefact; `miou` in [0, 1] and `latency` are None where it could not be run, and `reason` says why.

    memory: bytes of weights and images, of runtimes that know them (`runtime_packed.memory`).
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

    def to_json(self) -> dict[str, Any]:
        """The entry of `artifacts` in report.json."""
        timed = self.latency
        return {
            "path": str(self.path),
            "model": self.model,
            "backend": self.backend,
            "precision": self.precision,
            "size_bytes": self.size_bytes,
            "sha256": self.sha256,
            "miou": self.miou,
            "pixel_accuracy": self.pixel_accuracy,
            "per_class": self.per_class,
            "latency_ms": {"p50": timed.p50, "p90": timed.p90, "p99": timed.p99} if timed else None,
            "images_per_s": timed.images_per_s if timed else None,
            "batch": timed.batch if timed else None,
            "timed_runs": timed.runs if timed else None,
            "device": timed.device if timed else None,
            "memory": self.memory,
            "status": self.status,
            "reason": self.reason,
        }


def bench_artifact(
    path: Path,
    data: Path | None,
    *,
    model: str | None = None,
    batch: int = 1,
    iterations: int = 50,
    progress: Progress | None = None,
) -> ArtifactResult:
    """Measure one artefact: accuracy on the validation split of `data` (left out when None), and latency.

    Raises:
        InputError: the file is not an artefact, or the data does not fit it.
        UnavailableError: this machine cannot run it.
    """
    path = Path(path)
    runtime = open_runtime(path)
    scores = evaluate(runtime, data, progress=progress) if data is not None else None
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
        per_class=dict(scores.per_class) if scores else {},
        latency=latency,
        memory=getattr(runtime, "memory", None),
    )


def bench_or_explain(
    path: Path, data: Path | None, *, model: str | None = None, batch: int = 1, iterations: int = 50
) -> ArtifactResult:
    """Like `bench_artifact`, but an engine that cannot run here becomes a row saying so, without numbers."""
    try:
        return bench_artifact(path, data, model=model, batch=batch, iterations=iterations)
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


def baseline_miou(path: Path, data: Path | None) -> float:
    """mIoU to compare with: measured when `path` is an artefact, read when it is what `bench --json` wrote.

    Raises:
        InputError: the JSON holds no mIoU, or the artefact cannot be read.
        UnavailableError: the artefact cannot run here.
    """
    recorded = path.suffix == ".json"
    miou = _recorded_miou(path) if recorded else bench_artifact(path, data, iterations=1).miou
    if miou is None:
        raise InputError(f"The baseline {path} has no mIoU. Give a checkpoint, an .onnx, or the file of bench --json.")
    return miou


def _recorded_miou(path: Path) -> float | None:
    try:
        entries = json.loads(path.read_text())["artifacts"]
        return next((entry["miou"] for entry in entries if entry["miou"] is not None), None)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"The baseline {path} is not a file of bench --json ({error}). Write one with: "
            f"fp4deploy bench --engine unet-fp16.onnx --json {path}"
        ) from error


def gate_drop(results: list[ArtifactResult], baseline: float, max_drop: float) -> None:
    """Fail when an artefact's mIoU is more than `max_drop` points (hundredths) below `baseline`.

    Raises:
        GateError: one is, or none could be measured.
    """
    measured = [result for result in results if result.miou is not None]
    if not measured:
        raise GateError("The gate --max-drop cannot be judged: no artefact gave an mIoU on this machine.")
    worst = min(measured, key=lambda result: result.miou or 0.0)
    drop = 100 * (baseline - (worst.miou or 0.0))
    if drop > max_drop:
        raise GateError(
            f"{worst.path.name} has {100 * (worst.miou or 0.0):.2f} mIoU, {drop:.2f} points below the baseline's "
            f"{100 * baseline:.2f}; --max-drop allows {max_drop:g}. Train NVFP4 longer, or keep more layers in FP16."
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
