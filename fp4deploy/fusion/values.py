"""NVFP4 values of an activation whose amax is known, in elementary operators that a compiler fuses.

    q = values(y, scale_of(amax), axis=1)        the numbers that codes and block scales stand for, without the codes

A GPU before Blackwell multiplies decoded operands. Where a library's GEMM is the fastest kernel of a layer, nobody
reads the codes: what computes y writes the decoded values in FP16, 2 bytes an element as without quantisation. Fused
into a copy it takes the time of the copy (43.0 us against 42.3 for [168960, 256], one H200, torch 2.11, 2026-11-28).

**Exact in FP16.** An element times its block scale has at most 6 significant bits and is a multiple of 2^-10 up to
2688: exact in FP16 times any power of two from 2^-14 to 2^4. The global scale A / 6E is not: values get the unit
2^`Scale.exponent` instead, and the result of the GEMM is multiplied with the quotient (`fp4deploy.packed.writer`).

**Few instructions.** The block amax, the limit of 6 and the binade of an element are found in the bits of its
magnitude, where NaN is above Inf and that above every number: no comparison has to look for NaN. e and d8 are the
contract's (`formats.scales`), bit for bit; a block with a NaN or an Inf gets the scale NaN. The sign of a zero is that
of the element, where codes have none for what underflows: no sum sees it. 1 / (d8 / S) is read from a table of all d8:
a compiler may write a float32 quotient that is not rounded to the nearest, and a float64 one costs more than the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK
from fp4deploy.formats.scales import FLT_MAX, block_step, constant, encoding_scale
from fp4deploy.plugins.runtime.torch_library import operator

MAGNITUDE, EXPONENT = 0x7FFFFFFF, 0x7F800000  # bits of float32
ONE, SIX, INF = 0x3F800000, 0x40C00000, 0x7F800000
ROUNDER = 1.5 * 2**22  # times the binade of u: leaves one mantissa bit
E4M3_ROUNDER = 1.5 * 2**20  # leaves three
SMALLEST_NORMAL = 2.0**-6  # of E4M3
FIRST_SCALE, SCALES = 943, 144  # bits from 20 up of the float32 below the smallest E4M3 value, 2^-9; how many up to 448
EXPONENTS = (-14, 4)  # of two: times an element and its block scale still exact in FP16


@dataclass(frozen=True, eq=False)
class Scale:
    """What quantises with one amax A, float32 [] each on its device.

    sixth: S fp32(1/6), times a block's amax the unrounded block scale; amax: A.
    encode: float32 [144], what elements are multiplied with, by the bits of their block's scale d8 (`_block_scale`).
    exponent: k, where one unit of E2M1 stands for 2^k times the block scale; None: for the block scale times A / 6E, as
        in the contract.
    """

    sixth: torch.Tensor
    encode: torch.Tensor
    amax: torch.Tensor
    exponent: int | None


def scale_of(amax: torch.Tensor, exponent: int | None = None) -> Scale:
    """The scale of an amax, float32 []."""
    encode = encoding_scale(amax)
    sixth = torch.where(amax > 0, encode * constant(1 / E2M1_MAX, amax), torch.zeros_like(amax))
    bits = torch.arange(FIRST_SCALE, FIRST_SCALE + SCALES, dtype=torch.int32, device=amax.device) << 20
    decode = bits.view(torch.float32) * (constant(1.0, amax) / encode)
    table = (constant(1.0, amax) / decode).clamp(max=FLT_MAX)
    table[0] = 0.0
    return Scale(sixth, table, amax, exponent)


def values(y: torch.Tensor, scale: Scale, axis: int, dtype: torch.dtype) -> torch.Tensor:
    """`y` quantised in blocks of 16 along `axis`, decoded, in `dtype`; its shape, `axis` last in memory."""
    operator = torch.ops.fp4deploy.nvfp4_values
    found: torch.Tensor = operator(y, scale.sixth, scale.encode, scale.amax, axis, scale.exponent, dtype)
    return found


def _fake_nvfp4_values(y, sixth, encode, amax, axis, exponent, dtype):  # type: ignore[no-untyped-def]
    return torch.empty(y.movedim(axis, -1).shape, dtype=dtype, device=y.device).movedim(-1, axis)


@operator(
    "nvfp4_values(Tensor y, Tensor sixth, Tensor encode, Tensor amax, int axis, int? exponent, ScalarType dtype)"
    " -> Tensor",
    _fake_nvfp4_values,
    "CompositeExplicitAutograd",
)
def elementary_values(
    y: torch.Tensor,
    sixth: torch.Tensor,
    encode: torch.Tensor,
    amax: torch.Tensor,
    axis: int,
    exponent: int | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """What `values` stands for."""
    last = y.to(dtype).movedim(axis, -1)
    size = last.shape[-1]
    padding = -size % NVFP4_BLOCK
    # One run of blocks, whatever the axes: so intermediate results have one order in memory.
    rows = (F.pad(last, (0, padding)) if padding else last).reshape(-1, (size + padding) // NVFP4_BLOCK, NVFP4_BLOCK)
    blocks = rows.to(torch.float32)
    largest = blocks.view(torch.int32).bitwise_and(MAGNITUDE).amax(-1, keepdim=True)
    d8, factor = _block_scale(largest, sixth, encode)
    scaled = blocks * factor
    magnitude = scaled.view(torch.int32).bitwise_and(MAGNITUDE).clamp(max=SIX)
    binade = magnitude.clamp(min=ONE).bitwise_and(EXPONENT).view(torch.float32)
    rounder = binade * ROUNDER
    rounded = (magnitude.view(torch.float32) + rounder) - rounder
    sign = scaled.view(torch.int32).bitwise_and(~MAGNITUDE)
    units = rounded.view(torch.int32).bitwise_or(sign).view(torch.float32)
    step = block_step(d8, amax) if exponent is None else d8 * 2.0**exponent
    decoded = (units * step).to(dtype).reshape(*last.shape[:-1], size + padding)
    return (decoded[..., :size].contiguous() if padding else decoded).movedim(-1, axis)


def _block_scale(largest: torch.Tensor, sixth: torch.Tensor, encode: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(d8, e) of blocks, from the bits of their largest magnitude; d8 is NaN where that is no number."""
    finite = largest < INF
    unrounded = (largest.clamp(max=INF - 1).view(torch.float32) * sixth).clamp(max=float(E4M3_MAX))
    rounder = unrounded.clamp(min=SMALLEST_NORMAL).view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    rounder = rounder * E4M3_ROUNDER
    d8 = (unrounded + rounder) - rounder
    # Of an E4M3 value at most three bits follow the leading one: what is above bit 20 of the float32 says which it is.
    place = (d8.view(torch.int32) >> 20).clamp(min=FIRST_SCALE) - FIRST_SCALE
    return torch.where(finite, d8, torch.nan), torch.ops.aten._unsafe_index.Tensor(encode, [place])
