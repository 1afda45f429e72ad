"""What an artefact is compared with: another artefact, measured now, or one entry of a file of `bench --json`.

A number from another split, other images or another file is not a baseline. So a recorded entry counts only where

- its split and the digest of its images and labels are those measured now,
- the counts of its images are in the file and give the accuracy it states,
- the artefact it names, where that file is still there, has the recorded SHA-256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from fp4deploy.bench.artifact import bench_artifact
from fp4deploy.bench.evidence import read_evidence
from fp4deploy.bench.gate.bootstrap import Counts, value
from fp4deploy.bench.records import Evidence, Record
from fp4deploy.bench.runtimes.like import Like
from fp4deploy.data import VAL
from fp4deploy.errors import InputError, suggest
from fp4deploy.system.files import file_digest
from fp4deploy.system.schema import Share, read_json, validated

MAX_BYTES = 256 << 20
METRICS = {"pixels": "mIoU", "voxels": "Dice", "labels": "top-1", "matches": "AP"}  # kind of counts -> what they give
AGREE = 1e-6  # accuracy stated and computed of the counts


@dataclass(frozen=True, eq=False)
class Baseline:
    """What others are compared with: "mIoU", "Dice" or "AP", its value in [0, 1], and what it was measured on."""

    artefact: str
    metric: str
    value: float
    split: str
    data_sha256: str
    counts: Counts


class RecordedEntry(Record):
    """What a baseline needs of an entry of `artifacts`."""

    path: str = ""
    sha256: str | None = None
    miou: Share | None = None
    dice: Share | None = None
    ap: Share | None = None
    top1: Share | None = None
    split: str | None = None
    data_sha256: str | None = None

    @property
    def metric(self) -> tuple[str, float | None]:
        """Name and value of the accuracy; of volumes, which have mIoU too, Dice."""
        found = (("Dice", self.dice), ("mIoU", self.miou), ("top-1", self.top1), ("AP", self.ap))
        return next((pair for pair in found if pair[1] is not None), found[-1])


class RecordedBench(Record):
    """What a baseline needs of a file of `bench --json`; `evidence` has an entry for each of `artifacts`."""

    artifacts: Annotated[list[RecordedEntry], Field(max_length=1000)]
    evidence: Annotated[list[Evidence | None], Field(max_length=1000)] | None = None


def find_baseline(
    path: Path,
    data: Path | None,
    max_detections: int | None = None,
    split: str = VAL,
    timeout: float | None = None,
    artefact: str | None = None,
    limit: int | None = None,
    like: Like | None = None,
) -> Baseline:
    """Measure an artefact, or read an entry of what `bench --json` wrote.

    artefact: which entry of a file with several, by the name of its file.
    like: as of `bench_artifact`.
    limit: measure on so many images of the split; a recorded entry has to be of the same ones.

    Raises:
        InputError: the artefact cannot be read or scored; the JSON has no such entry, has several and none is named,
            is of another split, lacks what it was measured on, or contradicts itself.
        UnavailableError: the artefact cannot run here.
    """
    if path.suffix == ".json":
        return _recorded(path, split, artefact)
    if artefact is not None:
        raise InputError(f"--baseline-artefact chooses an entry of a file of bench --json, and {path} is none.")
    entry = bench_artifact(
        path, data, iterations=1, max_detections=max_detections, split=split, timeout=timeout, limit=limit, like=like
    )
    if entry.accuracy is None or entry.evidence is None or entry.data_sha256 is None:
        raise InputError(
            f"The baseline {path} has no accuracy. Give a checkpoint, an .onnx, or the file of bench --json."
        )
    counts = read_evidence(entry.evidence, path)
    return Baseline(str(path), entry.metric, entry.accuracy, split, entry.data_sha256, counts)


def _recorded(path: Path, split: str, artefact: str | None) -> Baseline:
    advice = f"Write a baseline with: fp4deploy bench --engine fp16.onnx --split {split} --json {path}"
    source = f"The baseline {path}"
    document = validated(RecordedBench, read_json(path, advice, MAX_BYTES), source, advice)
    place = _chosen(document.artifacts, source, artefact, advice)
    entry = document.artifacts[place]
    evidence = (document.evidence or [])[place] if place < len(document.evidence or []) else None
    if entry.split is None or entry.data_sha256 is None or evidence is None:
        raise InputError(
            f"{source} does not say on which images {entry.path or 'its artefact'} was measured (split, data_sha256, "
            f"evidence). {advice}"
        )
    if entry.split != split:
        raise InputError(
            f"{source} was measured on the split {entry.split}, and this is a measurement on {split}. {advice}"
        )
    if entry.sha256 is not None and _digest(entry.path) not in (None, entry.sha256):
        raise InputError(f"{source}: {entry.path} is no longer the file that was measured. {advice}")
    counts = read_evidence(evidence, source)
    metric, stated = entry.metric
    if metric != METRICS[evidence.kind]:
        raise InputError(f"{source} states an {metric} and holds counts of the other task. {advice}")
    computed = value(counts)
    if stated is None or not math.isclose(computed, stated, abs_tol=AGREE):
        raise InputError(
            f"{source} states {metric} {stated}, and the counts of its images give {computed:.6f}. {advice}"
        )
    return Baseline(entry.path, metric, stated, entry.split, entry.data_sha256, counts)


def _digest(path: str) -> str | None:
    """None where the file is no longer there."""
    try:
        return file_digest(Path(path))
    except InputError:
        return None


def _chosen(entries: Sequence[RecordedEntry], source: str, artefact: str | None, advice: str) -> int:
    """Place of the entry that is meant."""
    scored = [place for place, entry in enumerate(entries) if entry.metric[1] is not None]
    if not scored:
        raise InputError(f"{source} holds no accuracy. {advice}")
    names = [Path(entries[place].path).name for place in scored]
    if artefact is not None:
        named = [place for place, name in zip(scored, names, strict=True) if artefact in (name, entries[place].path)]
        if len(named) == 1:
            return named[0]
        what = "several entries" if named else "no entry"
        raise InputError(f"{source} has {what} {artefact}.{suggest(artefact, names)} It has: {', '.join(names)}.")
    if len(scored) > 1:
        raise InputError(
            f"{source} holds {len(scored)} artefacts: {', '.join(names)}. Choose one with: --baseline-artefact NAME"
        )
    return scored[0]
