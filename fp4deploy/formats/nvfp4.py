"""NVFP4: blocks of 16 E2M1 elements, an E4M3 scale a block, one fp32 global scale a tensor.

With A the global amax, a the amax of a block and E = 448 the largest E4M3 value, all in fp32 and in this order:

    S  = min(6E / A, FLT_MAX)           encodes: the largest block's scale becomes exactly E
    d8 = E4M3(min(a * (S * fp32(1/6)), E))
    e  = min(1 / (d8 * (1 / S)), FLT_MAX)
    q  = E2M1(clamp(x * e, -6, 6))
    x' = ((d8 * A) * fp32(1 / 6E)) * q  decodes

A may be static (calibrated) instead of the tensor's own; blocks beyond it saturate. Blocks are 1-D (16 elements along
the contraction axis, finer) or 2-D (16 x 16, so that a matrix and its transpose quantise alike). A contraction axis
that is not a multiple of 16 is padded with zeros.

A block with a NaN or an Inf gets the NaN scale 0x7F and zero codes, so that it decodes to NaN and the damage shows;
A is taken over the finite elements, so that other blocks are unaffected.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, for the two-level scale; the order of operations
is this project's contract, checked bitwise against public references.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from fp4deploy.errors import InputError
from fp4deploy.formats.e2m1 import E2M1_MAX, decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes

BLOCK = 16
E4M3_MAX = 448.0
FLT_MAX = torch.finfo(torch.float32).max
BLOCK_AXES = {"1d": (-1,), "2d": (-2, -1)}


@dataclass(frozen=True)
class Nvfp4Tensor:
    """A quantised tensor [..., R, K].

    codes: uint8 [..., R, ceil16(K)/2], two E2M1 codes a byte, low nibble first.
    scales: float8_e4m3fn [..., R, ceil16(K)/16]; for 2-D blocks repeated on the 16 rows of a tile.
    amax: float32 [], the global amax A (static or the tensor's own).
    shape: the unpadded shape.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    shape: torch.Size

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to `dtype`, shape `self.shape`."""
        blocks = decode_e2m1(unpack_codes(self.codes)).unflatten(-1, (-1, BLOCK))
        x = (block_step(self.scales, self.amax).unsqueeze(-1) * blocks).flatten(-2)
        return x[..., : self.shape[-1]].to(dtype)


def quantize_nvfp4(x: torch.Tensor, block: str = "1d", amax: float | torch.Tensor | None = None) -> Nvfp4Tensor:
    """Quantise to packed NVFP4 codes and scales, blocks along the last axis.

    Args:
        x: any float dtype, shape [..., K], any strides; may be empty.
        block: "1d" (1 x 16) or "2d" (16 x 16 over the last two axes).
        amax: static global amax; None takes the amax of the finite elements of `x`.

    Raises:
        InputError: unknown `block`, fewer axes than it needs, a dtype that is not floating point.
    """
    axes = _block_axes(x, block)
    padded = pad_to_blocks(x.detach().to(torch.float32), axes)
    global_amax = _global_amax(padded, amax)
    blocks, inner = _split(padded, axes)
    scales, encode = block_scales(blocks.abs().amax(inner, keepdim=True), global_amax)
    codes = _join(encode_e2m1(blocks * encode).where(encode != 0, 0), axes)
    row_scales = _per_row(scales, padded, axes)
    if padded.shape != x.shape and x.ndim > 1:
        codes, row_scales = codes[..., : x.shape[-2], :], row_scales[..., : x.shape[-2], :]
    return Nvfp4Tensor(pack_codes(codes), row_scales, global_amax, x.shape)


def fake_quantize_nvfp4(
    x: torch.Tensor, axes: tuple[int, ...] = (-1,), amax: float | torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and dequantise in place of axis order, without a transposed copy.

    Args:
        x: any float dtype, any layout (NCHW, channels_last, OIHW, ...).
        axes: the contraction axis (1-D blocks), or two axes for 16 x 16 blocks.
        amax: static global amax; None takes the amax of the finite elements of `x`.

    Returns:
        x' in the dtype and layout of `x`, bitwise what `quantize_nvfp4(...).dequantize(x.dtype)` gives along that axis
        (the sign of a zero excepted), and the bool mask of elements that did not saturate, |x * e| <= 6.
    """
    axes = tuple(axis % x.ndim for axis in axes)
    padded = pad_to_blocks(x.detach().to(torch.float32), axes)
    global_amax = _global_amax(padded, amax)
    blocks, inner = _split(padded, axes)
    scales, encode = block_scales(blocks.abs().amax(inner, keepdim=True), global_amax)
    scaled = blocks * encode
    inside = scaled.abs() <= E2M1_MAX
    values = round_e2m1(scaled).mul_(block_step(scales, global_amax))
    return _crop(_join(values, axes), x).to(x.dtype), _crop(_join(inside, axes), x)


def block_scales(block_amax: torch.Tensor, global_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 block scales d8 (float8_e4m3fn) and the encoding multipliers e (float32), shaped like `block_amax`.

    e is 0 where every code of the block is 0: zero scales, and blocks with a NaN or an Inf, whose d8 is NaN (0x7F).
    """
    scale = (E2M1_MAX * E4M3_MAX / global_amax).clamp(max=FLT_MAX)
    scale = torch.where((scale == 0) | (global_amax == 0), 1.0, scale)
    sixth = scale * torch.tensor(1 / 6, dtype=torch.float32, device=scale.device)
    live = torch.isfinite(block_amax) & (global_amax > 0)
    d8 = torch.where(live, block_amax * sixth, 0.0).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    decoded = d8.to(torch.float32)
    encode = torch.where(decoded > 0, (1 / (decoded * (1 / scale))).clamp(max=FLT_MAX), 0.0)
    broken = ~torch.isfinite(block_amax)
    return torch.where(broken, float("nan"), decoded).to(torch.float8_e4m3fn), encode


def block_step(scales: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """What one unit of E2M1 stands for in each block: (d8 * A) * fp32(1 / 6E), float32, shaped like `scales`."""
    inverse = torch.tensor(1 / (E2M1_MAX * E4M3_MAX), dtype=torch.float32, device=scales.device)
    return (scales.to(torch.float32) * amax) * inverse


def _global_amax(x: torch.Tensor, amax: float | torch.Tensor | None) -> torch.Tensor:
    if amax is not None:
        return torch.as_tensor(amax, dtype=torch.float32, device=x.device).detach()
    if x.numel() == 0:
        return torch.zeros((), device=x.device)
    magnitude = x.abs()
    return torch.where(torch.isfinite(magnitude), magnitude, 0.0).amax()


def _block_axes(x: torch.Tensor, block: str) -> tuple[int, ...]:
    if block not in BLOCK_AXES:
        raise InputError(f"Unknown block '{block}'. Valid blocks: {', '.join(BLOCK_AXES)}.")
    if not x.is_floating_point():
        raise InputError(f"NVFP4 quantises floating-point tensors, not {x.dtype}.")
    if x.ndim < len(BLOCK_AXES[block]):
        raise InputError(f"{block} blocks need at least {len(BLOCK_AXES[block])} axes; this tensor has {x.ndim}.")
    return tuple(axis % x.ndim for axis in BLOCK_AXES[block])


def pad_to_blocks(x: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Pad with zeros to a multiple of 16 along `axes` (0 or more); `x` itself where nothing is missing."""
    if all(x.shape[axis] % BLOCK == 0 for axis in axes):
        return x
    widths = [0] * (2 * x.ndim)
    for axis in axes:
        widths[2 * (x.ndim - 1 - axis) + 1] = -x.shape[axis] % BLOCK
    return F.pad(x, widths)


def _split(x: torch.Tensor, axes: tuple[int, ...]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """View each of `axes` as (blocks, 16); also the positions of the 16s."""
    for axis in sorted(axes, reverse=True):
        x = x.unflatten(axis, (x.shape[axis] // BLOCK, BLOCK))
    return x, tuple(axis + 1 + order for order, axis in enumerate(sorted(axes)))


def _join(blocks: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Undo `_split`."""
    for axis in sorted(axes):
        blocks = blocks.flatten(axis, axis + 1)
    return blocks


def _crop(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Undo `_pad`."""
    return x if x.shape == like.shape else x[tuple(slice(size) for size in like.shape)]


def _per_row(scales: torch.Tensor, padded: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Scales [..., R, K/16], a 2-D tile's scale repeated on its 16 rows."""
    if len(axes) == 1:
        return scales.squeeze(-1)
    rows = scales.view(torch.uint8).squeeze(-1).squeeze(-2).repeat_interleave(BLOCK, dim=-2)
    return rows.view(torch.float8_e4m3fn)
