"""AP of boxes by both evaluators, the golden numbers of pycocotools' examples, and the kinds of errors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fp4deploy.data import open_boxes
from fp4deploy.detection.errors import KINDS, NOTHING, confusion, error_kinds
from fp4deploy.instances import average_precision
from fp4deploy.instances.scores import Evaluator, box_ap50
from fp4deploy.models.boxes import SHOWN

EXAMPLES = "FP4DEPLOY_COCO_EXAMPLES"  # folder with instances_val2014_100.json and the two fake results


def evaluators() -> list[Any]:
    faster = pytest.param("faster-coco-eval", marks=pytest.mark.skipif(not _installed(), reason="not installed"))
    return ["pycocotools", faster]


def _installed() -> bool:
    try:
        import faster_coco_eval  # noqa: F401
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("evaluator", evaluators())
@pytest.mark.parametrize(("kind", "ap"), [("bbox", 0.504581), ("segm", 0.319545)])
def test_golden_ap(evaluator: Evaluator, kind: Any, ap: float) -> None:
    folder = Path(os.environ.get(EXAMPLES, ""))
    if not os.environ.get(EXAMPLES):
        pytest.skip(f"{EXAMPLES} names no folder with pycocotools' example annotations and results")
    truth = json.loads((folder / "instances_val2014_100.json").read_text())
    name = "fakebbox100" if kind == "bbox" else "fakesegm100"
    results = json.loads((folder / f"instances_val2014_{name}_results.json").read_text())
    assert average_precision(truth, results, 100, kind, evaluator).ap == pytest.approx(ap, abs=5e-7)


def test_sizes_of_boxes_are_their_areas() -> None:
    """A wrong box of 20 x 100 pixels is of medium size: it costs the small objects nothing."""
    image = {"id": 1, "file_name": "a.png", "height": 200, "width": 200}
    real = {"id": 1, "image_id": 1, "category_id": 1, "iscrowd": 0, "bbox": [5.0, 5.0, 10.0, 10.0], "area": 100.0}
    truth = {"images": [image], "annotations": [real], "categories": [{"id": 1, "name": "a"}]}
    wrong = [[100.0, 80.0, 20.0, 100.0], [80.0, 150.0, 100.0, 20.0]]
    results = [{"image_id": 1, "category_id": 1, "bbox": box, "score": 0.9} for box in wrong]
    results.append({"image_id": 1, "category_id": 1, "bbox": real["bbox"], "score": 0.5})
    found = average_precision(truth, results, kind="bbox")
    assert (found.ap_small, found.ap) == (pytest.approx(1), pytest.approx(1 / 3))
    assert np.isnan(found.ap_medium)


def noisy(truth: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    results = []
    for annotation in truth["annotations"]:
        for _ in range(random.integers(0, 3)):
            x, y, width, height = annotation["bbox"]
            move, grow = random.normal(0, 0.15, 2), np.exp(random.normal(0, 0.2, 2))
            box = [x + move[0] * width, y + move[1] * height, width * grow[0], height * grow[1]]
            category = annotation["category_id"] if random.random() < 0.8 else truth["categories"][0]["id"]
            score = round(float(random.random()), 2)  # ties
            results.append({"image_id": annotation["image_id"], "category_id": category, "bbox": box, "score": score})
    return results


@pytest.mark.skipif(not _installed(), reason="faster-coco-eval is not installed")
@pytest.mark.parametrize("most", [1, 5, 100])
def test_both_evaluators_agree(shapes: Path, most: int) -> None:
    truth = open_boxes(shapes, "train").ground_truth()
    for seed in range(5):
        results = noisy(truth, seed)
        slow, fast = (
            average_precision(truth, results, most, "bbox", each).to_json()
            for each in ("pycocotools", "faster-coco-eval")
        )
        assert slow == pytest.approx(fast, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("most", [1, 100])
def test_ap50_alone_is_that_of_all_overlaps(shapes: Path, most: int) -> None:
    truth = open_boxes(shapes, "train").ground_truth()
    for seed in range(3):
        results = noisy(truth, seed)
        expected = average_precision(truth, results, most, "bbox", "pycocotools").ap50
        assert 0 < expected < 1
        assert box_ap50(truth, results, most) == pytest.approx(expected, abs=1e-12)
    assert np.isnan(box_ap50({**truth, "annotations": []}, []))


def truth_of(*boxes: tuple[int, list[float]], crowd: int | None = None) -> dict[str, Any]:
    return {
        "images": [{"id": 1, "file_name": "a", "height": 100, "width": 100}],
        "categories": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}],
        "annotations": [
            {
                "id": n,
                "image_id": 1,
                "category_id": category,
                "bbox": box,
                "area": box[2] * box[3],
                "iscrowd": int(n == crowd),
            }
            for n, (category, box) in enumerate(boxes, start=1)
        ],
    }


def found(*boxes: tuple[int, list[float], float]) -> list[dict[str, Any]]:
    return [{"image_id": 1, "category_id": category, "bbox": box, "score": score} for category, box, score in boxes]


A, B = [0.0, 0.0, 20.0, 20.0], [50.0, 50.0, 20.0, 20.0]


@pytest.mark.parametrize(
    ("results", "kind"),
    [
        (found((1, A, 0.9), (1, B, 0.8)), "classification"),
        (found((1, A, 0.9), (2, [50.0, 60.0, 20.0, 20.0], 0.8)), "localisation"),
        (found((1, A, 0.9), (1, [50.0, 60.0, 20.0, 20.0], 0.8)), "both"),
        (found((1, A, 0.9), (2, B, 0.9), (1, [0.0, 0.0, 20.0, 19.0], 0.8)), "duplicate"),
        (found((1, A, 0.9), (2, B, 0.9), (1, [80.0, 0.0, 9.0, 9.0], 0.8)), "background"),
        (found((1, A, 0.9)), "missed"),
    ],
)
def test_each_kind_of_error_is_recognised(results: list[dict[str, Any]], kind: str) -> None:
    errors = error_kinds(truth_of((1, A), (2, B)), results)
    counts = {name: entry["count"] for name, entry in errors.items()}
    missed = {"both": {"missed": 1}}.get(kind, {})
    assert counts == {**dict.fromkeys(KINDS, 0), kind: 1, **missed}


def test_correcting_a_wrong_class_gives_its_ap_back() -> None:
    errors = error_kinds(truth_of((1, A), (2, B)), found((1, A, 0.9), (1, B, 0.95)))
    assert errors["classification"]["ap50"] == pytest.approx(1 - (0.5 + 0) / 2)


def test_right_detections_have_no_errors_and_crowds_take_theirs() -> None:
    truth = truth_of((1, A), (2, B), (1, [80.0, 0.0, 20.0, 40.0]), crowd=3)
    errors = error_kinds(truth, found((1, A, 0.9), (2, B, 0.8), (1, [82.0, 5.0, 5.0, 5.0], 0.7)))
    assert all(entry == {"count": 0, "ap50": 0.0} for entry in errors.values())


def test_no_detection_and_nothing_to_find() -> None:
    errors = error_kinds(truth_of((1, A), (2, B)), [])
    assert errors["missed"]["count"] == 2
    assert all(entry["count"] == 0 for entry in error_kinds(truth_of(), []).values())
    only_crowd = truth_of((1, A), crowd=1)
    assert error_kinds(only_crowd, found((2, B, 0.5)))["background"]["count"] == 1
    assert np.isnan(average_precision(only_crowd, [], 100, "bbox").ap)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        (found((1, A, 0.9), (2, B, 0.8)), {"one": {"one": 1}, "two": {"two": 1}}),
        (found((1, A, 0.9), (1, B, 0.8)), {"one": {"one": 1}, "two": {"one": 1}}),
        (found((1, A, 0.9), (2, B, 0.8), (1, B, 0.7)), {"one": {"one": 1}, "two": {"one": 1, "two": 1}}),
        (
            found((1, A, 0.9), (2, [50.0, 60.0, 20.0, 20.0], 0.8)),
            {NOTHING: {"two": 1}, "one": {"one": 1}, "two": {NOTHING: 1}},
        ),
        (found((1, A, 0.9), (2, B, 0.2)), {"one": {"one": 1}, "two": {NOTHING: 1}}),
        (found((1, B, 0.9), (1, B, 0.8)), {"one": {NOTHING: 1}, "two": {"one": 2}}),
    ],
    ids=["right", "another class", "a second class on one object", "wrong place", "low score", "two of another class"],
)
def test_what_objects_were_detected_as(results: list[dict[str, Any]], expected: dict[str, dict[str, int]]) -> None:
    assert confusion(truth_of((1, A), (2, B)), results) == expected


def test_a_crowd_takes_its_detections_and_is_not_missed() -> None:
    truth = truth_of((1, A), (1, B), crowd=2)
    assert confusion(truth, found((1, A, 0.9), (1, [52.0, 52.0, 5.0, 5.0], 0.9))) == {"one": {"one": 1}}


CROWD = [60.0, 0.0, 40.0, 40.0]


@pytest.mark.parametrize(
    ("box", "category", "kinds"),
    [
        (CROWD, 1, {}),
        ([50.0, 0.0, 20.0, 20.0], 1, {}),  # half of it inside
        ([49.0, 0.0, 20.0, 20.0], 1, {"background": 1}),  # 9 of 20 columns
        ([54.0, -34.0, 40.0, 70.0], 1, {"background": 1}),  # IoU 0.39, and less than half of it inside
        (CROWD, 2, {"background": 1}),
        ([62.0, 2.0, 5.0, 5.0], 2, {"background": 1}),
    ],
    ids=["whole", "half inside", "less", "as large", "other class", "other class inside"],
)
def test_a_crowd_takes_what_lies_in_it_by_half_and_is_of_its_class(
    box: list[float], category: int, kinds: dict[str, int]
) -> None:
    """It is no object that a detection could have found or meant, and takes any number of them."""
    truth = truth_of((1, A), (2, B), (1, CROWD), crowd=3)
    results = found((category, box, 0.95), (1, A, 0.9), (2, B, 0.9), *[(1, CROWD, 0.7)] * 2)
    errors = error_kinds(truth, results)
    assert {kind: entry["count"] for kind, entry in errors.items() if entry["count"]} == kinds
    names = {1: "one", 2: "two"}
    wrong = {NOTHING: {names[category]: 1}} if kinds else {}
    assert confusion(truth, results) == {**wrong, "one": {"one": 1}, "two": {"two": 1}}


def test_the_detections_that_count_are_those_with_the_highest_scores_of_each_class() -> None:
    truth = truth_of((1, A), (2, B))
    results = found((1, [80.0, 0.0, 9.0, 9.0], 0.5), (1, A, 0.9), (2, [0.0, 80.0, 9.0, 9.0], 0.6), (2, B, 0.7))
    for most, background in ((1, 0), (2, 2)):
        counts = {kind: entry["count"] for kind, entry in error_kinds(truth, results, most).items()}
        assert counts == {**dict.fromkeys(KINDS, 0), "background": background}


def test_the_higher_score_has_the_object_wherever_it_stands() -> None:
    low, high = (1, [0.0, 0.0, 20.0, 16.0], 0.4), (1, A, 0.9)
    for results in (found(low, high), found(high, low)):
        assert error_kinds(truth_of((1, A)), results)["duplicate"]["count"] == 1
        assert confusion(truth_of((1, A)), results) == {NOTHING: {"one": 1}, "one": {"one": 1}}


@pytest.mark.parametrize(("score", "drawn"), [(SHOWN, 1), (SHOWN - 1e-6, 0)])
def test_the_confusion_is_of_what_is_drawn(score: float, drawn: int) -> None:
    assert confusion(truth_of((1, A)), found((1, A, score))) == {"one": {"one" if drawn else NOTHING: 1}}


def test_detections_in_an_image_without_objects_are_background() -> None:
    truth = truth_of((1, A))
    truth["images"].append({"id": 2, "file_name": "b", "height": 100, "width": 100})
    results = [*found((1, A, 0.5)), {**found((1, A, 0.9))[0], "image_id": 2}]
    errors = error_kinds(truth, results)
    assert {kind: entry["count"] for kind, entry in errors.items() if entry["count"]} == {"background": 1}
    assert errors["background"]["ap50"] == pytest.approx(0.5)
    assert confusion(truth, results) == {NOTHING: {"one": 1}, "one": {"one": 1}}


@pytest.mark.parametrize(
    ("kind", "wrong"), [("classification", (1, B, 0.9)), ("localisation", (2, [50.0, 60.0, 20.0, 20.0], 0.9))]
)
@pytest.mark.parametrize("right", [True, False], ids=["found already", "twice"])
def test_an_object_is_given_back_once(kind: str, wrong: tuple[int, list[float], float], right: bool) -> None:
    """A corrected detection of an object that has one is none: it would be a duplicate before the next object."""
    last = [0.0, 60.0, 20.0, 20.0]
    truth = truth_of((1, A), (2, B), (2, last))
    again = (2, B, 0.8) if right else (wrong[0], wrong[1], 0.8)
    results = found((1, A, 0.5), wrong, again, (2, last, 0.7))
    costs = error_kinds(truth, results)
    assert costs[kind]["count"] == (1 if right else 2)
    before = average_precision(truth, results, 100, "bbox").ap50
    assert 0 < before < 1
    assert costs[kind]["ap50"] == pytest.approx(1 - before)
