"""The decision: an artefact passes where its drop is shown to be at most what is allowed.

| interval of the drop | decision |
|---|---|
| upper bound <= max drop | passes |
| lower bound > max drop | fails: the drop is larger |
| between | fails: the split is too small to show it (more images, or a larger --max-drop) |

A gate that passed whatever it cannot disprove would pass every artefact on a small split.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fp4deploy.bench.artifact import OK
from fp4deploy.bench.evidence import PixelCounts, read_evidence
from fp4deploy.bench.gate.baseline import Baseline
from fp4deploy.bench.gate.bootstrap import FEW_IMAGES, LEVEL, Interval, paired_drop
from fp4deploy.bench.records import ArtifactEntry
from fp4deploy.errors import GateError, InputError, counted
from fp4deploy.system.schema import finite_or_none

MAX_LISTED = 5
ROUNDING = 1e-9  # points; 100 * (0.75 - 0.745) is more than 0.5


@dataclass(frozen=True)
class Decision:
    """One artefact against the baseline; drops in [0, 1].

    classes: interval of each class that lost, the largest drop first; images: (name, drop) likewise, see
    `bootstrap.paired_drop`; at most `MAX_LISTED` of each.
    """

    artefact: str
    metric: str
    value: float
    baseline: float
    drop: Interval
    max_drop: float
    split_images: int
    classes: tuple[tuple[str, Interval], ...]
    images: tuple[tuple[str, float], ...]

    @property
    def passed(self) -> bool:
        """The whole interval lies within what is allowed."""
        return 100 * self.drop.high <= self.max_drop + ROUNDING

    def text(self) -> str:
        """One sentence with the interval, in points."""
        images = counted(self.split_images, "image")
        few = f" (only {images}: the interval itself is uncertain)"
        return (
            f"{Path(self.artefact).name}: {self.metric} {100 * self.value:.2f} %, drop {_points(self.drop)} points "
            f"from {100 * self.baseline:.2f} %, {100 * LEVEL:.0f} % interval over {images}"
            f"{few if self.split_images < FEW_IMAGES else ''}."
        )

    def losses(self) -> list[str]:
        """What lost most, a line for classes and a line for images."""
        name = Path(self.artefact).name
        classes = ", ".join(f"{each} {_points(drop)}" for each, drop in self.classes)
        unit = "objects" if self.metric == "AP" else f"points of {self.metric}"
        factor = 1 if self.metric == "AP" else 100
        images = ", ".join(f"{each} {factor * drop:.2f}" for each, drop in self.images)
        lines = [f"{name}: classes that lost most: {classes}."] if classes else []
        return [*lines, f"{name}: images that lost most ({unit}): {images}."] if images else lines

    def to_json(self) -> dict[str, object]:
        """For `bench --json`; bounds that are unknown are None."""

        def interval(drop: Interval) -> dict[str, float | None]:
            found = {"drop": drop.drop, "low": drop.low, "high": drop.high}
            return {key: finite_or_none(number) for key, number in found.items()}

        return {
            "artefact": self.artefact,
            "metric": self.metric,
            "value": self.value,
            "baseline": self.baseline,
            **interval(self.drop),
            "level": LEVEL,
            "images": self.split_images,
            "max_drop": self.max_drop / 100,
            "passed": self.passed,
            "classes": {name: interval(drop) for name, drop in self.classes},
            "worst_images": dict(self.images),
        }


def decide(entry: ArtifactEntry, baseline: Baseline, max_drop: float) -> Decision:
    """Compare one measured artefact; `max_drop` in points (hundredths).

    Raises:
        InputError: it was measured on other images than the baseline, or in another task.
    """
    name = Path(entry.path).name
    if entry.metric != baseline.metric:
        raise InputError(
            f"{name} has an {entry.metric} and the baseline an {baseline.metric}: they are models of different tasks. "
            "Give a baseline of the same task."
        )
    assert entry.accuracy is not None
    assert entry.evidence is not None
    if entry.split != baseline.split or entry.data_sha256 != baseline.data_sha256:
        raise InputError(
            f"{name} and the baseline {Path(baseline.artefact).name} were measured on different images, labels or "
            f"classes (SHA-256 {str(entry.data_sha256)[:12]} and {baseline.data_sha256[:12]}). "
            "Measure the baseline again."
        )
    counts = read_evidence(entry.evidence, entry.path)
    if counts.classes != baseline.counts.classes or len(counts.images) != len(baseline.counts.images):
        raise InputError(f"{name} and the baseline have other classes or images. Measure the baseline again.")
    found = paired_drop(baseline.counts, counts)
    classes = sorted(found.classes.items(), key=lambda pair: -pair[1].drop)
    order = np.argsort(-found.images, kind="stable")[:MAX_LISTED]
    return Decision(
        entry.path,
        entry.metric,
        entry.accuracy,
        baseline.value,
        found.metric,
        max_drop,
        len(counts.images),
        tuple((each, drop) for each, drop in classes[:MAX_LISTED] if drop.drop > 0),
        tuple((counts.images[place], float(found.images[place])) for place in order if found.images[place] > 0),
    )


def gate_drop(results: Sequence[ArtifactEntry], baseline: Baseline, max_drop: float) -> list[Decision]:
    """Decide on every artefact that was measured; rows of engines that did not run are passed over.

    Raises:
        GateError: none was measured, or one was run and could not be scored.
        InputError: as `decide`.
    """
    if all(result.accuracy is None for result in results):
        raise GateError(f"The gate --max-drop cannot be judged: no artefact gave an {baseline.metric} on this machine.")
    if f"{100 * baseline.value:.2f}" == "0.00":
        raise GateError(
            f"The gate --max-drop cannot be judged: the baseline {Path(baseline.artefact).name} has 0.00 % "
            f"{baseline.metric}, and nothing to lose. Give a trained baseline, and the data that it was trained on."
        )
    unscored = next((result for result in results if result.accuracy is None and result.status == OK), None)
    if unscored is not None:
        raise GateError(
            f"{Path(unscored.path).name} has no {baseline.metric}: the data holds nothing that can be scored, or its "
            "outputs are NaN, so the gate --max-drop cannot be judged."
        )
    return [decide(result, baseline, max_drop) for result in results if result.accuracy is not None]


def doubt(baseline: Baseline) -> str | None:
    """Why a gate on this baseline proves little, in a sentence; None where the baseline has something to lose."""
    if not isinstance(baseline.counts, PixelCounts):
        return None
    name, constant = baseline.counts.constant()
    if baseline.value > constant + ROUNDING:
        return None
    return (
        f"The baseline {Path(baseline.artefact).name} has {100 * baseline.value:.2f} % {baseline.metric}, no more than "
        f"calling every pixel {name} ({100 * constant:.2f} %): staying near it proves nothing. Give a trained "
        "baseline, and the data that it was trained on."
    )


def fastest(found: Sequence[ArtifactEntry], max_drop: float) -> ArtifactEntry | None:
    """The artefact with the smallest median latency among those that ran and are accurate enough.

    Args:
        max_drop: points of mIoU or AP below the most accurate artefact of the FP16 model, or where there is none below
            the most accurate of all.
    """
    ran = [entry for entry in found if entry.status == OK and entry.latency_ms is not None]
    full = [entry.accuracy for entry in ran if entry.model == "fp16"] or [entry.accuracy for entry in ran]
    best = max((value for value in full if value is not None), default=0.0)
    enough = [entry for entry in ran if 100 * (best - (entry.accuracy or 0.0)) <= max_drop + ROUNDING]
    return min(enough, key=lambda entry: entry.latency_ms.p50 if entry.latency_ms else math.inf, default=None)


def require_passed(decisions: Sequence[Decision]) -> None:
    """Fail where a decision did not pass.

    Raises:
        GateError: naming the artefact with the largest drop, its interval and what was allowed.
    """
    failed = [each for each in decisions if not each.passed]
    if not failed:
        return
    worst = max(failed, key=lambda each: each.drop.drop)
    name, allowed = Path(worst.artefact).name, worst.max_drop
    if not 100 * worst.drop.low > allowed:
        cause = f"so a drop of at most {allowed:g} is not shown. Measure on more images, or allow more with: --max-drop"
    else:
        cause = f"and --max-drop allows {allowed:g}. Train NVFP4 longer, or keep more layers in FP16."
    raise GateError(
        f"{name} has {100 * worst.value:.2f} % {worst.metric}, {100 * worst.drop.drop:.2f} points below the "
        f"baseline's {100 * worst.baseline:.2f} %; the {100 * LEVEL:.0f} % interval of the drop over "
        f"{counted(worst.split_images, 'image')} is {100 * worst.drop.low:.2f} to {100 * worst.drop.high:.2f}, {cause}"
    )


def _points(drop: Interval) -> str:
    return f"{100 * drop.drop:.2f} ({100 * drop.low:.2f} to {100 * drop.high:.2f})"
