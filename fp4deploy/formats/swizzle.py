"""The 128x4 layout that tensor-core GEMMs read block scales in.

A tile of 128 rows and 4 blocks (64 elements of the contraction axis) is 512 consecutive bytes, so that one instruction
loads the scales of a whole tile. The byte of row r and block k stands at

    (r % 32) * 16 + (r / 32 % 4) * 4 + k % 4 + (k / 4) * 512 + (r / 128) * 512 * ceil(blocks / 4)

Rows are padded to a multiple of 128 and blocks to a multiple of 4, with zero bytes.

Source: NVIDIA, cuBLAS documentation, "1D Block Scaling Factors Layout".
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError

TILE_ROWS = 128
TILE_BLOCKS = 4


def swizzle_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] of one byte each (uint8, float8_e4m3fn) to their 128x4 layout, flat, same dtype.

    Raises:
        InputError: not two axes, or elements wider than a byte.
    """
    if scales.ndim != 2 or scales.element_size() != 1:
        raise InputError(
            f"The 128x4 layout takes scales [rows, blocks] of one byte, not {scales.dtype} {scales.shape}."
        )
    rows, blocks = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -blocks % TILE_BLOCKS, 0, -rows % TILE_ROWS))
    tiles = padded.view(padded.shape[0] // TILE_ROWS, 4, 32, padded.shape[1] // TILE_BLOCKS, TILE_BLOCKS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


def unswizzle_scales(swizzled: torch.Tensor, rows: int, blocks: int) -> torch.Tensor:
    """Undo `swizzle_scales`: flat bytes to [rows, blocks], same dtype.

    Raises:
        InputError: the number of bytes is not that of `rows` x `blocks` padded.
    """
    row_tiles, block_tiles = -(-rows // TILE_ROWS), -(-blocks // TILE_BLOCKS)
    expected = row_tiles * block_tiles * TILE_ROWS * TILE_BLOCKS
    if swizzled.element_size() != 1 or swizzled.numel() != expected:
        raise InputError(
            f"The 128x4 layout of {rows} x {blocks} scales has {expected} bytes; got {swizzled.numel()} elements of "
            f"{swizzled.dtype}."
        )
    tiles = swizzled.reshape(-1).view(torch.uint8).view(row_tiles, block_tiles, 32, 4, TILE_BLOCKS)
    matrix = tiles.permute(0, 3, 2, 1, 4).reshape(row_tiles * TILE_ROWS, block_tiles * TILE_BLOCKS)
    return matrix[:rows, :blocks].contiguous().view(swizzled.dtype)
