"""Outputs to boxes: suppression, borders, numbers without sense; and the gate of an export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fp4deploy.data import open_boxes
from fp4deploy.detection import DetectionEvaluation, decode_boxes
from fp4deploy.detection.decode import iou, suppress
from fp4deploy.models.boxes import DetectionHead, distance_iou, map_sizes
from tests.detection.perfect import perfect_output

HEAD = DetectionHead("fcos", 6, width=16, max_detections=50)


def test_places_lie_in_the_middle_of_their_cells() -> None:
    x, y, stride, _ = DetectionHead("fcos", 1, (4, 32)).priors(33, 8)
    assert map_sizes((4, 32), 33, 8) == [(9, 2), (2, 1)]
    assert x[:3].tolist() == [2, 6, 2]
    assert y[:3].tolist() == [2, 2, 6]
    assert (x[-1].item(), y[-1].item(), stride[-1].item()) == (16, 48, 32)


def test_iou_by_hand() -> None:
    found = iou(np.array([[0.0, 0, 2, 2]]), np.array([[1.0, 1, 3, 3], [0, 0, 2, 2], [5, 5, 6, 6], [1, 1, 1, 1]]))
    np.testing.assert_allclose(found, [[1 / 7, 1, 0, 0]])
    one, other = torch.tensor([[1.0], [1], [1], [1]]), torch.tensor([[0.0], [0], [2], [2]])
    assert distance_iou(one, other).item() == pytest.approx(1 / 7)


def test_suppression_in_chunks_is_that_of_one_box_after_the_other() -> None:
    random = np.random.default_rng(0)
    centres, sides = random.uniform(0, 200, (60, 2)), random.uniform(4, 40, (60, 2))
    near = random.integers(0, 60, 700)  # several chunks
    corners = np.concatenate((centres - sides / 2, centres + sides / 2), 1)[near] + random.normal(0, 2, (700, 4))
    boxes, classes = corners.astype(np.float32), random.integers(0, 2, 700)
    kept: list[int] = []
    for place in range(700):
        same = [other for other in kept if classes[other] == classes[place]]
        if not (iou(boxes[same], boxes[place : place + 1]) > 0.6).any():
            kept.append(place)
    assert suppress(boxes, classes, 0.6, 700).tolist() == kept
    assert suppress(boxes, classes, 0.6, 50).tolist() == kept[:50]
    assert kept[-1] > 512


def test_suppression_is_within_a_class_and_in_the_order_of_the_scores() -> None:
    boxes = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [0, 0, 10, 9], [0, 5, 10, 15], [0, 0, 10, 6]], np.float32)
    classes = np.array([0, 0, 1, 0, 0])
    assert suppress(boxes, classes, 0.6, 10).tolist() == [0, 2, 3, 4]  # 0.9 of 0; another class; 1/3; exactly 0.6
    assert suppress(boxes, classes, 0.59, 10).tolist() == [0, 2, 3]
    assert suppress(boxes, classes, 0.6, 2).tolist() == [0, 2]
    assert suppress(boxes[:0], classes[:0], 0.6, 2).tolist() == []


@pytest.mark.parametrize("target", [(32, 32), (64, 48)])
def test_perfect_outputs_give_the_annotated_boxes(shapes: Path, target: tuple[int, int]) -> None:
    data = open_boxes(shapes, "val")
    evaluation = DetectionEvaluation(data, HEAD, target)
    outputs = torch.stack([perfect_output(data.load(index), HEAD, target) for index in range(len(data))])
    evaluation.update(outputs, torch.arange(len(data)))
    scores = evaluation.compute()
    assert scores.ap50 > 0.8  # two objects whose centres share a place are one to a detector
    assert all(set(result) == {"image_id", "category_id", "bbox", "score"} for result in evaluation.results())


def test_nan_and_infinity_have_no_box() -> None:
    outputs = torch.full((HEAD.channels, 340), 3.0)
    outputs[0, 5], outputs[7, 6], outputs[10, 7] = float("nan"), float("inf"), float("-inf")
    found = decode_boxes(outputs, HEAD, (64, 64), (64, 64))
    assert np.isfinite(found.boxes).all()
    assert np.isfinite(found.scores).all()
    assert len(decode_boxes(torch.full_like(outputs, float("nan")), HEAD, (64, 64), (64, 64))) == 0
    broken = torch.full_like(outputs, -20.0)
    broken[:, 5:8] = outputs[:, 5:8]  # the only places with a score, were they finite
    assert len(decode_boxes(broken, HEAD, (64, 64), (64, 64))) == 0
    assert len(decode_boxes(broken.nan_to_num(3, 3, 3), HEAD, (64, 64), (64, 64))) > 0


def test_boxes_end_at_the_border_of_the_image() -> None:
    outputs = torch.full((HEAD.channels, 340), -20.0)
    outputs[2, 17], outputs[-1, 17], outputs[6:10, 17] = 9.0, 9.0, 6.0
    (box,) = decode_boxes(outputs, HEAD, (64, 64), (20, 40)).boxes.tolist()
    assert box == [0, 0, 40, 20]


def test_outputs_agree_by_what_they_show() -> None:
    expected = torch.full((1, HEAD.channels, 340), -20.0)
    expected[0, 1, [40, 90]], expected[0, -1, [40, 90]], expected[0, 6:10] = 2.0, 2.0, 1.0
    assert HEAD.agreeing(expected, expected.clone()).tolist() == [True, True]
    noisy = expected + 0.01 * torch.randn_like(expected)
    assert HEAD.agreeing(expected, noisy).all()
    moved = expected.clone()
    moved[0, 6, 40] += 0.5
    assert HEAD.agreeing(expected, moved).tolist() == [False, True]
    lost, invented = expected.clone(), expected.clone()
    lost[0, 1, 90] = -20.0
    invented[0, 3, 100], invented[0, -1, 100] = 3.0, 3.0
    assert HEAD.agreeing(expected, lost).tolist() == [True, False]
    assert sorted(HEAD.agreeing(expected, invented).tolist()) == [False, True, True]
    broken = expected.clone()
    broken[0, 0, 0] = float("nan")
    assert not HEAD.agreeing(expected, broken).any()
    nothing = torch.full_like(expected, -20.0)
    assert HEAD.agreeing(nothing, nothing).tolist() == [True]
    assert not HEAD.agreeing(nothing, nothing * float("inf")).any()
