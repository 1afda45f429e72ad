"""Windows of volumes: what training sees, and that sliding windows put a volume together again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from fp4deploy.data import IGNORE, Sample
from fp4deploy.data.augmentation.volumes import VolumeTrainTransform, VolumeTransform
from fp4deploy.data.tiles import gaussian, ramp, sliding_window


def labelled(shape: tuple[int, int, int], at: tuple[int, int, int] = (2, 3, 4)) -> Sample:
    """A volume whose second channel is the class; one voxel of class 1, a corner of class 2."""
    mask = np.zeros(shape, np.uint8)
    mask[at] = 1
    mask[-2:, -2:, -2:] = 2
    return Sample(np.stack([np.arange(mask.size, dtype=np.float32).reshape(shape), mask.astype(np.float32)]), mask, "v")  # type: ignore[arg-type]


PLAIN = {"zoom": (1.0, 1.0), "jitter": 0.0, "flip": 0.0}


def test_labels_move_with_their_voxels() -> None:
    sample = labelled((20, 12, 9))
    transform = VolumeTrainTransform((8, 16, 8), seed=3, zoom=(1.0, 1.3), jitter=0.0, flip=0.5, foreground=1.0)
    seen = set()
    for index in range(12):
        image, labels = transform(sample, 0, index)
        assert image.shape == (2, 8, 16, 8)
        assert labels.shape == (8, 16, 8)
        assert image[1][labels == IGNORE].sum() == 0, "padding is the mean"
        inside = (labels > 0) & (labels != IGNORE)
        assert image[1][inside].mean() > image[1][labels == 0].mean()
        seen |= set(labels[inside].tolist())
        again = transform(sample, 0, index)
        assert torch.equal(image, again[0])
    assert seen == {1, 2}, "windows lie around each class"
    assert not torch.equal(transform(sample, 1, 0)[0], transform(sample, 0, 0)[0])


def test_padding_stays_the_mean_whatever_the_intensities() -> None:
    transform = VolumeTrainTransform((8, 16, 8), zoom=(1.0, 1.0), jitter=0.5, flip=0.5)
    image, labels = transform(labelled((20, 12, 9)))
    assert (labels == IGNORE).any()
    assert not image[:, labels == IGNORE].any()


def test_a_window_holds_its_voxel_and_stays_inside() -> None:
    sample, transform = labelled((30, 30, 30)), VolumeTrainTransform((8, 8, 8), foreground=1.0, **PLAIN)
    for index in range(8):
        image, labels = transform(sample, 0, index)
        assert ((labels > 0) & (labels != IGNORE)).any()
        assert not (labels == IGNORE).any()
        assert torch.equal(image[1].long(), labels)


def test_mirrors_and_intensities() -> None:
    sample = labelled((8, 8, 8))
    image, _ = VolumeTrainTransform((8, 8, 8), zoom=(1.0, 1.0), jitter=0.0, flip=1.0)(sample)
    assert torch.equal(image, torch.from_numpy(sample.image).flip((1, 2, 3)))
    shifted, _ = VolumeTrainTransform((8, 8, 8), zoom=(1.0, 1.0), jitter=0.5, flip=0.0)(sample)
    slope = torch.from_numpy(np.polyfit(sample.image[0].ravel(), shifted[0].numpy().ravel(), 1))
    assert 0.5 <= slope[0] <= 1.5
    assert slope[0] != 1
    assert abs(slope[1]) <= 0.5


def test_the_input_of_an_evaluation() -> None:
    sample = labelled((20, 12, 9), (10, 6, 4))
    whole, index = VolumeTransform((8, 8, 8), whole=True)(sample, 0, 7)
    assert (whole.shape, int(index)) == ((2, 20, 12, 9), 7)
    window, labels = VolumeTransform((8, 16, 8))(sample)
    assert window.shape == (2, 8, 16, 8)
    assert (labels == IGNORE).sum() == 8 * 4 * 8


@pytest.mark.parametrize("size", [(8, 8, 8), (20, 9, 13), (5, 30, 8), (3, 4, 5)])
@pytest.mark.parametrize("mirror", [False, True])
def test_a_network_without_context_sees_no_windows(size: tuple[int, int, int], mirror: bool) -> None:
    volume = np.random.default_rng(0).normal(size=(2, *size)).astype(np.float32)

    def network(tiles: np.ndarray) -> np.ndarray:
        assert tiles.shape[1:] == (2, 8, 8, 8)
        assert len(tiles) <= 3
        return np.stack([tiles[:, 0] + tiles[:, 1], tiles[:, 0] * 2, -tiles[:, 1]], 1)

    bands = list(sliding_window(volume, (8, 8, 8), network, batch=3, mirror=mirror))
    assert [first for first, _ in bands] == list(np.cumsum([0, *(band.shape[1] for _, band in bands)])[:-1])
    assert max(band.shape[1] for _, band in bands) <= 8, "a band at a time"
    joined = np.concatenate([band for _, band in bands], 1)
    assert np.allclose(joined, np.stack([volume[0] + volume[1], volume[0] * 2, -volume[1]]), atol=1e-5)


def test_an_axis_shorter_than_a_window_lies_in_its_middle() -> None:
    seen: list[np.ndarray] = []

    def network(tiles: np.ndarray) -> np.ndarray:
        seen.append(tiles)
        return tiles

    ((_, band),) = sliding_window(np.ones((1, 3, 8, 8), np.float32), (8, 8, 8), network)
    assert band.shape == (1, 3, 8, 8)
    assert np.flatnonzero(seen[0][0, 0, :, 0, 0]).tolist() == [2, 3, 4]


@pytest.mark.parametrize("side", [4, 7, 16, 33])
@pytest.mark.parametrize("weights", [gaussian, lambda side: ramp(side, side // 2), lambda side: ramp(side, 0)])
def test_weights_fall_alike_towards_both_edges(side: int, weights: Callable[[int], np.ndarray]) -> None:
    found = weights(side)
    assert np.allclose(found, found[::-1], rtol=1e-6)
    assert (np.diff(found[: (side + 1) // 2]) >= 0).all()


def test_the_middle_of_a_window_counts_most_and_mirrors_are_averaged() -> None:
    weights = gaussian(16)
    assert weights.argmax() in (7, 8)
    assert weights[0] < 0.02 < weights[4]
    volume = np.ones((1, 4, 4, 4), np.float32)
    corner = np.zeros((1, 1, 4, 4, 4), np.float32)
    corner[..., 0, 0, 0] = 8
    ((_, band),) = sliding_window(volume, (4, 4, 4), lambda tiles: corner, mirror=True)
    assert band.sum() == 8
    assert (band[0][::3, ::3, ::3] == 1).all()
