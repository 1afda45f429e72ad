"""One artefact's line in `report.json`: what it is, how large, how accurate, how fast, or why it was not run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp4deploy.bench.change import compare
from fp4deploy.bench.evaluate import Progress, evaluate_task
from fp4deploy.bench.latency import measure, random_images
from fp4deploy.bench.ledgers import built_by, ledger_of
from fp4deploy.bench.records import ArtifactEntry, Quantiles
from fp4deploy.bench.runtimes.emulated import open_emulated, source_of
from fp4deploy.bench.runtimes.like import Like
from fp4deploy.bench.runtimes.open import open_for_images
from fp4deploy.bench.runtimes.ports import fixed_batch
from fp4deploy.bench.runtimes.precision import of_engine
from fp4deploy.bench.runtimes.protocol import OpenRuntime
from fp4deploy.data import VAL
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.instances import InstanceScores
from fp4deploy.metrics import LabelScores, Scores, VolumeScores
from fp4deploy.models.spec import UnnamedCodeError
from fp4deploy.system.files import file_digest
from fp4deploy.system.schema import finite_or_none

OK = "ok"
EMULATED = "emulated, not run"  # accuracy of an engine's arithmetic, computed elsewhere; no latency
COMPARED = 32  # images on which it is compared with the canonical file
NOT_RUN = "built, not run"
UNAVAILABLE = "unavailable"
NEEDS_MODEL = "needs --model"  # a checkpoint of a network in the user's own code, which no file makes run


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
    form: str = "eager",
    rest: str | None = None,
    limit: int | None = None,
    like: Like | None = None,
) -> ArtifactEntry:
    """Measure one artefact: accuracy on a split of `data` (left out when None), and latency.

    max_detections, results: of models that find objects, as of `evaluate_task`.
    limit: measure accuracy on so many images of the split, evenly spaced.
    timeout, provider: of an ONNX file, form, rest: of a checkpoint, as of `open_runtime`.
    like: the card of an ONNX file that has none.
    batch: images of a timed run; 1 is what the file takes at least, where it takes one number alone.

    An engine that cannot run here is measured by its arithmetic (`runtimes.emulated`), without a latency.

    The bytes of weights and activations are in the entry where the runtime knows them (`runtimes.packed.memory`).

    Raises:
        InputError: the file is not an artefact, the data does not fit it, or it answers NaN or Inf.
        UnavailableError: this machine cannot run it.
    """
    path = Path(path)
    try:
        runtime: OpenRuntime = open_for_images(path, timeout, provider, form, like, rest)
        reason = None
    except UnavailableError as error:
        runtime, reason = _emulated(path, data, split, timeout, error)
    found = None
    if data is not None:
        found = evaluate_task(
            runtime,
            data,
            progress=progress,
            max_detections=max_detections,
            results=results,
            split=split,
            limit=limit,
        )
    scores = found.scores if found and isinstance(found.scores, Scores) else None
    volumes = scores if isinstance(scores, VolumeScores) else None
    instances = found.scores if found and isinstance(found.scores, InstanceScores) else None
    labels = found.scores if found and isinstance(found.scores, LabelScores) else None
    timed = None
    if reason is None:
        one = fixed_batch(runtime.inputs) if batch == 1 else None
        if data is None:  # nothing else looks at what it answers
            runtime.infer(random_images(runtime, one or 1))
        timed = measure(runtime, batch=one or batch, iterations=iterations)
    return ArtifactEntry(
        path=str(path),
        model=model or runtime.card.precision,
        backend=runtime.name,
        precision=runtime.precision,
        size_bytes=size_of(path),
        sha256=file_digest(path),
        miou=finite_or_none(scores.miou) if scores else None,
        ap=finite_or_none(instances.ap) if instances else None,
        ap50=finite_or_none(instances.ap50) if instances else None,
        top1=finite_or_none(labels.top1) if labels else None,
        instances=instances.to_json() if instances else None,
        pixel_accuracy=finite_or_none(scores.pixel_accuracy) if scores else None,
        dice=volumes.mean_dice if volumes else None,
        dice_per_class=dict(volumes.dice) if volumes else {},
        hd95_mm=volumes.mean_hd95 if volumes else None,
        hd95_mm_per_class=dict(volumes.hd95) if volumes else {},
        per_class=dict(found.scores.per_class) if found else {},
        boundary_f1=found.boundary_f1 if found else None,
        recall_by_size=found.recall_by_size if found else {},
        never_predicted=found.never_predicted if found else [],
        errors=found.errors if found else {},
        confusion=found.confusion if found else {},
        split=split if found else None,
        data_sha256=found.data_sha256 if found else None,
        evidence=found.evidence if found else None,
        latency_ms=Quantiles(p50=timed.p50, p90=timed.p90, p99=timed.p99) if timed else None,
        images_per_s=timed.images_per_s if timed else None,
        batch=timed.batch if timed else None,
        timed_runs=timed.runs if timed else None,
        device=runtime.device,
        memory=getattr(runtime, "memory", None),
        status=OK if timed else EMULATED,
        reason=reason,
    )


def _emulated(
    path: Path, data: Path | None, split: str, timeout: float | None, error: UnavailableError
) -> tuple[OpenRuntime, str]:
    """The arithmetic of an engine, and why and with what difference; `error`: why it cannot run here."""
    ledger = ledger_of(path) if path.suffix == ".plan" else None
    if ledger is None or data is None:
        raise error
    try:
        source = source_of(path, ledger)
        runtime = open_emulated(source, ledger, timeout)
    except (UnavailableError, InputError) as why:
        raise UnavailableError(f"{str(error).rstrip('.')}; {why}") from error
    runtime.name = f"{built_by(ledger)}; its arithmetic emulated by {runtime.name}"
    change = compare(open_for_images(source, timeout), runtime, data, COMPARED, split=split)
    return runtime, f"{error} Its accuracy is that of its arithmetic, emulated: {change.sentence(source.name)}"


def size_of(path: Path) -> int:
    """Bytes of an artefact, with the files beside it in which an ONNX file keeps its tensors."""
    size = path.stat().st_size
    if path.suffix != ".onnx":
        return size
    import onnx

    try:
        tensors = onnx.load(path, load_external_data=False).graph.initializer
    except Exception:  # whoever opens it says what is wrong
        return size
    names = {entry.value for each in tensors for entry in each.external_data if entry.key == "location"}
    beside = {path.parent / Path(name).name for name in names}
    return size + sum(each.stat().st_size for each in beside if each.is_file())


def bench_or_explain(path: Path, data: Path | None, *, model: str | None = None, **settings: Any) -> ArtifactEntry:
    """Like `bench_artifact`, but what cannot run here, or needs --model, becomes a row saying so, without numbers."""
    try:
        return bench_artifact(path, data, model=model, **settings)
    except (UnavailableError, UnnamedCodeError) as error:
        how = settings.get("form", "eager") if path.suffix == ".safetensors" else settings.get("provider", "cpu")
        row = not_run(path, str(error), model=model, provider=how)
        return row.model_copy(update={"status": NEEDS_MODEL}) if isinstance(error, UnnamedCodeError) else row


def not_run(path: Path, reason: str, *, model: str | None = None, provider: str = "cpu") -> ArtifactEntry:
    """The row of an artefact that cannot run on this machine; provider: of ONNX Runtime, or the form of torch."""
    ledger = ledger_of(path) if path.suffix == ".plan" else None
    precision = ledger.precision if ledger else "unknown"
    runtimes = {".onnx": f"ONNX Runtime ({provider})", ".safetensors": f"torch ({provider})"}
    return ArtifactEntry(
        path=str(path),
        model=model or precision,
        backend=built_by(ledger) if ledger else runtimes.get(path.suffix, "unknown builder"),
        precision=of_engine(ledger, precision),
        size_bytes=size_of(path),
        sha256=file_digest(path),
        status=UNAVAILABLE if path.suffix in runtimes else NOT_RUN,
        reason=reason,
    )
