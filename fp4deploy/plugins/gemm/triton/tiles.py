"""Which tile a product is computed with, and every variant that this can lead to.

A program computes BM x BN outputs and walks the depth in steps of BK bytes, 2 BK elements. Large tiles decode less (an
element of the image is decoded once for each BN outputs), small ones leave no multiprocessor idle; the choices for the
decoding path were measured on an H200 (`benchmarks/products.py --sweep`), the native ones are projected: Blackwell's
block-scaled instructions of SM100 need BM = 128, below that Triton falls back to float16.
"""

from __future__ import annotations

from dataclasses import dataclass

NATIVE_FROM = 100
MOST_TAPS = 9  # of a filter, to take several a step: with more, the masks of loads spill registers
FILL = 132  # programs that give every multiprocessor of a large GPU something to do


@dataclass(frozen=True)
class Tile:
    """BM x BN outputs, BK bytes of depth a step, warps of a program, stages of the software pipeline."""

    bm: int
    bn: int
    bk: int
    warps: int
    stages: int


WIDE = Tile(256, 128, 32, 8, 3)
DEEP = Tile(256, 128, 64, 8, 3)
SQUARE = Tile(128, 256, 64, 8, 3)  # one tap
TALL_NARROW = Tile(256, 64, 32, 4, 3)
TALL_THIN = Tile(256, 32, 32, 4, 3)
TALL_THINNEST = Tile(256, 16, 32, 4, 3)
MIDDLE = Tile(128, 128, 32, 8, 3)
NARROW = Tile(128, 64, 32, 4, 3)
SMALL = Tile(64, 64, 32, 4, 3)
LEAN = Tile(16, 64, 128, 4, 4)  # weight-only, few rows
TALL = Tile(128, 128, 32, 8, 3)  # weight-only, many rows
NATIVE_WIDE = Tile(128, 128, 64, 8, 3)
NATIVE_NARROW = Tile(128, 64, 64, 8, 3)
NATIVE_LEAN = Tile(16, 64, 128, 8, 4)


def product_tile(
    rows: int,
    columns: int,
    capability: int,
    quantize: bool = False,
    up: bool = False,
    two: bool = False,
    taps: int = 9,
    depth: int = 32,
) -> Tile:
    """The tile of a product of packed operands.

    rows, columns: of the output; capability: 90 for SM90; quantize: the output is packed, up: it is scattered to four
    pixels, both of which take registers; two: two sources; taps: of the filter; depth: bytes of a source's channels, or
    what divides those of both.
    """
    if capability >= NATIVE_FROM:
        return NATIVE_NARROW if columns <= 64 or quantize or up else NATIVE_WIDE
    if rows <= 64 or (quantize and capability < 90):
        return SMALL
    if quantize or capability < 90:
        return NARROW
    if columns <= 64:
        tall = TALL_THINNEST if columns <= 16 else TALL_THIN if columns <= 32 else TALL_NARROW
        return tall if -(-rows // 256) >= FILL else NARROW
    if -(-rows // 256) * -(-columns // 128) < FILL:
        return MIDDLE
    if up or depth % 64:
        return WIDE
    return SQUARE if taps == 1 and columns > 128 and not two else DEEP


def step_constants(tile: Tile, taps: int, depths: tuple[int, ...]) -> dict[str, int]:
    """What a step of the tile takes of a filter.

    taps: of the filter; depths: bytes of a tap in each source. EVEN: a tap is whole steps in each; TAPS: how many a
    step takes, more than one where all sources have the same few channels and the filter has at most nine taps.
    """
    few = 1 < taps <= MOST_TAPS and tile.bk % depths[0] == 0 and len({*depths}) == 1
    return {"EVEN": all(depth % tile.bk == 0 for depth in depths), "TAPS": tile.bk // depths[0] if few else 1}


def weight_only_tile(rows: int, capability: int) -> Tile:
    """The tile of a weight-only product."""
    lean = NATIVE_LEAN if capability >= NATIVE_FROM else LEAN
    return lean if rows <= 64 else TALL


def tiles(capability: int, quantize: bool, up: bool, two: bool, taps: int, depth: int) -> tuple[Tile, ...]:
    """All that `product_tile` can choose for these."""
    sizes = [(rows, columns) for rows in (1, 100, 1 << 20) for columns in (1, 17, 33, 65, 129)]
    chosen = {product_tile(*size, capability, quantize, up, two, taps, depth) for size in sizes}
    return tuple(sorted(chosen, key=lambda tile: (tile.bm, tile.bn)))
