"""Counts of classes against masks counted by hand, weights against their formulas, the cache."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fp4deploy.data import Sample, cached_counts, class_balance, count_classes
from fp4deploy.data.inspection.balance import ClassCounts


class Masks:
    """Three masks of 2 x 4 pixels; class "never" does not occur."""

    class_names, background, layout = ("road", "pole", "never"), False, "masks"
    masks = ([[0, 0, 0, 0], [0, 0, 0, 0]], [[0, 0, 0, 1], [0, 0, 255, 255]], [[0, 1, 1, 1], [0, 0, 0, 0]])

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.masks)

    def load(self, index: int) -> Sample:
        self.read.append(index)
        mask = np.array(self.masks[index], dtype=np.uint8)
        return Sample(np.zeros((*mask.shape, 3), np.uint8), mask, str(index))


def test_counts_leave_void_out() -> None:
    assert count_classes(Masks()) == ClassCounts(Masks.class_names, 3, (18, 4, 0), (3, 2, 0), (22, 14, 0))


def test_a_large_set_is_counted_in_even_steps() -> None:
    data = Masks()
    assert count_classes(data, most=2).images == 2
    assert data.read == [0, 2]


def test_median_frequency_balancing() -> None:
    weights = class_balance(count_classes(Masks()), "median_frequency")
    road, pole = 18 / 22, 4 / 14
    median = (road + pole) / 2
    assert weights == {"road": pytest.approx(median / road), "pole": pytest.approx(median / pole), "never": 1.0}
    root = class_balance(count_classes(Masks()), "median_frequency", power=0.5)
    assert root["pole"] == pytest.approx(weights["pole"] ** 0.5)


def test_effective_numbers() -> None:
    weights = class_balance(count_classes(Masks()), "effective_number")
    base = 1 - 1 / 3
    road, pole = ((1 - base) / (1 - base**n) for n in (3, 2))
    assert weights["road"] == pytest.approx(2 * road / (road + pole))
    assert weights["pole"] == pytest.approx(2 * pole / (road + pole))


def test_weights_are_held_within_bounds() -> None:
    counts = ClassCounts(("a", "b", "c"), 2, (10**6, 500, 1), (2, 2, 2), (10**6, 10**6, 10**6))
    assert class_balance(counts, "median_frequency") == {"a": 0.1, "b": 1.0, "c": 10.0}
    nothing = ClassCounts(("a", "b"), 0, (0, 0), (0, 0), (0, 0))
    assert class_balance(nothing, "median_frequency") == {"a": 1.0, "b": 1.0}


def test_counts_are_kept_and_redone_when_they_do_not_fit(tmp_path: Path) -> None:
    path, data = tmp_path / "counts.json", Masks()
    first = cached_counts(data, path, "here")
    assert cached_counts(data, path, "here") == first
    assert len(data.read) == 3
    cached_counts(data, path, "elsewhere")
    assert len(data.read) == 6
    for name, value in (
        ("class_names", ("pole", "road", "never")),
        ("masks", Masks.masks[:2]),
    ):  # what counts depend on
        other = Masks()
        setattr(other, name, value)
        assert cached_counts(other, tmp_path / "other.json", "elsewhere") == count_classes(other)
        assert cached_counts(other, path, "elsewhere") == count_classes(other)
        path.write_text(json.dumps({}))
        cached_counts(data, path, "elsewhere")
    data.read = data.read[:6]
    for damage in ("{", json.dumps({"of": 3}), json.dumps([1])):
        path.write_text(damage)
        assert cached_counts(data, path, "elsewhere") == first
    assert len(data.read) == 15


@pytest.mark.parametrize(
    "wrong",
    [
        {"pixels": [1]},
        {"pixels": [-1, 0, 0]},
        {"pixels_beside": [0, 0, 0]},
        {"images_with": [9, 9, 9]},
        {"images": -1},
        {"images": 4},
    ],
)
def test_counts_that_no_dataset_gives_are_counted_again(tmp_path: Path, wrong: dict[str, object]) -> None:
    path = tmp_path / "counts.json"
    right = cached_counts(Masks(), path, "here")
    kept = json.loads(path.read_text())
    kept["counts"] |= wrong
    path.write_text(json.dumps(kept))
    assert cached_counts(Masks(), path, "here") == right
