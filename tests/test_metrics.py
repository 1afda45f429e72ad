"""The segmentation score by hand: mIoU, classes that never occurred, ignored pixels, nothing at all."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.metrics import IGNORE, Scores, SegmentationScore

NAMES = ("a", "b", "c")


def score(prediction: list[int], target: list[int], names: tuple[str, ...] = NAMES) -> Scores:
    found = SegmentationScore(len(names), names)
    found.update(torch.tensor([[prediction]]), torch.tensor([[target]]))
    return found.compute()


def test_by_hand() -> None:
    found = score([0, 0, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1])
    assert found.per_class == {"a": pytest.approx(2 / 4), "b": pytest.approx(2 / 4), "c": None}
    assert found.miou == found.score == pytest.approx(0.5)
    assert found.pixel_accuracy == pytest.approx(4 / 6)


def test_miou_against_counting_by_hand() -> None:
    score = SegmentationScore(4, "abcd")
    score.update(torch.tensor([[[0, 0, 1, 1, 2, 2]]]), torch.tensor([[[0, 1, 1, 1, 255, 0]]]))
    scores = score.compute()
    assert scores.per_class == {"a": pytest.approx(1 / 3), "b": pytest.approx(2 / 3), "c": 0.0, "d": None}
    assert scores.miou == pytest.approx(1 / 3)
    assert scores.pixel_accuracy == pytest.approx(3 / 5)


def test_logits_are_scored_by_their_argmax() -> None:
    logits = torch.tensor([[[[3.0, 0.0, 1.0]], [[1.0, 2.0, 2.0]], [[2.0, 1.0, 0.0]]]])
    found = SegmentationScore(3, NAMES)
    found.update(logits, torch.tensor([[[0, 1, 2]]]))
    assert found.compute().per_class == {"a": 1.0, "b": 0.5, "c": 0.0}


def test_json_has_no_nan() -> None:
    assert score([0, 1], [0, 0]).to_json() == {"miou": 0.25, "pixel_accuracy": 0.5}
    assert score([0, 1], [IGNORE, IGNORE]).to_json() == {"miou": None, "pixel_accuracy": None}


def test_truth_and_prediction_are_not_exchanged() -> None:
    found = score([0, 0, 0, 1], [0, 1, 1, 1])
    assert found.per_class == {"a": pytest.approx(1 / 3), "b": pytest.approx(1 / 3), "c": None}
    found = score([2, 2, 2, 2], [0, 2, 2, 2])
    assert found.per_class == {"a": 0.0, "b": None, "c": pytest.approx(3 / 4)}
    assert found.miou == pytest.approx(3 / 8)


def test_a_class_that_is_only_predicted_counts_as_0() -> None:
    found = score([0, 1], [0, 0])
    assert found.per_class == {"a": 0.5, "b": 0.0, "c": None}
    assert found.miou == 0.25


def test_ignored_pixels_do_not_count() -> None:
    found = score([0, 1, 2], [0, IGNORE, IGNORE])
    assert found.per_class == {"a": 1.0, "b": None, "c": None}
    assert (found.miou, found.pixel_accuracy) == (1.0, 1.0)


def test_nothing_to_score_is_no_number() -> None:
    found = score([0, 1], [IGNORE, IGNORE])
    assert math.isnan(found.miou)
    assert math.isnan(found.pixel_accuracy)
    assert found.per_class == dict.fromkeys(NAMES)


def test_batches_add_up_and_logits_are_classes() -> None:
    found = SegmentationScore(2, ("a", "b"))
    for logits, target in (([2.0, 1.0], 0), ([1.0, 2.0], 0), ([0.0, 3.0], 1)):
        found.update(torch.tensor(logits).view(1, 2, 1, 1), torch.tensor([[[target]]]))
    assert found.matrix().tolist() == [[1.0, 1.0], [0.0, 1.0]]
    scores = found.compute()
    assert scores.per_class == {"a": 0.5, "b": 0.5}
    assert scores.text() == "mIoU 50.00 %"
    assert scores.line() == {"miou": 0.5, "per_class": {"a": 0.5, "b": 0.5}}


def test_names_and_classes_are_as_many() -> None:
    found = SegmentationScore(3, ("a", "b"))
    found.update(torch.tensor([[[0]]]), torch.tensor([[[0]]]))
    with pytest.raises(ValueError):
        found.compute()
