"""MXFP8: blocks of 32 E4M3 elements and a power of two a block (E8M0), with no global scale.

    with a the amax of a block      scale = 2^ceil(log2(a / 448))      q = E4M3(x / scale)      x' = scale q

The scale is the smallest power of two that does not saturate; its byte is clamped as that of MXFP4. A block of zeros
has byte 0; a block with a NaN or an Inf decodes to NaN. The exponent comes out of the bits of a: 448 is 1.75 * 2^8.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0; Mishra et al., "Recipes for
Pre-training LLMs with MXFP8", 2025, for rounding the scale up.
"""

from __future__ import annotations

import torch

from fp4deploy.formats.blocks import crop, inner_axes, join_blocks, normalized_axis, pad_to_blocks, split_blocks
from fp4deploy.formats.constants import E4M3_MAX
from fp4deploy.formats.mxfp4 import E8M0_NAN, decode_e8m0

BLOCK = 32
_MANTISSA_BITS = 23
_MANTISSA_OF_1_75 = 3 << 21
_EXPONENT_OF_448 = 8


def fake_quantize_mxfp8(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Quantise to MXFP8 in blocks along `axis` and dequantise, rounded to nearest even; dtype and shape of `x`.

    >>> fake_quantize_mxfp8(torch.tensor([448.0, 449.0, 17.0])).tolist()
    [448.0, 448.0, 16.0]
    """
    axes = (normalized_axis(x, axis),)
    blocks = split_blocks(pad_to_blocks(x.detach().to(torch.float32), axes, BLOCK), axes, BLOCK)
    scales = mxfp8_scales(blocks.abs().amax(inner_axes(axes), keepdim=True))
    inverse = ((254 - scales.to(torch.int32)) << _MANTISSA_BITS).view(torch.float32)
    scaled = (blocks * torch.where(scales == E8M0_NAN, float("nan"), inverse)).clamp(-E4M3_MAX, E4M3_MAX)
    values = scaled.to(torch.float8_e4m3fn).to(torch.float32) * decode_e8m0(scales)
    return crop(join_blocks(values, axes), x.shape).to(x.dtype)


def mxfp8_scales(block_amax: torch.Tensor) -> torch.Tensor:
    """E8M0 bytes (uint8) of blocks with the amax `block_amax` (float32, any shape)."""
    bits = block_amax.contiguous().view(torch.int32)
    above = (bits & ((1 << _MANTISSA_BITS) - 1)) > _MANTISSA_OF_1_75
    exponent = (bits >> _MANTISSA_BITS) - _EXPONENT_OF_448 + above.to(torch.int32)
    return torch.where(torch.isfinite(block_amax), exponent.clamp(min=0), E8M0_NAN).to(torch.uint8)
