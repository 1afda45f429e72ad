"""The segmentation score by hand: mIoU, classes that never occurred, ignored pixels, nothing at all."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.bench.detail import SegmentationDetail
from fp4deploy.metrics import (
    IGNORE,
    LabelScore,
    Scores,
    SegmentationScore,
    VolumeScores,
    average_precision,
    hausdorff95,
)
from fp4deploy.tasks.images import ClassEvaluation
from fp4deploy.tasks.volumes import VolumeEvaluation

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


def logits_of(classes: np.ndarray) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.from_numpy(classes.astype(np.int64)), 3).movedim(-1, 0)[None].float()


def test_volumes_by_hand() -> None:
    truth = np.zeros((2, 1, 4, 4), np.uint8)
    truth[0, 0, 0, :2], truth[0, 0, 3, 3], truth[1, 0, 1] = 1, IGNORE, 1
    found = np.zeros_like(truth)
    found[0, 0, 0, :3], found[0, 0, 3, 3], found[1, 0, 1, :2] = 1, 2, 1
    grid = SimpleNamespace(spacing=(5.0, 1.0, 2.0))
    cases = [SimpleNamespace(name=name) for name in "ab"]
    dataset: Any = SimpleNamespace(class_names=NAMES, cases=cases, truth=lambda at: (truth[at], grid))
    evaluation = VolumeEvaluation(dataset)
    for at in range(2):
        evaluation.update(logits_of(found[at]), torch.tensor([at]))
    scores = evaluation.compute()
    assert scores.dice == {"b": pytest.approx((4 / 5 + 4 / 6) / 2), "c": None}
    assert scores.mean_dice == scores.dice["b"], "a class that no volume has counts nowhere"
    assert scores.per_class == {"a": pytest.approx((12 + 12) / (13 + 14)), "b": pytest.approx(4 / 7), "c": None}
    assert scores.hd95 == {"b": pytest.approx((1.8 + 3.7) / 2), "c": None}  # 95 % of the way to 2 mm; of 2 and 4
    assert scores.text().endswith(f"Dice {100 * scores.mean_dice:.2f} %")
    assert scores.to_json()["hd95_mm"] == scores.mean_hd95 == scores.hd95["b"]
    names, counts = evaluation.counts()
    assert (names, counts[:, 1].tolist()) == (["a", "b"], [[2, 2, 3], [2, 4, 2]])


def test_what_is_predicted_in_void_counts_nowhere() -> None:
    """In no score of volumes or images: overlaps, distances, boundaries, objects, counts."""
    random = np.random.default_rng(0)
    truth = random.integers(0, 3, (3, 4, 6, 8)).astype(np.uint8)
    truth[:, :, 2:5, 3:6] = IGNORE
    found, other = random.integers(0, 3, (2, *truth.shape))
    grid, cases = SimpleNamespace(spacing=(5.0, 1.0, 2.0)), [SimpleNamespace(name=name) for name in "abc"]
    dataset: Any = SimpleNamespace(class_names=NAMES, cases=cases, truth=lambda at: (truth[at], grid))
    results = []
    for predicted in (found, np.where(truth == IGNORE, other, found), np.where(truth == IGNORE, 1, found)):
        volumes, images, detail = VolumeEvaluation(dataset), SegmentationScore(3, NAMES), SegmentationDetail(NAMES)
        for at in range(3):
            volumes.update(logits_of(predicted[at]), torch.tensor([at]))
            pair = torch.from_numpy(predicted[at]), torch.from_numpy(truth[at]).long()
            images.update(*pair)
            detail.update(*pair)
        counts = detail.counts([str(at) for at in range(12)])
        measured = volumes.compute(), images.compute(), detail.boundary_f1(), detail.recall_by_size()
        results.append((*measured, volumes.counts()[1].tolist(), counts.hit.tolist(), counts.predicted.tolist()))
    assert results[0] == results[1] == results[2]


def test_means_are_over_the_classes_that_have_a_value() -> None:
    scores = VolumeScores(1.0, {}, 1.0, {"a": 0.5, "b": None, "c": 1.0}, {"a": None, "b": None, "c": None})
    assert (scores.mean_dice, scores.mean_hd95) == (0.75, None)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_farther_surface_decides_in_millimetres(swapped: bool) -> None:
    one, other = np.zeros((2, 6, 6, 6), bool)
    one[1, 1, 1] = other[1, 1, 1] = other[1, 1, 4] = other[1, 4, 1] = True
    pair = (other, one) if swapped else (one, other)
    assert hausdorff95(*pair, (1.0, 2.0, 7.0)) == pytest.approx(np.percentile([0.0, 6.0, 21.0], 95))


def test_images_of_one_class_each_by_hand() -> None:
    score = LabelScore("abc")
    score.update(torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    score.update(torch.tensor([0, 0]), torch.tensor([1, 0]))
    found = score.compute()
    assert found.per_class == {"a": 1.0, "b": pytest.approx(1 / 3), "c": None}
    assert found.top1 == found.score == pytest.approx(3 / 5)
    assert math.isnan(LabelScore("ab").compute().top1)


def test_the_area_under_the_curve_is_scikit_learns_over_all_labelled_pixels() -> None:
    """Of two batches at once, with ties, an absent class and a background that is not counted."""
    metrics = pytest.importorskip("sklearn.metrics", exc_type=ImportError)
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randint(-3, 4, (4, 4, 5, 6), generator=generator).float()
    labels = torch.randint(0, 3, (4, 5, 6), generator=generator)
    labels[0, :2] = IGNORE
    evaluation = ClassEvaluation(SegmentationScore(4, "abcd"), background=1)
    evaluation.curves = True
    for batch in range(0, 4, 2):
        evaluation.update(outputs[batch : batch + 2], labels[batch : batch + 2])
    scores = evaluation.compute()
    assert isinstance(scores, Scores)
    probabilities = outputs.softmax(1).movedim(1, -1)[labels != IGNORE]
    truth = labels[labels != IGNORE]
    expected = [metrics.average_precision_score(truth == each, probabilities[:, each]) for each in (1, 2)]
    assert scores.auprc == pytest.approx(sum(expected) / 2, abs=1e-12)
    assert scores.line()["auprc"] == scores.auprc
    assert "AUPRC" in scores.text()


def test_the_area_is_a_sum_over_distinct_scores() -> None:
    """As it is defined, of scores with ties at every place, of one image and of many."""
    generator = torch.Generator().manual_seed(1)
    for number in range(200):
        count, values = 1 + number % 9, 1 + number % 4
        scores = torch.randint(values, (count,), generator=generator).float()
        truth = torch.rand(count, generator=generator) < 0.5
        area, recall = 0.0, 0.0
        for each in sorted(set(scores.tolist()), reverse=True):
            taken = scores >= each
            hits = int((truth & taken).sum())
            now = hits / max(1, int(truth.sum()))
            area, recall = area + (now - recall) * hits / int(taken.sum()), now
        found = average_precision(scores, truth)
        assert found is None if not truth.any() else found == pytest.approx(area, abs=1e-12)


def test_without_a_positive_there_is_no_area() -> None:
    assert average_precision(torch.zeros(3), torch.zeros(3, dtype=torch.bool)) is None
    assert average_precision(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) is None
