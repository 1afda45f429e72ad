"""Average precision of instance masks and of boxes, by pycocotools or, where it is installed, by faster-coco-eval.

For each overlap threshold t, detections are taken in the order of their score and each is matched with the best still
unmatched object of its class whose IoU is at least t. Precision over recall, made monotone and read at 101 recalls,
gives the AP of one class at t; AP is the mean over t = 0.50, 0.55, ..., 0.95 and over the classes, AP50 and AP75 are
those at one t. A detection that lies in a crowd counts neither way. Sizes are small (below 32 x 32 pixels), medium
(below 96 x 96) and large.

`COCOeval.summarize` knows only 1, 10 and 100 detections an image, and prints -1 for AP where another limit is set. An
image of nuclei has several hundred, so the numbers are taken from `COCOeval.eval` here, and the limit is a parameter.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from fp4deploy.data.coco.regions import pixel_count
from fp4deploy.errors import InputError
from fp4deploy.instances.matches import Matches, matches_of
from fp4deploy.requirements import FASTER_COCO_EVAL
from fp4deploy.system.schema import finite_or_none

Kind = Literal["segm", "bbox"]
Evaluator = Literal["pycocotools", "faster-coco-eval"]
SIZES = ("all", "small", "medium", "large")


@dataclass(frozen=True)
class InstanceScores:
    """Average precision and recall, 0 to 1; NaN (None per class) where there is no object to find.

    ap: over ten overlaps; ap50, ap75: at one. ap_small, ap_medium, ap_large: by the object's size in pixels.
    recall: mean over the overlaps, with at most `max_detections` an image. detections: how many were scored.
    matches: the same image by image, for intervals.
    """

    ap: float
    ap50: float
    ap75: float
    ap_small: float
    ap_medium: float
    ap_large: float
    recall: float
    max_detections: int
    detections: int
    per_class: dict[str, float | None] = field(default_factory=dict)
    matches: Matches | None = field(default=None, repr=False, compare=False)

    @property
    def score(self) -> float:
        """The number that selects the best checkpoint: the larger, the better."""
        return self.ap

    def line(self) -> dict[str, Any]:
        """For metrics.jsonl."""
        return {"ap": self.ap, "ap50": self.ap50, "ap75": self.ap75, "per_class": self.per_class}

    def text(self) -> str:
        """For a person."""
        return f"AP {100 * self.ap:.2f} %  AP50 {100 * self.ap50:.2f} %"

    def to_json(self) -> dict[str, object]:
        """For `bench --json`; NaN becomes None."""
        names = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large", "recall")
        finite = {name: finite_or_none(getattr(self, name)) for name in names}
        return {**finite, "max_detections": self.max_detections, "detections": self.detections}


def average_precision(
    ground_truth: dict[str, Any],
    results: Sequence[dict[str, Any]],
    max_detections: int = 100,
    kind: Kind = "segm",
    evaluator: Evaluator | None = None,
    matches: bool = True,
) -> InstanceScores:
    """Score results against a ground truth.

    Args:
        ground_truth: content of a COCO file, segmentations as RLE (`CocoDataset.ground_truth`).
        results: COCO results (`results.as_results`).
        max_detections: most detections of an image and class that count.
        kind: overlaps of "segm", masks, or of "bbox", boxes [x, y, width, height].
        evaluator: "pycocotools", or "faster-coco-eval", which gives the same numbers sooner and no matches; None for
            it where it is installed and no matches are asked for.
        matches: keep which detection found which object, and score small, medium and large ones apart; without, those
            are None and NaN, which a validation of a training does not wait for.

    Raises:
        InputError: a result names an image or category that the ground truth does not have.
        UnavailableError: the evaluator that was asked for is not installed.
    """
    sizes = len(SIZES) if matches else 1
    evaluation = _evaluated(_evaluator(evaluator, matches), ground_truth, results, max_detections, kind, sizes)
    precision: NDArray[np.float64] = evaluation.eval["precision"][..., 0]  # [T, R, K, A]
    recall: NDArray[np.float64] = evaluation.eval["recall"][..., 0]  # [T, K, A]
    overlaps = np.asarray(evaluation.params.iouThrs)
    names = {category["id"]: category["name"] for category in ground_truth["categories"]}
    per_class = {
        names[category]: finite_or_none(_mean(precision[:, :, place, 0]))
        for place, category in enumerate(evaluation.params.catIds)
    }
    by_size = [_mean(precision[..., size]) if size < sizes else float("nan") for size in range(len(SIZES))]
    return InstanceScores(
        ap=by_size[0],
        ap50=_mean(precision[np.isclose(overlaps, 0.5), ..., 0]),
        ap75=_mean(precision[np.isclose(overlaps, 0.75), ..., 0]),
        ap_small=by_size[1],
        ap_medium=by_size[2],
        ap_large=by_size[3],
        recall=_mean(recall[..., 0]),
        max_detections=max_detections,
        detections=len(results),
        per_class=per_class,
        matches=matches_of(evaluation, ground_truth) if matches and evaluator != "faster-coco-eval" else None,
    )


def box_ap50(ground_truth: dict[str, object], results: Sequence[dict[str, object]], max_detections: int = 100) -> float:
    """The `ap50` that `average_precision` gives for boxes of all sizes, without the other overlaps and sizes.

    Raises:
        InputError: a result names an image or category that the ground truth does not have.
    """
    evaluator = _evaluator(None, matches=False)
    evaluation = _evaluated(evaluator, ground_truth, results, max_detections, "bbox", sizes=1, only=0.5)
    return _mean(evaluation.eval["precision"])


def _evaluated(
    evaluator: Any,
    ground_truth: dict[str, Any],
    results: Sequence[dict[str, Any]],
    max_detections: int,
    kind: Kind,
    sizes: int,
    only: float | None = None,
) -> Any:
    """COCOeval after its evaluation of the first of `SIZES`, at all overlaps or at one."""
    _check_known(ground_truth, results)
    with contextlib.redirect_stdout(io.StringIO()):
        evaluation = evaluator(
            _indexed(ground_truth), _indexed({**ground_truth, "annotations": _detected(results, kind)}), kind
        )
        evaluation.params.maxDets = [max_detections]
        evaluation.params.areaRng = evaluation.params.areaRng[:sizes]
        evaluation.params.areaRngLbl = evaluation.params.areaRngLbl[:sizes]
        if only is not None:
            evaluation.params.iouThrs = np.array([only])
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation


def _mean(values: NDArray[np.float64]) -> float:
    """Mean of what exists; pycocotools writes -1 for a class without objects."""
    found = values[values > -1]
    return float(found.mean()) if found.size else float("nan")


def _indexed(content: dict[str, Any]) -> COCO:
    """A COCO object of a dictionary; the annotations are copied, as pycocotools writes into them.

    They are numbered from 1, as the number 0 of an object or of a detection is taken for "not matched".
    """
    coco = COCO()
    annotations = [{**annotation, "id": number} for number, annotation in enumerate(content["annotations"], start=1)]
    coco.dataset = {**content, "annotations": annotations}
    coco.createIndex()
    return coco


def _detected(results: Sequence[dict[str, object]], kind: Kind) -> list[dict[str, object]]:
    """Results as annotations; what COCO.loadRes does, which fails on an empty list."""
    return [{**result, "area": _area(result, kind), "iscrowd": 0} for result in results]


def _area(result: dict[str, Any], kind: Kind) -> float:
    return pixel_count(result["segmentation"]) if kind == "segm" else result["bbox"][2] * result["bbox"][3]


def _evaluator(name: Evaluator | None, matches: bool) -> object:
    """The class that evaluates, with the interface of pycocotools' COCOeval."""
    if name == "pycocotools" or (name is None and (matches or FASTER_COCO_EVAL.why_missing() is not None)):
        return COCOeval
    return FASTER_COCO_EVAL.require("faster-coco-eval").COCOeval_faster


def _check_known(ground_truth: dict[str, Any], results: Sequence[dict[str, Any]]) -> None:
    for key, what in (("image_id", "images"), ("category_id", "categories")):
        known = {record["id"] for record in ground_truth[what]}
        unknown = sorted({result[key] for result in results} - known)
        if unknown:
            raise InputError(
                f"The results name the {key} {unknown[0]}, which the annotations do not have (and {len(unknown) - 1} "
                "more). They belong to another dataset or split."
            )
