"""Boundaries, objects by size, and counts of single images, on masks small enough to count by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy.bench.detail import SegmentationDetail, _grown
from fp4deploy.data.sample import IGNORE


def square(side: int, at: tuple[int, int], size: int) -> torch.Tensor:
    mask = torch.zeros(side, side, dtype=torch.int64)
    mask[at[0] : at[0] + size, at[1] : at[1] + size] = 1
    return mask


def test_a_shift_within_the_tolerance_costs_no_boundary() -> None:
    truth = square(400, (100, 100), 100)
    for shift, expected in ((4, 1.0), (12, 192 / 396)):  # 4 pixels tolerance; upper and lower edge still overlap
        detail = SegmentationDetail(("ground", "thing"))
        detail.update(square(400, (100, 100 + shift), 100)[None], truth[None])
        found = detail.boundary_f1()
        assert found is not None
        assert found == pytest.approx(expected, abs=0.02)


@pytest.mark.parametrize("reach", [1, 2, 3, 4, 7])
def test_growing_is_a_maximum_over_a_square(reach: int) -> None:
    mask = np.random.default_rng(reach).random((3, 20, 30)) > 0.97
    mask[0, 0, 0] = mask[1, -1, -1] = True
    expected = torch.nn.functional.max_pool2d(torch.from_numpy(mask).float(), 2 * reach + 1, 1, reach) > 0
    assert np.array_equal(_grown(mask, reach), expected.numpy())


def test_boundaries_against_a_plain_loop() -> None:
    random = np.random.default_rng(0)
    truth, predicted = (torch.from_numpy(random.integers(0, 3, (12, 14))) for _ in range(2))
    truth[2:4, 3:6] = IGNORE
    detail = SegmentationDetail(("a", "b", "c"))
    detail.update(predicted[None], truth[None])
    predicted = predicted.masked_fill(truth == IGNORE, IGNORE)

    def boundary(labels: torch.Tensor, number: int) -> set[tuple[int, int]]:
        found = set()
        for y in range(12):
            for x in range(14):
                near = [(y + dy, x + dx) for dy, dx in ((0, 1), (1, 0), (0, -1), (-1, 0))]
                others = [int(labels[at]) for at in near if 0 <= at[0] < 12 and 0 <= at[1] < 14]
                if labels[y, x] == number and any(other not in (number, IGNORE) for other in others):
                    found.add((y, x))
        return found

    scores = []
    for number in range(3):
        first, second = boundary(predicted, number), boundary(truth, number)
        near = lambda at, others: any(max(abs(at[0] - y), abs(at[1] - x)) <= 1 for y, x in others)  # noqa: E731
        precision = sum(near(at, second) for at in first) / len(first)
        recall = sum(near(at, first) for at in second) / len(second)
        scores.append(2 * precision * recall / (precision + recall))
    assert detail.boundary_f1() == pytest.approx(float(np.mean(scores)))


def test_small_objects_are_counted_apart() -> None:
    truth = square(200, (10, 10), 10) + square(200, (60, 60), 100)
    predicted = square(200, (60, 60), 100)
    detail = SegmentationDetail(("ground", "thing"))
    detail.update(predicted[None], truth[None])
    assert detail.recall_by_size() == {"small": 0.0, "medium": None, "large": 1.0}


def test_background_is_no_object() -> None:
    truth = square(200, (60, 60), 100)
    detail = SegmentationDetail(("background", "thing"), background=True)
    detail.update(torch.zeros_like(truth)[None], truth[None])
    assert detail.recall_by_size() == {"small": None, "medium": None, "large": 0.0}
    assert detail.counts(["x"]).never_predicted() == ["thing"]


def test_a_class_of_masks_that_is_named_background_is_no_object() -> None:
    truth = square(200, (60, 60), 100)
    detail = SegmentationDetail(("thing", "Background"))
    detail.update((1 - truth)[None], (1 - truth)[None])
    assert detail.recall_by_size() == {"small": None, "medium": None, "large": 1.0}


def test_counts_leave_out_what_has_no_label() -> None:
    truth = torch.tensor([[0, 1, IGNORE], [1, 1, 0]])
    predicted = torch.tensor([[0, 1, 1], [0, 1, 1]])
    detail = SegmentationDetail(("ground", "thing"))
    detail.update(predicted[None], truth[None])
    found = detail.counts(["x"])
    assert (found.hit.tolist(), found.truth.tolist(), found.predicted.tolist()) == ([[1, 2]], [[2, 3]], [[2, 3]])


def test_nothing_labelled_has_no_score() -> None:
    detail = SegmentationDetail(("ground", "thing"))
    detail.update(torch.zeros(1, 8, 8, dtype=torch.int64), torch.full((1, 8, 8), IGNORE))
    assert detail.boundary_f1() is None
    assert set(detail.recall_by_size().values()) == {None}
