"""Rotation, aspect, hue and the share of flips: image and mask stay together, and off means untouched pixels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from fp4deploy.data import IGNORE, Sample, TrainTransform
from fp4deploy.data.augmentation.transforms import _GREY, recolour

PLAIN = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "zoom": (1.0, 1.0), "jitter": 0.0}


def quarters(height: int = 64, width: int = 96) -> Sample:
    """Four quarters; the red channel says the class, 60 * class."""
    rows, columns = np.mgrid[:height, :width]
    mask = (2 * (rows >= height // 2) + (columns >= width // 2)).astype(np.uint8)
    image = np.stack([60 * mask, np.full_like(mask, 30), np.zeros_like(mask)], axis=-1)
    return Sample(image, mask, "quarters")


def agreement(image: torch.Tensor, mask: torch.Tensor) -> float:
    """Share of labelled pixels whose red channel says the mask's class."""
    labelled = mask != IGNORE
    return ((image[0] * 255 / 60).round() == mask)[labelled].float().mean().item()


@pytest.mark.parametrize(
    "more", [{"rotate": 30.0}, {"aspect": 2.0}, {"rotate": 20.0, "aspect": 1.5, "zoom": (0.6, 1.8)}]
)
def test_image_and_mask_move_together(more: dict) -> None:
    transform = TrainTransform(64, 96, seed=3, **{**PLAIN, **more})
    for index in range(8):
        assert agreement(*transform(quarters(), 0, index)) > 0.93


@pytest.mark.parametrize(
    "more", [{"rotate": 45.0}, {"zoom": (0.5, 0.6)}, {"rotate": 30.0, "flip": 1.0, "upside_down": True}]
)
def test_objects_move_with_their_classes_and_what_is_uncovered_has_none(more: dict) -> None:
    sample, void = quarters(), 0
    numbered = replace(sample, instances=10 * sample.mask.astype(np.int32))
    for index in range(6):
        mask, objects = TrainTransform(64, 96, seed=3, **{**PLAIN, **more})(numbered, 0, index)[1]
        uncovered = mask == IGNORE
        void += int(uncovered.sum())
        assert (objects[uncovered] == 0).all()
        assert (objects == 10 * mask)[~uncovered].all()
    assert void


def test_a_rotation_uncovers_void_and_stays_below_its_angle() -> None:
    share = [(TrainTransform(64, 96, rotate=r, **PLAIN)(quarters(), 0, 1)[1] == IGNORE).float().mean() for r in (0, 45)]
    assert share[0] == 0
    assert 0.02 < share[1] < 0.5


def test_the_aspect_changes_one_side_against_the_other() -> None:
    """Each quarter keeps half of one side while the other's zoom moves."""
    transform = TrainTransform(64, 96, seed=1, aspect=4.0, **PLAIN)
    shares = [(transform(quarters(), 0, index)[1] == IGNORE).float().mean().item() for index in range(12)]
    assert max(shares) > 0.1  # one side shrinks below the frame, so that void appears
    assert min(shares) >= 0


def test_what_is_off_changes_no_pixel() -> None:
    sample = quarters()
    expected = TrainTransform(64, 96, seed=2)(sample, 1, 3)
    found = TrainTransform(64, 96, seed=2, flip=0.5, rotate=0.0, aspect=1.0, hue=0.0)(sample, 1, 3)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize(("flip", "flipped"), [(0.0, 0), (1.0, 10)])
def test_the_share_of_flips(flip: float, flipped: int) -> None:
    transform = TrainTransform(64, 96, flip=flip, **PLAIN)
    masks = [transform(quarters(), 0, index)[1] for index in range(10)]
    assert sum(mask[0, 0].item() == 1 for mask in masks) == flipped


def test_a_turn_of_the_hue_keeps_the_luma_and_a_full_circle_the_colour() -> None:
    image = np.random.default_rng(0).integers(80, 180, (5, 6, 3), dtype=np.uint8)
    turned = recolour(image, 1.0, 1.0, 1.0, 0.1)
    np.testing.assert_allclose(turned @ _GREY, image @ _GREY, atol=1.2)
    assert np.abs(turned.astype(int) - image).max() > 12
    np.testing.assert_allclose(recolour(image, 1.0, 1.0, 1.0, 1.0), image, atol=1)
    grey = np.full((2, 2, 3), 100, np.uint8)
    np.testing.assert_allclose(recolour(grey, 1.0, 1.0, 1.0, 0.3), grey, atol=1)
