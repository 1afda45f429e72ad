"""Inputs larger than the network, at their own resolution: overlapping tiles whose outputs are blended.

A tile has the network's input size, along two axes or three. Neighbours overlap by at least `overlap` places along each
axis; the tiles of a row are spread evenly, so that the last one ends with the input. In an overlap the outputs are
averaged with weights that fall towards a tile's edge, where the network sees the least context:

    output(p) = sum_t w_t(p) * output_t(p) / sum_t w_t(p)

    images     w_t = product over the axes of min(distance to the nearest edge, overlap)
    volumes    w_t = product over the axes of exp(-(distance to the middle)^2 / (2 (tile / 8)^2)), as nnU-Net's

Rows of tiles are taken along the first axis, and what no later tile reaches is handed on at once. So the outputs that
are held at once are one tile high, whatever the height of the input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from itertools import product

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.sample import Pixels
from fp4deploy.errors import InputError

Outputs = NDArray[np.float32]
Place = tuple[slice, ...]  # of a tile, along each spatial axis
MIN_WEIGHT = 1e-3  # of a volume's tile; its middle has 1


def starts(length: int, tile: int, overlap: int) -> list[int]:
    """First place of each tile along one axis; [0] where one tile holds it all.

    >>> starts(1000, 352, 64)
    [0, 216, 432, 648]
    """
    if length <= tile:
        return [0]
    count = math.ceil((length - tile) / (tile - overlap)) + 1
    return [round(place) for place in np.linspace(0, length - tile, count)]


def ramp(tile: int, overlap: int) -> Outputs:
    """Weights of one side of a tile, in 1..max(1, overlap)."""
    place = np.arange(tile)
    return np.minimum(np.minimum(place, place[::-1]) + 1, max(1, overlap)).astype(np.float32)


def gaussian(tile: int) -> Outputs:
    """Weights of one side of a volume's tile, in 0..1."""
    away = np.arange(tile) - (tile - 1) / 2
    return np.exp(-0.5 * (away / (tile / 8)) ** 2).astype(np.float32)


def blended(
    size: Sequence[int],
    sides: Sequence[Outputs],
    overlaps: Sequence[int],
    network: Callable[[list[Place]], Outputs],
    batch: int = 1,
) -> Iterator[tuple[int, Outputs]]:
    """Outputs over an input of `size`, in bands along the first axis.

    Args:
        size: of the spatial axes, none smaller than a tile.
        sides: the weights of a tile along each axis; their product is that of a place.
        overlaps: least number of places that neighbours share along each axis.
        network: where some tiles lie -> their outputs float32 [N, channels, *tile].
        batch: tiles given to the network at once.

    Yields:
        (first place, outputs float32 [channels, places, *size[1:]]); the bands cover the input.
    """
    tile = [len(side) for side in sides]
    weight = np.maximum(reduce(np.multiply.outer, sides), MIN_WEIGHT)
    rows, *others = (starts(*each) for each in zip(size, tile, overlaps, strict=True))
    places = list(product(*others))
    total: Outputs | None = None  # the number of channels is known after the first tile
    weights = np.zeros((tile[0], *size[1:]), np.float32)
    for number, row in enumerate(rows):
        for first in range(0, len(places), batch):
            chosen = [
                tuple(slice(at, at + side) for at, side in zip(place, tile[1:], strict=True))
                for place in places[first : first + batch]
            ]
            outputs = network([(slice(row, row + tile[0]), *place) for place in chosen])
            if total is None:
                total = np.zeros((outputs.shape[1], *weights.shape), np.float32)
            for place, output in zip(chosen, outputs, strict=True):
                below = (slice(None), *place)
                within = (slice(None), *below)
                total[within] += weight * output
                weights[below] += weight
        assert total is not None
        done = (rows[number + 1] if number + 1 < len(rows) else row + tile[0]) - row
        yield row, total[:, :done] / weights[:done]
        for held in (total.swapaxes(0, 1), weights):
            held[: tile[0] - done] = held[done:].copy()
            held[tile[0] - done :] = 0


def tiled(
    image: Pixels,
    tile: tuple[int, int],
    overlap: int,
    network: Callable[[list[Pixels]], Outputs],
    batch: int = 1,
) -> Iterator[tuple[int, Outputs]]:
    """Outputs of a large image, in bands of rows from top to bottom.

    Args:
        image: uint8 [H, W, 3]. A side shorter than a tile is continued by its last pixels.
        tile: height and width of the network's input.
        overlap: least number of pixels that neighbours share.
        network: tiles uint8 [h, w, 3] -> outputs float32 [N, channels, h, w].
        batch: tiles given to the network at once.

    Yields:
        (first row, outputs float32 [channels, rows, W]); the bands cover the image.

    Raises:
        InputError: the overlap is not smaller than half a tile.
    """
    if not 0 <= overlap <= min(tile) // 2:
        raise InputError(f"The overlap of tiles is {overlap} pixels; it must be 0 to {min(tile) // 2}, half a tile.")
    height, width = image.shape[:2]
    down, across = (max(0, side - size) for side, size in zip(tile, image.shape[:2], strict=True))
    image = np.pad(image, ((0, down), (0, across), (0, 0)), mode="edge") if down or across else image
    sides = [ramp(side, overlap) for side in tile]

    def outputs(places: list[Place]) -> Outputs:
        return network([image[place] for place in places])

    for row, band in blended(image.shape[:2], sides, (overlap, overlap), outputs, batch):
        if height - row > 0:
            yield row, band[:, : height - row, :width]


def sliding_window(
    volume: NDArray[np.float32],
    tile: Sequence[int],
    network: Callable[[NDArray[np.float32]], Outputs],
    batch: int = 1,
    mirror: bool = False,
) -> Iterator[tuple[int, Outputs]]:
    """Outputs of a normalised volume, in bands of slices; neighbouring tiles share half a tile.

    Args:
        volume: float32 [C, *size]. An axis shorter than a tile is continued by 0, the mean, on both sides.
        tile: the network's input size.
        network: tiles float32 [N, C, *tile] -> outputs float32 [N, channels, *tile].
        mirror: average the outputs of each tile with those of its mirror images along every axis.

    Yields:
        (first slice, outputs float32 [channels, slices, *size[1:]]); the bands cover the volume.
    """
    size = volume.shape[1:]
    before = [max(0, side - own) // 2 for side, own in zip(tile, size, strict=True)]
    lacking = [max(0, side - own) for side, own in zip(tile, size, strict=True)]
    if any(lacking):
        padding = [(0, 0), *((left, all_ - left) for left, all_ in zip(before, lacking, strict=True))]
        volume = np.pad(volume, padding)
    inside = tuple(slice(left, left + own) for left, own in zip(before, size, strict=True))
    every = range(2, 2 + len(size))
    subsets = product((False, True), repeat=len(size))
    flips = [tuple(axis for axis, on in zip(every, each, strict=True) if on) for each in subsets]

    def outputs(places: list[Place]) -> Outputs:
        tiles = np.stack([_at(volume, place) for place in places])
        found = [
            np.flip(network(np.ascontiguousarray(np.flip(tiles, axes))), axes)
            for axes in flips[: None if mirror else 1]
        ]
        return found[0] if len(found) == 1 else np.mean(found, axis=0, dtype=np.float32)

    sides, overlaps = [gaussian(side) for side in tile], [side // 2 for side in tile]
    for first, band in blended(volume.shape[1:], sides, overlaps, outputs, batch):
        rows = inside[0] if lacking[0] else slice(None)  # one band, where the volume is lower than a tile
        yield first, _at(band, (rows, *inside[1:]))


def _at(values: NDArray[np.float32], place: Place) -> NDArray[np.float32]:
    """A part of [C, *size]."""
    index = (slice(None), *place)
    return values[index]
