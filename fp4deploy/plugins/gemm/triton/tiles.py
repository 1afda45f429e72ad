"""The tile of a GEMM, and every tile that can be chosen.

A program computes BM x BN outputs and walks along K in steps of BK bytes, 2 BK elements. Large tiles decode less (an
element of the activations is decoded once for each BN outputs), small ones leave no multiprocessor idle. The choices
for the decoding path were measured on an H200 (`benchmarks/products.py --sweep`). The native ones are projected:
block-scaled MMA of SM100 needs BM = 128, below that Triton falls back to float16.
"""

from __future__ import annotations

from dataclasses import dataclass

NATIVE_FROM = 100
# Taps of a filter for several a step: with more than nine, the masks of the loads spill registers. A 3x3x3 filter of 16
# or 32 channels has 4 to 14 steps instead of 27, and on SM100 fewer registers; it spills nowhere (compiled for SM90,
# SM100 and SM120 by Triton 3.7.1, 2026-11-29). Not measured.
MAX_TAPS, CUBE = 9, 27
FILL = 132  # programs of a full wave on a large GPU


@dataclass(frozen=True)
class Tile:
    """BM x BN outputs, BK bytes of K a step, warps of a program, stages of the software pipeline."""

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
SMALL_M = Tile(16, 64, 128, 4, 4)  # weight-only
TALL = Tile(128, 128, 32, 8, 3)  # weight-only
NATIVE_WIDE = Tile(128, 128, 64, 8, 3)
NATIVE_NARROW = Tile(128, 64, 64, 8, 3)
NATIVE_SMALL_M = Tile(16, 64, 128, 8, 4)


def gemm_tile(
    rows: int,
    columns: int,
    capability: int,
    quantize: bool = False,
    transposed: bool = False,
    two: bool = False,
    taps: int = 9,
    depth: int = 32,
) -> Tile:
    """The tile of a GEMM or convolution with both operands packed.

    rows, columns: M and N; capability: 90 for SM90; quantize: the epilogue packs the output, up: it scatters it to four
    pixels, and both need registers; two: two sources; taps: of the filter; depth: bytes of a source's channels, or the
    greatest common divisor of both.
    """
    if capability >= NATIVE_FROM:
        return NATIVE_NARROW if columns <= 64 or quantize or transposed else NATIVE_WIDE
    if rows <= 64 or (quantize and capability < 90):
        return SMALL
    if quantize or capability < 90:
        return NARROW
    if columns <= 64:
        tall = TALL_THINNEST if columns <= 16 else TALL_THIN if columns <= 32 else TALL_NARROW
        return tall if -(-rows // 256) >= FILL else NARROW
    if -(-rows // 256) * -(-columns // 128) < FILL:
        return MIDDLE
    if transposed or depth % 64:
        return WIDE
    return SQUARE if taps == 1 and columns > 128 and not two else DEEP


def k_step_constants(tile: Tile, taps: int, depths: tuple[int, ...]) -> dict[str, int]:
    """The constants EVEN and TAPS of the main loop.

    taps: of the filter; depths: bytes of a tap in each source. EVEN: a tap is whole steps in each source. TAPS: taps of
    a step, more than one where all sources have the same few channels and the filter has at most nine taps, or 27.
    """
    few = (1 < taps <= MAX_TAPS or taps == CUBE) and tile.bk % depths[0] == 0 and len({*depths}) == 1
    return {"EVEN": all(depth % tile.bk == 0 for depth in depths), "TAPS": tile.bk // depths[0] if few else 1}


def weight_only_tile(rows: int, capability: int) -> Tile:
    """The tile of a weight-only GEMM."""
    small = NATIVE_SMALL_M if capability >= NATIVE_FROM else SMALL_M
    return small if rows <= 64 else TALL


def tiles(capability: int, quantize: bool, transposed: bool, two: bool, taps: int, depth: int) -> tuple[Tile, ...]:
    """Every tile that `gemm_tile` can choose for these."""
    sizes = [(rows, columns) for rows in (1, 100, 1 << 20) for columns in (1, 17, 33, 65, 129)]
    chosen = {gemm_tile(*size, capability, quantize, transposed, two, taps, depth) for size in sizes}
    return tuple(sorted(chosen, key=lambda tile: (tile.bm, tile.bn)))
