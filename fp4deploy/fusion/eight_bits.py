"""Activations in MXFP8, FP8 and INT8, decoded, in elementary operators that a compiler fuses.

    q = mxfp8_values(x, axis=1)                  `formats.fake_quantize_mxfp8` of x.float()
    q = codes(x, scale, "int8")                  the codes of `formats.quantize_int8`, as numbers

These numbers have at most eight significant bits and an exponent that bfloat16 has. So they are exact in it, and tensor
cores multiply them exactly (but of an MXFP8 block whose amax is below 2^-107).

**A code without a quotient.** x / s has to be rounded to float32 and then to a code, and a compiler may write a
quotient that is not rounded to the nearest. Of x in 16 bits x (1 / s) is used instead, whose error is at most 2^-23 of
it: x and s have at most 11 significant bits and a midpoint between two codes 8, so that x / s is a midpoint, or at
least 2^-19 of it away. Rounded to 21 bits the product is the midpoint in the one case, on its right side in the other.
Of x in float32 the quotient is one of float64, whose rounding to float32 is that of the exact one.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.formats.constants import E4M3_MAX, MXFP8_BLOCK
from fp4deploy.fusion.values import E4M3_ROUNDER, EXPONENT, INF, MAGNITUDE, SMALLEST_NORMAL

LIMITS = {"fp8": (-float(E4M3_MAX), float(E4M3_MAX)), "int8": (-128.0, 127.0)}
SNAP = 1.5 * 2**3  # times the binade of a number: leaves 20 bits of the mantissa
MANTISSA, LARGEST = 23, 8  # bits of the mantissa of float32; exponent of the largest E4M3 value, 1.75 x 2^8
ABOVE = 3 << 21  # 0.75: what the mantissa of 1.75 has


def codes(x: torch.Tensor, scale: float, precision: str) -> torch.Tensor:
    """Codes of `x` in FP8 or INT8 as numbers, bfloat16; scale: of all, as `formats.fp8.scale_of` gives it.

    >>> codes(torch.tensor([0.26, 3.0, -900.0]), 0.5, "int8").tolist(), codes(torch.tensor([3.3]), 0.5, "fp8").tolist()
    ([1.0, 6.0, -128.0], [6.5])
    """
    low, high = LIMITS[precision]
    if x.dtype == torch.float32:
        q = (x.double() / scale).float().clamp(low, high)
    else:
        q = (x.float() * float(1 / torch.tensor(scale))).clamp(low, high)
        step = q.view(torch.int32).bitwise_and(EXPONENT).view(torch.float32) * SNAP
        q = (q + step) - step
    if precision == "int8":
        return torch.where(q == q, q.round(), 0.0).to(torch.bfloat16)
    return _e4m3(q).to(torch.bfloat16)


def mxfp8_values(x: torch.Tensor, axis: int) -> torch.Tensor:
    """`fake_quantize_mxfp8(x.float(), axis)`, bfloat16, `axis` last in memory.

    >>> mxfp8_values(torch.tensor([448.0, 449.0, 17.0]), 0).tolist()
    [448.0, 448.0, 16.0]
    """
    last = x.movedim(axis, -1)
    size = last.shape[-1]
    padding = -size % MXFP8_BLOCK
    rows = (F.pad(last, (0, padding)) if padding else last).reshape(-1, (size + padding) // MXFP8_BLOCK, MXFP8_BLOCK)
    blocks = rows.to(torch.float32)
    bits = blocks.view(torch.int32).bitwise_and(MAGNITUDE).amax(-1, keepdim=True)
    above = bits.bitwise_and((1 << MANTISSA) - 1) > ABOVE
    exponent = ((bits >> MANTISSA) - LARGEST + above.to(torch.int32)).clamp(min=0)
    finite = bits < INF
    inverse = torch.where(finite, ((254 - exponent) << MANTISSA).view(torch.float32), torch.nan)
    unit = torch.where(exponent == 0, 2.0**-127, (exponent << MANTISSA).view(torch.float32))
    decoded = _e4m3((blocks * inverse).clamp(-E4M3_MAX, E4M3_MAX)) * unit
    if x.dtype != torch.float16:  # whose largest number is far from the largest of bfloat16
        most = torch.finfo(torch.bfloat16).max
        decoded = decoded.clamp(-most, most)
    whole = decoded.to(torch.bfloat16).reshape(*last.shape[:-1], size + padding)
    return (whole[..., :size].contiguous() if padding else whole).movedim(-1, axis)


def _e4m3(q: torch.Tensor) -> torch.Tensor:
    """Numbers of at most 448 rounded to E4M3; NaN stays NaN."""
    binade = q.abs().clamp(min=SMALLEST_NORMAL).view(torch.int32).bitwise_and(EXPONENT).view(torch.float32)
    rounder = binade * E4M3_ROUNDER
    return (q + rounder) - rounder
