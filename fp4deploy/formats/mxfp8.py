"""MXFP8: blocks of 32 E4M3 elements and a power of two a block (E8M0), with no global scale.

    floor   2^(floor(log2 a) - 8)        OCP's rule: an amax between 448 and 512 times the scale saturates
    ceil    2^ceil(log2(a / 448))        the smallest power that does not saturate
    q = E4M3(clamp(x / scale, -448, 448))        x' = scale q

Scales, zeros, NaN and Inf are those of MXFP4 (`mxfp4`), with 448 = 1.75 * 2^8 in place of 6. A NaN of the element
decodes to NaN as well: E4M3 has one. An instruction of kind mxf8f6f4 multiplies this format with MXFP4.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", v1.0; Mishra et al., "Recipes for
Pre-training LLMs with MXFP8", 2025, for rounding the scale up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.formats.blocks import crop, join_blocks, piece_axis, pieces
from fp4deploy.formats.constants import E4M3_MAX, MXFP8_BLOCK
from fp4deploy.formats.mxfp4 import decode_e8m0, mx_axes, scale_blocks


@dataclass(frozen=True)
class Mxfp8Tensor:
    """A quantised tensor [..., K].

    codes: float8_e4m3fn [..., ceil32(K)].
    scales: uint8 [..., ceil32(K)/32], E8M0 bytes.
    shape: the unpadded shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to `dtype`, shape `self.shape`."""
        blocks = self.codes.to(torch.float32).unflatten(-1, (self.scales.shape[-1], MXFP8_BLOCK))
        x = (decode_e8m0(self.scales).unsqueeze(-1) * blocks).flatten(-2)
        return narrowed(x[..., : self.shape[-1]], dtype)


def narrowed(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Values in another type, at most its largest number: 64000 is quantised to 65536, which FP16 does not have."""
    largest = min(torch.finfo(dtype).max, torch.finfo(x.dtype).max)
    return x.clamp(-largest, largest).to(dtype)


def quantize_mxfp8(x: torch.Tensor, scale_rule: str = "ceil") -> Mxfp8Tensor:
    """Quantise to MXFP8 codes and scales, blocks along the last axis, rounded to nearest even.

    Args:
        x: any float dtype, shape [..., K].
        scale_rule: "floor" or "ceil".

    Raises:
        InputError: an unknown rule, no axes, or no dense tensor of floating point numbers.

    >>> m = quantize_mxfp8(torch.full((2, 32), 12.0))
    >>> m.codes.shape, m.scales.tolist(), m.dequantize().unique()
    (torch.Size([2, 32]), [[122], [122]], tensor([12.]))
    """
    axes = mx_axes(x, -1, scale_rule, "MXFP8")
    scaled, scales = scale_blocks(x, axes, scale_rule, E4M3_MAX)
    return Mxfp8Tensor(join_blocks(_round(scaled), axes), scales.squeeze(-1), x.shape)


def fake_quantize_mxfp8(x: torch.Tensor, axis: int = -1, scale_rule: str = "ceil") -> torch.Tensor:
    """Quantise and dequantise along `axis` where the elements lie; the dtype and layout of `x`.

    Bitwise what `quantize_mxfp8(...).dequantize(x.dtype)` gives along that axis.

    Raises:
        InputError: as `quantize_mxfp8`.

    >>> fake_quantize_mxfp8(torch.tensor([448.0, 449.0, 17.0])).tolist()
    [448.0, 448.0, 16.0]
    """
    axes = mx_axes(x, axis, scale_rule, "MXFP8")
    values = torch.empty_like(x)
    for part, value in pieces(x, piece_axis(x, axes), axes, MXFP8_BLOCK, values):
        scaled, scales = scale_blocks(part, axes, scale_rule, E4M3_MAX)
        quantized = _round(scaled).to(torch.float32).mul_(decode_e8m0(scales))
        value.copy_(narrowed(crop(join_blocks(quantized, axes), part.shape), x.dtype))
    return values


def _round(scaled: torch.Tensor) -> torch.Tensor:
    return scaled.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
