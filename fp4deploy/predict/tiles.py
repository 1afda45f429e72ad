"""Images larger than the network, at their own resolution: overlapping tiles whose outputs are blended.

A tile has the network's input size. Neighbours overlap by at least `overlap` pixels; the tiles of a row are spread
evenly, so that the last one ends with the image. In an overlap the outputs are averaged with weights that fall linearly
towards a tile's edge, where the network sees the least context:

    output(p) = sum_t w_t(p) * output_t(p) / sum_t w_t(p)        w_t = min(distance to the nearest edge, overlap)

Rows of tiles are taken from top to bottom, and the rows of pixels that no later tile reaches are handed on at once. So
the outputs that are held at once are one tile high, whatever the height of the image.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from fp4deploy.data.sample import Pixels
from fp4deploy.errors import InputError

Outputs = NDArray[np.float32]


def starts(length: int, tile: int, overlap: int) -> list[int]:
    """First pixel of each tile along one side; [0] where one tile holds it all.

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
    image = _padded(image, tile)
    weight = np.outer(ramp(tile[0], overlap), ramp(tile[1], overlap))
    columns, rows = starts(image.shape[1], tile[1], overlap), starts(image.shape[0], tile[0], overlap)
    total: Outputs | None = None  # the number of channels is known after the first tile
    weights = np.zeros((tile[0], image.shape[1]), np.float32)
    for number, row in enumerate(rows):
        for first in range(0, len(columns), batch):
            chosen = columns[first : first + batch]
            outputs = network([image[row : row + tile[0], column : column + tile[1]] for column in chosen])
            if total is None:
                total = np.zeros((outputs.shape[1], *weights.shape), np.float32)
            for column, output in zip(chosen, outputs, strict=True):
                total[:, :, column : column + tile[1]] += weight * output
                weights[:, column : column + tile[1]] += weight
        assert total is not None
        end = rows[number + 1] if number + 1 < len(rows) else row + tile[0]
        done = end - row
        band = total[:, :done] / weights[:done]
        if height - row > 0:
            yield row, band[:, : height - row, :width]
        for held in (total, weights):
            held[..., : tile[0] - done, :] = held[..., done:, :].copy()
            held[..., tile[0] - done :, :] = 0


def _padded(image: Pixels, tile: tuple[int, int]) -> Pixels:
    down, across = (max(0, side - size) for side, size in zip(tile, image.shape[:2], strict=True))
    return np.pad(image, ((0, down), (0, across), (0, 0)), mode="edge") if down or across else image
