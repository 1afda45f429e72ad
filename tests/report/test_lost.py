"""Overlays of images that lost most: which pixels are marked."""

from __future__ import annotations

import numpy as np

from fp4deploy.bench.evidence import PixelCounts, write_pixels
from fp4deploy.data import IGNORE
from fp4deploy.report.figures.lost import _stems, became_wrong, most_wrong
from fp4deploy.report.figures.task_pictures import DIFFERENCE, Seen


def test_what_the_baseline_had_right_is_marked() -> None:
    image = np.zeros((1, 4, 3), np.uint8)
    truth = np.array([[1, 1, 0, IGNORE]], np.uint8)
    before, after = np.array([[[1, 0, 0, 0]], [[0, 0, 0, 0]]], np.uint8)
    both, alone = (became_wrong(Seen("x", image, truth, list(each))) for each in ([before, after], [after]))
    marked = [(each[0] == DIFFERENCE).all(-1).tolist() for each in (both, alone)]
    assert marked == [[True, False, False, False], [True, True, False, False]]


def test_the_most_wrong_have_the_largest_share_of_wrong_pixels() -> None:
    hit = np.array([[9, 0], [1, 1], [49, 49], [0, 0], [5, 4], [0, 7], [2, 1]])
    truth = np.array(
        [[10, 0], [5, 5], [50, 50], [0, 0], [5, 5], [0, 10], [2, 8]]
    )  # the fourth is void: nothing of it is wrong
    counts = PixelCounts([f"{number}.png" for number in range(7)], "ab", np.stack([hit, truth, truth], -1))
    assert most_wrong(write_pixels(counts)) == ["1.png", "6.png", "5.png", "0.png", "4.png"]


def test_every_image_has_a_picture_of_its_own() -> None:
    """Also where the names differ in other letters than ASCII's, in their folders, or in nothing else than case."""
    assert _stems(["a/1.jpg", "b c.jpg"]) == ["1", "b_c"]
    assert _stems(["東.jpg", "京.jpg", "a.jpg", "x/A.png"]) == ["_.1", "_.2", "a.3", "A.4"]
