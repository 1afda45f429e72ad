"""E2M1, the 4-bit element: sign, 2 exponent bits, 1 mantissa bit.

    code   0   1   2    3   4   5   6   7        code + 8 = the same value, negative
    value  0  .5   1  1.5   2   3   4   6

Rounding is to nearest, ties to the even code: .25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4.
The values are the multiples of .5 below 2, of 1 below 4, of 2 up to 6, so that adding and subtracting 1.5 * 2^23 steps
in fp32 lets the hardware's own rounding do the work. A nonzero negative that rounds to 0 keeps its sign (code 8);
an input of -0.0 is code 0.

Stochastic rounding takes 8 random bits r an element: t = |u| + r/256 step(|u|), rounded down to a value. What is
exactly representable never moves, and the mean over r is |u| to within 1/256 of a step.

Two codes share a byte, the even element in the low nibble: the layout of torch's `float4_e2m1fn_x2` and of ONNX's
FLOAT4E2M1.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0, section 5.3.3.
"""

from __future__ import annotations

import torch

from fp4deploy.formats.constants import E2M1_MAX

_EXPONENT_BITS = 0x7F800000
_HALF_STEP_ROUNDER = 1.5 * 2**22


def round_e2m1(u: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Round to an E2M1 value, saturating at 6: the nearest, ties to even, or one of the two neighbours at random.

    Args:
        u: float32, any shape; NaN stays NaN.
        random: uint8, the shape of `u`; rounds up with a probability of the distance in steps, to 1/256 of a step.

    Returns:
        float32 of the same shape, each element one of ±`constants.E2M1_VALUES`.
    """
    u = u.clamp(-E2M1_MAX, E2M1_MAX)
    if random is not None:
        return _round_stochastically(u, random)
    rounder = _rounder(u.abs().clamp_(min=1.0))
    return u.add_(rounder).sub_(rounder)


def _rounder(magnitude: torch.Tensor) -> torch.Tensor:
    """What has the step at a magnitude (at least 1) as its ulp; in place."""
    binade = magnitude.view(torch.int32).bitwise_and_(_EXPONENT_BITS).view(torch.float32)
    return binade.mul_(_HALF_STEP_ROUNDER)


def _round_stochastically(u: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    magnitude = u.abs()
    dithered = magnitude + (random.to(torch.float32) * (1 / 256)) * _step(magnitude)
    step = _step(dithered)
    return ((dithered / step).floor_().mul_(step)).clamp_(max=E2M1_MAX).copysign_(u)


def _step(magnitude: torch.Tensor) -> torch.Tensor:
    """The distance between E2M1 values at a magnitude: .5 below 2, 1 below 4, else 2."""
    return 0.5 + 0.5 * (magnitude >= 2).to(torch.float32) + (magnitude >= 4).to(torch.float32)


def encode_e2m1(u: torch.Tensor, random: torch.Tensor | None = None) -> torch.Tensor:
    """Round float32 `u` (as `round_e2m1`) to E2M1 codes 0..15 (uint8, same shape)."""
    q = round_e2m1(u, random).abs_()
    code = torch.minimum(torch.minimum(2 * q, q + 2), q / 2 + 4).to(torch.uint8)
    return code.add_((u < 0).to(torch.uint8), alpha=8)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Map codes 0..15 (uint8, any shape) to their float32 values."""
    # computed, since a table would have to be copied to a GPU, which waits for it
    code = (codes & 7).to(torch.float32)
    magnitude = torch.maximum(torch.maximum(code / 2, code - 2), 2 * code - 8)
    return torch.where(codes > 7, -magnitude, magnitude)


def pack_codes(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes [..., K], K even, two a byte: uint8 [..., K/2], the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_codes(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_codes`: uint8 [..., K/2] -> uint8 [..., K]."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
