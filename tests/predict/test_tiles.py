"""Tiles cover every pixel, agree with the whole image for a network without context, and are blended smoothly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fp4deploy.data.tiles import ramp, starts, tiled
from fp4deploy.errors import InputError
from fp4deploy.predict.predictor import Predictor
from tests.predict.pointwise import Pointwise, card, classes_of, photo


@pytest.mark.parametrize("length", [1, 31, 32, 33, 100, 1000])
@pytest.mark.parametrize("overlap", [0, 1, 8, 16])
def test_tiles_reach_every_pixel_and_share_the_overlap(length: int, overlap: int) -> None:
    tile = 32
    found = starts(length, tile, overlap)
    assert found[0] == 0
    assert found[-1] == max(0, length - tile)
    assert all(0 < after - before <= tile - overlap for before, after in itertools.pairwise(found))


@pytest.mark.parametrize("size", [(33, 48), (32, 49), (64, 96), (101, 67), (200, 31), (17, 300)])
@pytest.mark.parametrize("overlap", [0, 5, 16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_network_without_context_sees_no_tiles(size: tuple[int, int], overlap: int, batch: int) -> None:
    image = photo(*size)
    network = Pointwise(card())

    def infer(tiles: list[np.ndarray]) -> np.ndarray:
        assert all(tile.shape == (32, 48, 3) for tile in tiles)
        assert len(tiles) <= batch
        return network.infer(np.stack(tiles).transpose(0, 3, 1, 2).astype(np.float32) / 255)

    mask = np.full(size, 255, np.uint8)
    for row, band in tiled(image, (32, 48), overlap, infer, batch):
        assert band.shape[2] == size[1]
        assert (mask[row : row + band.shape[1]] == 255).all()
        mask[row : row + band.shape[1]] = band.argmax(0)
    assert (mask == classes_of(image)).all()


def test_overlaps_are_averaged_by_distance_to_the_edge() -> None:
    numbers = iter(range(100))

    def infer(tiles: list[np.ndarray]) -> np.ndarray:  # each tile is constant: its number
        return np.stack([np.full((1, 8, 8), next(numbers), np.float32) for _ in tiles])

    (band,) = (values for _, values in tiled(np.zeros((8, 12, 3), np.uint8), (8, 8), 4, infer))
    left, right = ramp(8, 4)[4:], ramp(8, 4)[:4]
    assert np.allclose(band[0, 3], [0, 0, 0, 0, *(right / (left + right)), 1, 1, 1, 1])
    assert (np.diff(band[0, 3]) >= 0).all()


def test_memory_does_not_grow_with_the_height() -> None:
    held = [band.shape[1] for _, band in tiled(np.zeros((2000, 40, 3), np.uint8), (32, 48), 8, _zeros)]
    assert max(held) <= 32
    assert sum(held) == 2000


def _zeros(tiles: list[np.ndarray]) -> np.ndarray:
    return np.zeros((len(tiles), 2, 32, 48), np.float32)


@pytest.mark.parametrize("overlap", [-1, 17, 1000])
def test_an_overlap_beyond_half_a_tile_is_refused(overlap: int) -> None:
    with pytest.raises(InputError, match="0 to 16"):
        Predictor(Pointwise(card()), tile=True, overlap=overlap).predict(photo(100, 100))


@pytest.mark.variants
@pytest.mark.slow
def test_an_image_of_8192_pixels_is_what_its_pixels_are() -> None:
    """With classes, in 63 tiles of 512 x 512 that share 128 pixels."""
    rows, strip = 1024, 512
    image, network = photo(rows, 8192), Pointwise(card(512, 512))
    found = Predictor(network, tile=True).predict(image).mask
    assert len(network.batches) == 63
    for row in range(0, rows, strip):
        assert (found[row : row + strip] == classes_of(image[row : row + strip])).all()
