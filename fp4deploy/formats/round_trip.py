"""NVFP4 there and back in one go: what a packed activation decodes to, for a CPU that multiplies decoded operands.

    round_trip_nvfp4(x, A)  =  quantize_nvfp4(x, amax=A).dequantize()        every bit, the sign of a zero included

No codes are made. On a small feature map an operation costs what its call costs, on a large one a pass over memory, so
there are few:

* e and the step of a block depend on its scale byte alone: they are looked up in a table of the global amax, both
  floats of an entry as one 64-bit number.
* x e is rounded as the decomposed graph rounds it (`export.onnx.decomposed_quantize`): with M = max(floor |u|, 1) K and
  K = 1.25 * 2^22, q = (u + M) - M. The product with K is exact, hence part of the sum.
* Signs are put back only where there are negative elements: there are none behind a ReLU.
* The largest of 16 neighbours is a pooling window's: torch vectorises no reduction of so short an axis.
* Factors are tensors [] that are kept: a Python number becomes one in each call, with a copy.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fp4deploy.formats.blocks import crop, pad_to_blocks
from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK
from fp4deploy.formats.scales import block_step, constant, encoding_scale, kept, round_scales

PIECE = 1 << 15  # blocks: temporaries that stay in the cache
ROWS = 64  # that a pooling of blocks is split into: for threads, and each stays in the L1 cache
ROUNDER = 1.25 * 2**22


def round_trip_nvfp4(x: torch.Tensor, amax: torch.Tensor, rectified: bool = False) -> torch.Tensor:
    """Values of `x` [..., K] quantised in blocks of 16 along the last axis with the global amax, float32 [].

    Args:
        rectified: nothing in `x` is below 0, as behind a ReLU (NaN may be); otherwise that is looked for.

    Returns:
        float32 [..., K].
    """
    wide = pad_to_blocks(x.detach().to(torch.float32), (x.ndim - 1,), NVFP4_BLOCK).contiguous()
    values, (sixth, table) = torch.empty_like(wide), _scale_table(amax.item())
    blocks, outs = wide.view(-1, NVFP4_BLOCK), values.view(-1, NVFP4_BLOCK)
    for start in range(0, len(blocks), PIECE):
        whole = len(blocks) <= PIECE
        part, out = (each if whole else each[start : start + PIECE] for each in (blocks, outs))
        _round_trip(part, sixth, table, out, rectified or part.amin().item() >= 0)  # a NaN is not
    return crop(values, x.shape)


def _round_trip(
    blocks: torch.Tensor, sixth: torch.Tensor, table: torch.Tensor, out: torch.Tensor, rectified: bool
) -> None:
    encode, step = _look_up(_block_amax(blocks if rectified else torch.abs(blocks, out=out)), sixth, table)
    if rectified:
        scaled = torch.mul(blocks, encode, out=out).clamp_(max=E2M1_MAX)
        magnitude = scaled.clamp(min=1.0).floor_()
    else:  # a negative element that underflows has code 0, without a sign: 0 + -0.0 is 0.0
        scaled = torch.addcmul(kept(0.0), blocks, encode).clamp_(-E2M1_MAX, E2M1_MAX)
        magnitude = scaled.abs().clamp_(min=1.0).floor_()
    torch.add(scaled, magnitude, alpha=ROUNDER, out=out).sub_(magnitude, alpha=ROUNDER)
    if not rectified:
        out.copysign_(scaled)
    out.mul_(step)


def _look_up(block_amax: torch.Tensor, sixth: torch.Tensor, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """e and step of each block, float32 [M, 1]; `block_amax` [M] is overwritten."""
    block_amax.nan_to_num_(torch.nan, torch.nan)  # an Inf damages its block as a NaN does
    scales = block_amax.mul_(sixth).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn)
    # -0.0 has the byte 0x80, whose entry is that of 0
    found = table.index_select(0, scales.view(torch.uint8).to(torch.int32)).view(torch.float32).view(-1, 2)
    encode, step = found.chunk(2, 1)
    return encode, step


@lru_cache(maxsize=1024)
def _scale_table(amax: float) -> tuple[torch.Tensor, torch.Tensor]:
    """S * fp32(1/6), and (e, step) of each of 256 scale bytes as one float64, by the rules of `scales`.

    Where A is 0 every scale is 0, so that the factor is.
    """
    whole = torch.tensor(amax)
    scale = encoding_scale(whole)
    sixth = scale * constant(1 / E2M1_MAX, scale) if amax > 0 else kept(0.0)
    magnitude = torch.arange(256, dtype=torch.uint8).bitwise_and_(0x7F)
    d8 = magnitude.view(torch.float8_e4m3fn).to(torch.float32)
    _, encode = round_scales(d8, d8, torch.tensor(1.0), scale)
    pairs = torch.stack([encode, block_step(d8, whole)], dim=1)
    return sixth, pairs.view(torch.float64).flatten()


def _block_amax(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest of each block [M, 16], M above 0, as [M]; NaN where one is."""
    rows = magnitude.view(1, math.gcd(len(magnitude), ROWS), -1)
    return torch.max_pool1d(rows, NVFP4_BLOCK).view(-1)
