"""Why detections are wrong: the kinds of errors of TIDE, and what each costs.

A detection that is matched with no object (IoU below 1/2, its class, in the order of the scores) has one kind, by the
largest IoU with objects of its class and of others:

| kind | IoU | class |
|---|---|---|
| classification | >= 0.5 | of another |
| localisation | 0.1 to 0.5 | its own |
| both | 0.1 to 0.5 | of another |
| duplicate | >= 0.5 | its own, but the object has a detection with a higher score |
| background | below 0.1 of all | |

An object that has neither a detection nor one of the errors classification or localisation is missed. The cost of a
kind is the AP50 that would be gained if its errors alone were corrected: a wrong class or box set right (or the
detection removed where its object is found already), duplicates and background removed, missed objects removed from the
ground truth. Costs do not add up to what is missing, since one error can hide another.

`confusion` counts what each object was detected as, of the detections that are drawn (score of at least
`models.boxes.SHOWN`).

Source: Bolya et al., "TIDE: A General Toolbox for Identifying Object Detection Errors", 2020.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.detection.decode import iou
from fp4deploy.instances.results import Result
from fp4deploy.instances.scores import box_ap50
from fp4deploy.models.boxes import SHOWN

FOREGROUND, BACKGROUND = 0.5, 0.1  # IoU
KINDS = ("classification", "localisation", "both", "duplicate", "background", "missed")
Annotation = dict[str, Any]
Errors = dict[str, dict[str, float]]  # kind -> its "count" and the "ap50" that it costs
Confusion = dict[str, dict[str, int]]  # class of an object -> class it was detected as -> how often
NOTHING = "nothing"  # in a confusion: an object without a detection, and a detection without an object


@dataclass
class _Judged:
    """Kind of each wrong detection by its place, the object that it meant, and which objects were found and missed."""

    kinds: dict[int, str] = field(default_factory=dict)
    meant: dict[int, Annotation] = field(default_factory=dict)
    found: set[int] = field(default_factory=set)  # ids of objects with a correct detection
    missed: set[int] = field(default_factory=set)


def error_kinds(ground_truth: dict[str, object], results: Sequence[Result], max_detections: int = 100) -> Errors:
    """Number of errors of each kind and the AP50 it costs, in [0, 1]; results have a "bbox".

    Raises:
        InputError: the results name an image or category that the ground truth does not have.
    """
    results = _limited(results, max_detections)
    before = box_ap50(ground_truth, results, max_detections)
    judged = _judge(ground_truth, results)
    counts = Counter(judged.kinds.values())
    counts["missed"] = len(judged.missed)
    found: Errors = {}
    for kind in KINDS:
        gain = 0.0
        if counts[kind]:
            truth, corrected = _corrected(ground_truth, results, judged, kind)
            gain = box_ap50(truth, corrected, max_detections) - before
        found[kind] = {"count": counts[kind], "ap50": max(0.0, gain) if np.isfinite(gain) else 0.0}
    return found


def confusion(ground_truth: dict[str, Any], results: Sequence[Result], max_detections: int = 100) -> Confusion:
    """What objects were detected as: every detection that is drawn counts once, every missed object once.

    A detection of another class that covers an object counts for that object's class, also where another detection is
    right; one at the wrong place, or a second one of the right class, has no object.
    """
    shown = [result for result in _limited(results, max_detections) if result["score"] >= SHOWN]
    judged = _judge(ground_truth, shown)
    names = {category["id"]: category["name"] for category in ground_truth["categories"]}
    pairs: Counter[tuple[str, str]] = Counter()
    covered = set(judged.found)
    for place, kind in judged.kinds.items():
        truth = NOTHING
        if kind == "classification":
            meant = judged.meant[place]
            covered.add(meant["id"])
            truth = names[meant["category_id"]]
        pairs[truth, names[shown[place]["category_id"]]] += 1
    for each in ground_truth["annotations"]:
        if each["id"] in judged.found:
            pairs[names[each["category_id"]], names[each["category_id"]]] += 1
        elif each["id"] not in covered and not each["iscrowd"]:
            pairs[names[each["category_id"]], NOTHING] += 1
    counts: Confusion = {}
    for (truth, found), count in sorted(pairs.items()):
        counts.setdefault(truth, {})[found] = count
    return counts


def _limited(results: Sequence[Result], most: int) -> list[Result]:
    """The detections that COCO counts: the `most` of an image and class with the highest scores."""
    seen: Counter[tuple[int, int]] = Counter()
    kept = []
    for result in sorted(results, key=lambda each: -each["score"]):
        key = (result["image_id"], result["category_id"])
        seen[key] += 1
        if seen[key] <= most:
            kept.append(result)
    return kept


def _judge(ground_truth: dict[str, Any], results: Sequence[Result]) -> _Judged:
    """Judge results that are in the order of their scores."""
    objects: dict[int, list[Annotation]] = {}
    for annotation in ground_truth["annotations"]:
        objects.setdefault(annotation["image_id"], []).append(annotation)
    places: dict[int, list[int]] = {}
    for place, result in enumerate(results):
        places.setdefault(result["image_id"], []).append(place)
    judged = _Judged()
    for image, present in objects.items():
        _judge_image(judged, present, results, places.pop(image, []))
    for rest in places.values():
        judged.kinds |= dict.fromkeys(rest, "background")
    return judged


def _judge_image(judged: _Judged, present: list[Annotation], results: Sequence[Result], places: list[int]) -> None:
    overlaps = iou(_edges([results[place] for place in places]), _edges(present))
    crowd = np.array([bool(each["iscrowd"]) for each in present])
    category = np.array([each["category_id"] for each in present])
    free = ~crowd
    wrong: list[tuple[int, int]] = []  # (row, place)
    for row, place in enumerate(places):
        own = category == results[place]["category_id"]
        best = _best(overlaps[row], own & free)
        if best is not None and overlaps[row, best] >= FOREGROUND:
            free[best] = False
            judged.found.add(present[best]["id"])
        elif not _in_crowd(results[place], [a for a, is_crowd in zip(present, crowd & own, strict=True) if is_crowd]):
            wrong.append((row, place))
    meant: set[int] = set()
    for row, place in wrong:
        own = category == results[place]["category_id"]
        kind, at = _kind(overlaps[row], own & ~crowd, ~own & ~crowd)
        judged.kinds[place] = kind
        if at is not None:
            judged.meant[place] = present[at]
            if kind in ("classification", "localisation"):
                meant.add(present[at]["id"])
    whole = {each["id"] for each, is_crowd in zip(present, crowd, strict=True) if not is_crowd}
    judged.missed |= whole - judged.found - meant


def _kind(overlaps: NDArray[np.floating], own: NDArray[np.bool_], other: NDArray[np.bool_]) -> tuple[str, int | None]:
    """Kind of a wrong detection, and the object that it meant."""
    same, foreign = _best(overlaps, own), _best(overlaps, other)
    of_same = overlaps[same] if same is not None else 0.0
    of_foreign = overlaps[foreign] if foreign is not None else 0.0
    if of_same >= FOREGROUND:
        return "duplicate", same
    if of_foreign >= FOREGROUND:
        return "classification", foreign
    if of_same >= BACKGROUND:
        return "localisation", same
    return ("both", foreign) if of_foreign >= BACKGROUND else ("background", None)


def _best(overlaps: NDArray[np.floating], allowed: NDArray[np.bool_]) -> int | None:
    return int(np.where(allowed, overlaps, -1.0).argmax()) if allowed.any() else None


def _in_crowd(result: Result, crowds: list[Annotation]) -> bool:
    """COCO's rule: half of the detection lies in a crowd of its class."""
    (edges,) = _edges([result])
    area = max((edges[2] - edges[0]) * (edges[3] - edges[1]), 1e-9)
    for left, top, right, bottom in _edges(crowds):
        across = min(edges[2], right) - max(edges[0], left)
        down = min(edges[3], bottom) - max(edges[1], top)
        if across > 0 and down > 0 and across * down / area >= FOREGROUND:
            return True
    return False


def _edges(records: Sequence[dict[str, object]]) -> NDArray[np.float64]:
    """[K, 4] left, top, right, bottom."""
    boxes = np.array([record["bbox"] for record in records], dtype=np.float64).reshape(-1, 4)
    return np.concatenate((boxes[:, :2], boxes[:, :2] + boxes[:, 2:]), 1)


def _corrected(
    ground_truth: dict[str, Any], results: Sequence[Result], judged: _Judged, kind: str
) -> tuple[dict[str, object], list[Result]]:
    """Ground truth and results with the errors of one kind corrected."""
    if kind == "missed":
        kept = [each for each in ground_truth["annotations"] if each["id"] not in judged.missed]
        return {**ground_truth, "annotations": kept}, list(results)
    corrected: list[Result] = []
    taken = set(judged.found)
    for place, result in enumerate(results):
        if judged.kinds.get(place) != kind:
            corrected.append(result)
            continue
        meant = judged.meant.get(place)
        if kind not in ("classification", "localisation") or meant is None or meant["id"] in taken:
            continue
        taken.add(meant["id"])
        change = {"category_id": meant["category_id"]} if kind == "classification" else {"bbox": meant["bbox"]}
        corrected.append({**result, **change})
    return ground_truth, corrected
