"""Overlays of images that lost most: which pixels are marked."""

from __future__ import annotations

import numpy as np

from fp4deploy.data import IGNORE
from fp4deploy.data.palette import colours
from fp4deploy.report.figures.lost import _row, _stems
from fp4deploy.report.figures.overlays import DIFFERENCE


def test_what_the_baseline_had_right_is_marked() -> None:
    image = np.zeros((1, 4, 3), np.uint8)
    truth = np.array([[1, 1, 0, IGNORE]], np.uint8)
    before, after = np.array([[[1, 0, 0, 0]], [[0, 0, 0, 0]]], np.uint8)
    palette = colours(("background", "cat"), background=True)
    both, alone = (_row(image, truth, each, palette) for each in ([before, after], [after]))
    assert (both.shape, alone.shape) == ((1, 20, 3), (1, 16, 3))
    marked = [(each[0, -4:] == DIFFERENCE).all(-1).tolist() for each in (both, alone)]
    assert marked == [[True, False, False, False], [True, True, False, False]]


def test_every_image_has_a_picture_of_its_own() -> None:
    """Also where the names differ in other letters than ASCII's, in their folders, or in nothing else than case."""
    assert _stems(["a/1.jpg", "b c.jpg"]) == ["1", "b_c"]
    assert _stems(["東.jpg", "京.jpg", "a.jpg", "x/A.png"]) == ["_.1", "_.2", "a.3", "A.4"]
