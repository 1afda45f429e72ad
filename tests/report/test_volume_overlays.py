"""The slice of a volume that a report shows: where the models differ most, anterior up, voxels as squares."""

from __future__ import annotations

import numpy as np

from fp4deploy.report.figures.task_pictures import PICTURES, SLICE, Seen, slice_of


def test_the_slice_in_which_the_models_differ_most() -> None:
    voxels = np.random.default_rng(0).normal(size=(5, 8, 10)).astype(np.float32)
    truth, first = np.zeros((5, 8, 10), np.uint8), np.zeros((5, 8, 10), np.uint8)
    truth[1, 2:6, 2:6] = 1
    second = first.copy()
    second[3, 0, :4] = 2
    shown = slice_of(Seen("case", voxels, truth, [first, second]))
    times = SLICE // 10
    assert shown.name == "case, slice 3"
    assert shown.image.shape == (8 * times, 10 * times, 3)
    assert (shown.predictions[1][-times:, : 4 * times] == 2).all(), "the first row, posterior, is at the bottom"
    assert PICTURES["semantic"].differing(*shown.predictions) == 4 / 80
    assert slice_of(Seen("case", voxels, truth, [first, first])).name == "case, slice 1", (
        "of equal ones the most labelled"
    )
