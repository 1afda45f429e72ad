"""MXFP4: blocks of 32 E2M1 elements and a power of two a block (E8M0), with no global scale.

    byte b of E8M0 stands for 2^(b - 127), 0xFF for NaN; with a the amax of a block
    floor   2^(floor(log2 a) - 2)      OCP's rule: an amax between 6 and 8 times the scale saturates
    ceil    2^ceil(log2(a / 6))        the smallest power that does not saturate ("round to infinity")

The exponent comes out of the bits of a, never out of a floating-point logarithm, which misplaces values one ulp from a
power of two. It is clamped to [-127, 127]. A block of zeros has byte 0; a block with a NaN or an Inf has byte 0xFF and
zero codes, so that it decodes to NaN.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0, sections 5.2 and 6.3; Mishra et al.,
"Recipes for Pre-training LLMs with MXFP8", 2025, for rounding the scale up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats.blocks import (
    crop,
    inner_axes,
    join_blocks,
    normalized_axis,
    pad_to_blocks,
    piece_axis,
    pieces,
    require_quantizable,
    split_blocks,
)
from fp4deploy.formats.constants import E2M1_MAX, MXFP4_BLOCK
from fp4deploy.formats.e2m1 import decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes
from fp4deploy.formats.philox import rounding_bytes

SCALE_RULES = ("floor", "ceil")
E8M0_NAN = 0xFF

_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Mxfp4Tensor:
    """A quantised tensor [..., K].

    codes: uint8 [..., ceil32(K)/2], two E2M1 codes a byte, low nibble first.
    scales: uint8 [..., ceil32(K)/32], E8M0 bytes.
    shape: the unpadded shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size

    def __repr__(self) -> str:
        stored = self.codes.nbytes + self.scales.nbytes
        return f"Mxfp4Tensor({tuple(self.shape)}, {stored} bytes, {self.codes.device})"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to `dtype`, shape `self.shape`."""
        blocks = decode_e2m1(unpack_codes(self.codes)).unflatten(-1, (self.scales.shape[-1], MXFP4_BLOCK))
        x = (decode_e8m0(self.scales).unsqueeze(-1) * blocks).flatten(-2)
        return x[..., : self.shape[-1]].to(dtype)


def quantize_mxfp4(
    x: torch.Tensor,
    scale_rule: str = "floor",
    rounding: str = "nearest",
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
) -> Mxfp4Tensor:
    """Quantise to packed MXFP4 codes and scales, blocks along the last axis.

    Args:
        x: any float dtype, shape [..., K], any strides; may be empty.
        scale_rule: "floor" or "ceil".
        rounding: "nearest" or "stochastic".
        seed: as of `quantize_nvfp4`.
        offset: as of `quantize_nvfp4`.

    Raises:
        InputError: an unknown option, no axes, or no dense tensor of floating point numbers.

    >>> m = quantize_mxfp4(torch.full((2, 32), 12.0))
    >>> m.codes.shape, m.scales.tolist()
    (torch.Size([2, 16]), [[128], [128]])
    >>> m.dequantize().unique()
    tensor([12.])
    """
    axes = mx_axes(x, -1, scale_rule, "MXFP4")
    random = rounding_bytes(x, axes[0], rounding, seed, offset, MXFP4_BLOCK)
    cut = piece_axis(x, axes)
    codes, scales = [], []
    for part, part_random in pieces(x, cut, axes, MXFP4_BLOCK, random):
        scaled, exponents = scale_blocks(part, axes, scale_rule)
        code = encode_e2m1(scaled, _blocked(part_random, axes)).masked_fill_(scaled.isnan(), 0)
        codes.append(pack_codes(join_blocks(code, axes)))
        scales.append(exponents.squeeze(-1))
    return Mxfp4Tensor(torch.cat(codes, cut), torch.cat(scales, cut), x.shape)


def fake_quantize_mxfp4(
    x: torch.Tensor,
    axis: int = -1,
    scale_rule: str = "floor",
    rounding: str = "nearest",
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
) -> torch.Tensor:
    """Quantise and dequantise along `axis` where the elements lie; the dtype and layout of `x`.

    Bitwise what `quantize_mxfp4(...).dequantize(x.dtype)` gives along that axis (the sign of a zero excepted).

    Raises:
        InputError: as `quantize_mxfp4`.
    """
    axes = mx_axes(x, axis, scale_rule, "MXFP4")
    random = rounding_bytes(x, axes[0], rounding, seed, offset, MXFP4_BLOCK)
    values = torch.empty_like(x)
    for part, value, part_random in pieces(x, piece_axis(x, axes), axes, MXFP4_BLOCK, values, random):
        scaled, exponents = scale_blocks(part, axes, scale_rule)
        quantized = round_e2m1(scaled, _blocked(part_random, axes)).mul_(decode_e8m0(exponents))
        value.copy_(crop(join_blocks(quantized, axes), part.shape))
    return values


def e8m0_scales(block_amax: torch.Tensor, scale_rule: str = "floor", largest: float = E2M1_MAX) -> torch.Tensor:
    """E8M0 bytes (uint8) of blocks with the amax `block_amax` (float32, any shape); `largest`: of the element."""
    mantissa, exponent_of_largest = math.frexp(largest)
    bits = block_amax.contiguous().view(torch.int32)
    exponent = (bits >> _MANTISSA_BITS) - (exponent_of_largest - 1)
    if scale_rule == "ceil":
        above = (bits & ((1 << _MANTISSA_BITS) - 1)) > int((2 * mantissa - 1) * (1 << _MANTISSA_BITS))
        exponent = exponent + above.to(torch.int32)
    return torch.where(torch.isfinite(block_amax), exponent.clamp(min=0), E8M0_NAN).to(torch.uint8)


def decode_e8m0(scales: torch.Tensor) -> torch.Tensor:
    """2^(b - 127) of E8M0 bytes (uint8), float32, same shape; 0xFF is NaN."""
    exponent = scales.to(torch.int32)
    smallest = torch.full((), 2.0**-127, device=scales.device)  # a kernel, where a copy would wait for the device
    values = torch.where(exponent == 0, smallest, (exponent << _MANTISSA_BITS).view(torch.float32))
    return torch.where(exponent == E8M0_NAN, float("nan"), values)


def scale_blocks(
    part: torch.Tensor, axes: tuple[int, ...], scale_rule: str, largest: float = E2M1_MAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """x / 2^(b - 127) in blocks of 32 (NaN in a block with a NaN or an Inf), and the byte b of each block."""
    blocks = split_blocks(pad_to_blocks(part.detach().to(torch.float32), axes, MXFP4_BLOCK), axes, MXFP4_BLOCK)
    scales = e8m0_scales(blocks.abs().amax(inner_axes(axes), keepdim=True), scale_rule, largest)
    inverse = ((254 - scales.to(torch.int32)) << _MANTISSA_BITS).view(torch.float32)
    return blocks * torch.where(scales == E8M0_NAN, float("nan"), inverse), scales


def mx_axes(x: torch.Tensor, axis: int, scale_rule: str, name: str) -> tuple[int, ...]:
    """The axis of the blocks, counted from the front.

    Raises:
        InputError: an unknown rule, or what the format `name` cannot quantise.
    """
    if scale_rule not in SCALE_RULES:
        raise InputError(f"Unknown scale rule '{scale_rule}'. Valid scale rules: {', '.join(SCALE_RULES)}.")
    require_quantizable(x, name)
    if x.ndim == 0:
        raise InputError(f"{name} blocks need an axis; this tensor has none.")
    return (normalized_axis(x, axis),)


def _blocked(random: torch.Tensor | None, axes: tuple[int, ...]) -> torch.Tensor | None:
    return None if random is None else split_blocks(random, axes, MXFP4_BLOCK)
