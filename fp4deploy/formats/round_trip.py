"""NVFP4 there and back in one go: what a packed activation decodes to, for a CPU that multiplies decoded operands.

    round_trip_nvfp4(x, A)  =  quantize_nvfp4(x, amax=A).dequantize()        every bit, the sign of a zero included

Neither codes nor bytes are made. The block scales are those of `scales`; an element's magnitude is rounded and scaled
where it lies, and the signs are put back only where there are negative elements: there are none behind a ReLU. The
largest of 16 neighbours comes from four maxima of halves, which torch vectorises, unlike a reduction of a short axis.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fp4deploy.formats.blocks import crop, pad_to_blocks
from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK, nvfp4_range
from fp4deploy.formats.e2m1 import round_magnitudes
from fp4deploy.formats.scales import FLT_MAX, block_scales, constant, encoding_scale

INVERSE_RANGE = torch.tensor(1 / nvfp4_range()).item()  # of float32
PIECE = 1 << 13  # blocks: temporaries that stay in a core's cache
FEW = 1 << 11  # blocks for which one slow reduction beats many short operations


def round_trip_nvfp4(x: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """Values of `x` [..., K] quantised in blocks of 16 along the last axis with the global amax, float32 [].

    Returns:
        float32 [..., K].
    """
    wide = pad_to_blocks(x.detach().to(torch.float32), (x.ndim - 1,), NVFP4_BLOCK).contiguous()
    values, largest = torch.empty_like(wide), amax.item()
    blocks, outs = (each.view(-1, NVFP4_BLOCK) for each in (wide, values))
    for start in range(0, len(blocks), PIECE):
        _round_trip(blocks[start : start + PIECE], largest, outs[start : start + PIECE])
    return crop(values, x.shape)


def _round_trip(blocks: torch.Tensor, amax: float, out: torch.Tensor) -> None:
    signed = not blocks.amin().item() >= 0  # also with a NaN
    magnitude = blocks.abs() if signed else blocks
    d8, encode = _scales(_block_amax(magnitude), amax, signed)
    torch.mul(magnitude, encode, out=out)
    round_magnitudes(out.clamp_(max=E2M1_MAX))
    if signed:
        out.copysign_(blocks.mul(encode).add_(0.0))  # a negative element that underflows has code 0, without a sign
    out.mul_(d8.mul_(amax).mul_(INVERSE_RANGE))


def _scales(block_amax: torch.Tensor, amax: float, signed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`scales.block_scales`; in fewer passes where everything is finite, as it nearly always is.

    A block whose scale is 0 decodes to zeros whatever it is encoded with, and only negative elements show in their sign
    that it was 0.
    """
    if not amax > 0 or not math.isfinite(block_amax.max().item()):
        return block_scales(block_amax, torch.tensor(amax))
    sixth, decode = _encoding(amax)
    d8 = block_amax.mul_(sixth).clamp_(max=E4M3_MAX).to(torch.float8_e4m3fn).to(torch.float32)
    encode = (d8 * decode).reciprocal_().clamp_(max=FLT_MAX)
    return d8, encode.masked_fill_(d8 == 0, 0.0) if signed else encode


@lru_cache(maxsize=1024)
def _encoding(amax: float) -> tuple[float, float]:
    """S * fp32(1/6) and 1 / S of a global amax."""
    scale = encoding_scale(torch.tensor(amax))
    return (scale * constant(1 / E2M1_MAX, scale)).item(), (1 / scale).item()


def _block_amax(magnitude: torch.Tensor) -> torch.Tensor:
    """The largest of each block, [M, 1]; NaN where one is."""
    if len(magnitude) < FEW:
        return magnitude.amax(1, keepdim=True).abs_()
    width = magnitude.shape[-1]
    while width > 1:
        width //= 2
        magnitude = torch.maximum(magnitude[:, :width], magnitude[:, width:])
    return magnitude.abs_()  # -0.0 counts as 0.0
