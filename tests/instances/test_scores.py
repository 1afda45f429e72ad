"""AP: known cases, crowds, limits above 100 detections, results as files, and pycocotools' own summary."""

from __future__ import annotations

import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from fp4deploy.bench.evidence import read_evidence, write_matches
from fp4deploy.data import open_instances
from fp4deploy.errors import InputError
from fp4deploy.instances import average_precision, read_results, write_results
from fp4deploy.instances.matches import Matches

SIZE = 64
Box = tuple[int, int, int, int]


def rle(top: int, left: int, bottom: int, right: int) -> dict[str, Any]:
    mask = np.zeros((SIZE, SIZE), dtype=np.uint8, order="F")
    mask[top:bottom, left:right] = 1
    encoded = coco_mask.encode(mask)
    return {"size": [SIZE, SIZE], "counts": encoded["counts"].decode("ascii")}


def truth(*boxes: Box, crowds: tuple[Box, ...] = (), images: int = 1) -> dict[str, Any]:
    annotations = [
        {
            "id": number, "image_id": 1, "category_id": 5, "iscrowd": int(number > len(boxes)),
            "segmentation": rle(*box),
            "area": (box[2] - box[0]) * (box[3] - box[1]), "bbox": [box[1], box[0], box[3] - box[1], box[2] - box[0]],
        }
        for number, box in enumerate((*boxes, *crowds), start=1)
    ]  # fmt: skip
    return {
        "images": [{"id": number, "height": SIZE, "width": SIZE} for number in range(1, images + 1)],
        "annotations": annotations,
        "categories": [{"id": 5, "name": "nucleus"}],
    }


def result(box: Box, score: float) -> dict[str, Any]:
    return {"image_id": 1, "category_id": 5, "segmentation": rle(*box), "score": score}


A, B, CROWD = (0, 0, 10, 10), (20, 20, 40, 40), (44, 0, 64, 64)


def test_the_truth_scores_one() -> None:
    scores = average_precision(truth(A, B), [result(A, 0.9), result(B, 0.8)])
    assert (scores.ap, scores.ap50, scores.ap75, scores.recall) == pytest.approx((1.0, 1.0, 1.0, 1.0))
    assert scores.per_class == {"nucleus": pytest.approx(1.0)}
    assert scores.detections == 2
    assert math.isnan(scores.ap_large)
    assert scores.to_json()["ap_large"] is None
    json.dumps(scores.to_json(), allow_nan=False)


def test_half_an_overlap_counts_at_one_half_only() -> None:
    scores = average_precision(truth(A), [result((0, 0, 10, 6), 0.9)])  # IoU 0.6
    assert scores.ap50 == pytest.approx(1.0)
    assert scores.ap75 == 0.0
    assert scores.ap == pytest.approx(0.3)  # 0.50, 0.55 and 0.60 of ten


def test_a_false_detection_before_a_true_one_halves_the_precision() -> None:
    scores = average_precision(truth(A), [result(B, 0.9), result(A, 0.8)])
    assert scores.ap == pytest.approx(0.5)


def test_a_detection_inside_a_crowd_counts_neither_way() -> None:
    wrong, inside = result((45, 2, 60, 20), 0.99), truth(A, crowds=(CROWD,))
    assert average_precision(inside, [wrong, result(A, 0.8)]).ap == pytest.approx(1.0)
    assert average_precision(truth(A), [wrong, result(A, 0.8)]).ap == pytest.approx(0.5)


def test_nothing_found_and_nothing_to_find() -> None:
    assert average_precision(truth(A, B), []).ap == 0.0
    nothing = average_precision(truth(), [])
    assert math.isnan(nothing.ap)
    assert nothing.per_class == {"nucleus": None}
    assert nothing.to_json()["ap"] is None


def test_more_than_a_hundred_objects_need_a_higher_limit() -> None:
    boxes = [(5 * row, 5 * column, 5 * row + 4, 5 * column + 4) for row in range(12) for column in range(12)]
    results = [result(box, 0.5) for box in boxes]
    many = truth(*boxes)
    assert average_precision(many, results, max_detections=1000).ap == pytest.approx(1.0)
    limited = average_precision(many, results, max_detections=100)
    assert limited.recall == pytest.approx(100 / 144)
    assert limited.ap < 0.75
    assert limited.max_detections == 100


def test_same_numbers_as_the_summary_of_pycocotools() -> None:
    random = np.random.default_rng(0)
    boxes = []
    for _ in range(12):
        top, left = random.integers(0, 24, 2)
        height, width = random.integers(6, 40, 2)
        boxes.append((int(top), int(left), int(top + height), int(left + width)))
    shifted = [(t + 1, l, b + 1, r) for t, l, b, r in boxes[:9]]  # noqa: E741
    results = [result(box, float(random.random())) for box in shifted]
    content = truth(*boxes, crowds=(CROWD,))
    ours = average_precision(content, results)
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO()
        coco.dataset = json.loads(json.dumps(content))
        coco.createIndex()
        theirs = COCOeval(coco, coco.loadRes(json.loads(json.dumps(results))), "segm")
        theirs.evaluate()
        theirs.accumulate()
        theirs.summarize()
    names = ("ap", "ap50", "ap75", "ap_small", "ap_medium")
    assert [getattr(ours, name) for name in names] == pytest.approx(theirs.stats[:5].tolist())
    assert ours.recall == pytest.approx(theirs.stats[8])
    assert 0.1 < ours.ap < 0.9
    assert ours.ap_medium > 0


def test_a_training_waits_for_no_sizes() -> None:
    """Without matches all that metrics.jsonl has is the same, and sizes are not scored."""
    given = truth(A, B), [result(A, 0.9), result(B, 0.8), result((3, 3, 9, 9), 0.7)]
    whole, short = (average_precision(*given, evaluator="pycocotools", matches=each) for each in (True, False))
    assert short.line() == whole.line()
    assert (short.recall, short.detections) == (whole.recall, whole.detections)
    assert not math.isnan(whole.ap_small)
    assert all(math.isnan(each) for each in (short.ap_small, short.ap_medium, short.ap_large))
    assert short.matches is None


def test_results_survive_a_file(tmp_path: Path) -> None:
    results = [result(A, 0.9), result(B, 0.25)]
    write_results(results, tmp_path / "results.json")
    back = read_results(tmp_path / "results.json")
    assert back == results
    assert average_precision(truth(A, B), back).ap == pytest.approx(1.0)


@pytest.mark.parametrize(
    "content", ["", "{}", '[{"image_id": 1}]', '[{"image_id": 1, "category_id": 1, "segmentation": [[0]], "score": 1}]']
)
def test_files_that_are_no_results(tmp_path: Path, content: str) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"results\.json .*COCO results"):
        read_results(path)
    with pytest.raises(InputError, match=r"There is no file .*none\.json\. Write COCO results with: fp4deploy bench"):
        read_results(tmp_path / "none.json")


def test_results_of_another_dataset_are_refused() -> None:
    with pytest.raises(InputError, match="name the image_id 77"):
        average_precision(truth(A), [result(A, 0.5) | {"image_id": 77}])
    with pytest.raises(InputError, match="name the category_id 6"):
        average_precision(truth(A), [result(A, 0.5) | {"category_id": 6}])


def test_the_annotations_of_coco_score_one_against_themselves(shared: Path) -> None:
    """Polygons, RLE and crowds of real files, 80 categories; overlapping masks are allowed in results."""
    content = open_instances(shared / "data" / "coco2017_mini", "val").ground_truth()
    results = [
        {
            "image_id": annotation["image_id"], "category_id": annotation["category_id"], "score": 1.0,
            "segmentation": {
                "size": annotation["segmentation"]["size"], "counts": annotation["segmentation"]["counts"].decode(),
            },
        }
        for annotation in content["annotations"]
        if not annotation["iscrowd"]
    ]  # fmt: skip
    assert any(annotation["iscrowd"] for annotation in content["annotations"])
    scores = average_precision(content, results)
    assert scores.ap == pytest.approx(1.0)
    assert len([value for value in scores.per_class.values() if value is not None]) > 40


def test_a_second_detection_of_one_object_is_false() -> None:
    """Its object could be matched once more if its number were 0 (`scores`)."""
    scores = average_precision(truth(A, B), [result(A, 0.9), result(A, 0.8), result(B, 0.7)])
    assert scores.ap50 == pytest.approx((51 * 1 + 50 * 2 / 3) / 101)


def crowded(seed: int, images: int = 6) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Boxes of two classes with crowds and three sizes, and detections in any order: equal scores, some in crowds."""
    random = np.random.default_rng(seed)
    annotations, results = [], []
    for image in range(1, images + 1):
        for number in range(int(random.integers(0, 7))):
            size = random.choice([9.0, 25.0, 70.0], 2)
            annotation = {
                "id": len(annotations) + 1, "image_id": image, "category_id": int(random.integers(1, 3)),
                "bbox": [*random.uniform(0, 200, 2).tolist(), *size.tolist()], "area": float(size.prod()),
                "iscrowd": int(number == 3),
            }  # fmt: skip
            annotations.append(annotation)
            for _ in range(int(random.integers(0, 3))):
                x, y, width, height = annotation["bbox"]
                box = [x + random.normal(0, 0.1) * width, y, width * float(np.exp(random.normal(0, 0.2))), height]
                results.append(
                    {
                        "image_id": image, "category_id": annotation["category_id"], "bbox": box,
                        "score": round(float(random.random()), 1),
                    }
                )  # fmt: skip
    content = {
        "images": [{"id": number, "height": 300, "width": 300} for number in range(1, images + 1)],
        "annotations": annotations,
        "categories": [{"id": 1, "name": "one"}, {"id": 2, "name": "two"}],
    }
    return content, [results[place] for place in random.permutation(len(results))]


@pytest.mark.parametrize("seed", range(8))
def test_matches_give_the_same_ap_also_from_their_text(seed: int) -> None:
    """Equal scores in one image and in several, equal recalls, ignored detections, crowds that hold several."""
    content, results = crowded(seed)
    scores = average_precision(content, results, 100, "bbox")
    assert scores.matches is not None
    assert any(each.ignored.any() for each in scores.matches.detections)
    for found in (scores.matches, read_evidence(write_matches(scores.matches), "x")):
        assert isinstance(found, Matches)
        assert found.per_class(np.ones(6)).tolist() == pytest.approx(list(scores.per_class.values()), abs=1e-12)
        assert found.ap(np.ones(6)) == pytest.approx(scores.ap, abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_an_image_that_is_drawn_several_times_counts_as_so_many(seed: int) -> None:
    content, results = crowded(seed)
    results = [each | {"score": (each["score"] + number / 1000) / 2} for number, each in enumerate(results)]
    found = average_precision(content, results, 100, "bbox").matches
    assert found is not None
    weights = [3, 0, 1, 2, 1, 0]
    drawn = [(old, 10 * old + copy) for old, weight in enumerate(weights, start=1) for copy in range(weight)]
    repeated = {
        key: [each | {name: new} for old, new in drawn for each in records if each[name] == old]
        for key, name, records in (
            ("images", "id", content["images"]),
            ("annotations", "image_id", content["annotations"]),
            ("results", "image_id", results),
        )
    }
    numbered = [each | {"id": number} for number, each in enumerate(repeated["annotations"], start=1)]
    expected = average_precision(
        {**content, "images": repeated["images"], "annotations": numbered}, repeated["results"], 100, "bbox"
    )
    assert found.per_class(np.array(weights, np.float64)).tolist() == pytest.approx(
        [math.nan if value is None else value for value in expected.per_class.values()], abs=1e-12, nan_ok=True
    )


def test_objects_found_in_each_image_leave_crowds_out() -> None:
    inside = truth(A, B, crowds=(CROWD,), images=2)
    half = (20, 20, 40, 32)  # of B, IoU 0.6: at three of ten overlaps
    found = average_precision(inside, [result(A, 0.9), result(half, 0.8), result((45, 2, 60, 20), 0.99)]).matches
    assert found is not None
    assert found.objects.tolist() == [[2], [0]]
    assert found.found().tolist() == pytest.approx([1.3, 0.0])


def test_annotations_numbered_from_zero_score_the_same() -> None:
    content = truth(A, B)
    for annotation in content["annotations"]:
        annotation["id"] -= 1
    assert average_precision(content, [result(A, 0.9), result(B, 0.8)]).ap == pytest.approx(1.0)
