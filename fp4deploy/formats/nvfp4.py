"""NVFP4: blocks of 16 E2M1 elements, an E4M3 scale a block, one fp32 global scale a tensor (or a row).

    q  = E2M1(clamp(x * e, -6, 6))      d8 and e as `scales` makes them from a block's amax and the global amax A
    x' = ((d8 * A) * fp32(1 / 6E)) * q

A may be static (calibrated) instead of the tensor's own; blocks beyond it saturate. Blocks are 1-D (16 elements along
the contraction axis, finer) or 2-D (16 x 16, so that a matrix and its transpose quantise alike). A row-scaled tensor
has one A a row. A contraction axis that is not a multiple of 16 is padded with zeros.

A block with a NaN or an Inf gets the NaN scale 0x7F and zero codes, so that it decodes to NaN and the damage shows;
A is taken over the finite elements, so that other blocks are unaffected.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025; the order of operations is this project's own.
"""

from __future__ import annotations

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
from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, NVFP4_BLOCK
from fp4deploy.formats.e2m1 import decode_e2m1, encode_e2m1, pack_codes, round_e2m1, unpack_codes
from fp4deploy.formats.four_over_six import FourOverSix, choose_scales
from fp4deploy.formats.philox import rounding_bytes
from fp4deploy.formats.scales import block_scales, block_step, finite_amax

BLOCK_AXES = {"1d": (-1,), "2d": (-2, -1)}


@dataclass(frozen=True)
class Nvfp4Tensor:
    """A quantised tensor [..., R, K].

    codes: uint8 [..., R, ceil16(K)/2], two E2M1 codes a byte, low nibble first.
    scales: float8_e4m3fn [..., R, ceil16(K)/16]; for 2-D blocks repeated on the 16 rows of a tile.
    amax: float32 [], the global amax A (static or the tensor's own); row-scaled: [..., R].
    shape: the unpadded shape.
    e4m3_max: 448, or 256 with 4/6.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    amax: torch.Tensor
    shape: torch.Size
    e4m3_max: int = int(E4M3_MAX)

    @property
    def as_bytes(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes and scales, contiguous uint8, and the amax: the arguments of a kernel."""
        return self.codes.contiguous(), self.scales.view(torch.uint8).contiguous(), self.amax

    def __repr__(self) -> str:
        stored = self.codes.nbytes + self.scales.nbytes
        return f"Nvfp4Tensor({tuple(self.shape)}, {stored} bytes, {self.codes.device})"

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Decode to `dtype`, shape `self.shape`."""
        blocks = decode_e2m1(unpack_codes(self.codes)).unflatten(-1, (self.scales.shape[-1], NVFP4_BLOCK))
        amax = self.amax.unsqueeze(-1) if self.amax.ndim else self.amax
        x = (block_step(self.scales, amax, self.e4m3_max).unsqueeze(-1) * blocks).flatten(-2)
        return x[..., : self.shape[-1]].to(dtype)


def quantize_nvfp4(
    x: torch.Tensor,
    block: str = "1d",
    amax: float | torch.Tensor | None = None,
    row_scaled: bool = False,
    four_over_six: FourOverSix | None = None,
    rounding: str = "nearest",
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
) -> Nvfp4Tensor:
    """Quantise to packed NVFP4 codes and scales, blocks along the last axis.

    Args:
        x: any float dtype, shape [..., K], any strides; may be empty.
        block: "1d" (1 x 16) or "2d" (16 x 16 over the last two axes).
        amax: static global amax, [] or, row-scaled, one a row [..., R]; None takes that of the finite elements of `x`.
        row_scaled: a global amax for each row (1-D blocks only).
        four_over_six: let each block choose between mapping its amax to 6 and to 4.
        rounding: "nearest" or "stochastic" (not with 4/6).
        seed: of the random bits of stochastic rounding (`philox`); None draws one from torch.
        offset: where in the random stream of that seed the bits begin.

    Raises:
        InputError: an unknown or contradictory option, fewer axes than the blocks need, no dense tensor of floating
            point numbers, an `amax` that is negative, NaN or Inf.

    >>> x = torch.tensor([[0.0, 0.5, 1.0, -6.0] + [3.0] * 12])
    >>> q = quantize_nvfp4(x)
    >>> q.codes.shape, q.scales.shape, q.amax.item()
    (torch.Size([1, 8]), torch.Size([1, 1]), 6.0)
    >>> torch.equal(q.dequantize(), x)
    True
    """
    axes = _block_axes(x, block)
    require_amax(amax)
    if row_scaled and isinstance(amax, torch.Tensor) and amax.ndim:
        amax = amax.unsqueeze(-1)
    global_amax, random = _prepare(x, axes, amax, row_scaled, four_over_six, rounding, seed, offset)
    cut = piece_axis(x, axes)
    codes, scales = [], []
    for part, part_amax, part_random in pieces(x, cut, axes, NVFP4_BLOCK, global_amax, random):
        scaled, d8 = _scale(part, axes, part_amax, four_over_six)
        values = join_blocks(
            encode_e2m1(scaled, _blocked_bytes(part_random, axes)).masked_fill_(scaled.isnan(), 0), axes
        )
        codes.append(pack_codes(values if part.ndim == 1 else values[..., : part.shape[-2], :]))
        scales.append(_per_row(d8.to(torch.float8_e4m3fn).view(torch.uint8), part, axes))
    return Nvfp4Tensor(
        torch.cat(codes, cut),
        torch.cat(scales, cut).view(torch.float8_e4m3fn),
        global_amax.squeeze(-1) if row_scaled else global_amax,
        x.shape,
        _e4m3_max(four_over_six),
    )


def fake_quantize_nvfp4(
    x: torch.Tensor,
    axes: tuple[int, ...] = (-1,),
    amax: float | torch.Tensor | None = None,
    row_scaled: bool = False,
    four_over_six: FourOverSix | None = None,
    rounding: str = "nearest",
    seed: int | torch.Tensor | None = None,
    offset: int | torch.Tensor = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise and dequantise where the elements lie, whichever axis the GEMM contracts, without a transposed copy.

    Args:
        x: any float dtype, any layout (NCHW, channels_last, OIHW, ...).
        axes: the contraction axis (1-D blocks), or the other axis and the contraction axis (16 x 16 blocks).
        amax: static global amax, [] or, row-scaled, the shape of `x` with the contraction axis 1; None takes that of
            the finite elements of `x`.
        row_scaled, four_over_six, rounding, seed, offset: as `quantize_nvfp4`.

    Returns:
        x' in the dtype and layout of `x`, bitwise what `quantize_nvfp4(...).dequantize(x.dtype)` gives along that axis
        (the sign of a zero excepted), and the in-range mask, bool: elements that did not saturate, |x * e| <= 6.

    Raises:
        InputError: an unknown or contradictory option, no axes, or no dense tensor of floating point numbers.
    """
    require_quantizable(x, "NVFP4")
    if x.ndim == 0:
        raise InputError("NVFP4 quantises floating-point tensors with an axis, not a single number.")
    axes = tuple(normalized_axis(x, axis) for axis in axes)
    global_amax, random = _prepare(x, axes, amax, row_scaled, four_over_six, rounding, seed, offset)
    values, in_range = torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)
    cut = piece_axis(x, axes)
    for part, value, mask, part_amax, part_random in pieces(
        x, cut, axes, NVFP4_BLOCK, values, in_range, global_amax, random
    ):
        scaled, d8 = _scale(part, axes, part_amax, four_over_six)
        step = block_step(d8, _blocked_amax(part_amax, axes), _e4m3_max(four_over_six))
        mask.copy_(crop(join_blocks(scaled.abs() <= E2M1_MAX, axes), part.shape))
        quantized = round_e2m1(scaled, _blocked_bytes(part_random, axes)).mul_(step)
        value.copy_(crop(join_blocks(quantized, axes), part.shape))
    return values, in_range


def check_options(axes: tuple[int, ...], row_scaled: bool, four_over_six: FourOverSix | None, rounding: str) -> None:
    """Refuse combinations that NVFP4 does not have.

    Raises:
        InputError: row-scaled 2-D blocks, or 4/6 with stochastic rounding.
    """
    if row_scaled and len(axes) > 1:
        raise InputError("A row-scaled tensor has one global amax a row; it goes with 1-D blocks, not 2-D ones.")
    if four_over_six and rounding != "nearest":
        raise InputError("4/6 compares the errors of rounding to nearest; it does not go with stochastic rounding.")


def _prepare(
    x: torch.Tensor,
    axes: tuple[int, ...],
    amax: float | torch.Tensor | None,
    row_scaled: bool,
    four_over_six: FourOverSix | None,
    rounding: str,
    seed: int | torch.Tensor | None,
    offset: int | torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The global amax, shaped to broadcast against `x`, and the random bytes of stochastic rounding."""
    check_options(axes, row_scaled, four_over_six, rounding)
    random = rounding_bytes(x, axes[-1], rounding, seed, offset, NVFP4_BLOCK)
    if amax is None:
        return finite_amax(x.detach(), axes[-1] if row_scaled else None), random
    return static_amax(x, axes[-1], amax, row_scaled), random


def require_amax(amax: object) -> None:
    """Refuse a global amax that is none. The values of a tensor on a GPU are not read, which would wait for it.

    Raises:
        InputError: negative, NaN or Inf, or no numbers.
    """
    if amax is None or (isinstance(amax, torch.Tensor) and not _readable(amax)):
        return
    try:
        values = torch.as_tensor(amax, dtype=torch.float32).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"A global amax is a number or a tensor of numbers, not {type(amax).__name__}.") from error
    wrong = ~(values >= 0) | values.isinf()
    if bool(wrong.any()):
        raise InputError(
            f"A global amax is the largest absolute value, a finite number from 0 on, and this one is "
            f"{values[wrong][0].item():g}."
        )


def _readable(x: torch.Tensor) -> bool:
    """Whether values can be read without waiting for a GPU, and are there: not those that a compiler traces."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter) and x.device.type == "cpu" and not torch.compiler.is_compiling()
    )


def static_amax(x: torch.Tensor, axis: int, amax: float | torch.Tensor, row_scaled: bool) -> torch.Tensor:
    """A given global amax as float32 on the device of `x`: [], or row-scaled the shape of `x` with `axis` 1.

    Raises:
        InputError: another shape, or a number that `require_amax` refuses.
    """
    if not isinstance(amax, torch.Tensor):
        require_amax(amax)
    static = torch.as_tensor(amax, dtype=torch.float32, device=x.device).detach()
    rows = torch.Size(1 if at == axis else size for at, size in enumerate(x.shape))
    if static.ndim == 1 and static.shape[0] == 1 and not row_scaled:
        static = static[0]
    if row_scaled and static.ndim == 0:
        static = static.expand(rows)
    if static.shape != (rows if row_scaled else ()):
        expected = f"one value a row, {tuple(rows)}" if row_scaled else "a single value"
        raise InputError(f"The global amax has shape {tuple(static.shape)}; expected {expected}.")
    return static


def _scale(
    part: torch.Tensor, axes: tuple[int, ...], amax: torch.Tensor, four_over_six: FourOverSix | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x * e in blocks (NaN in a block with a NaN or an Inf), and d8 of each block."""
    padded = pad_to_blocks(part.detach().to(torch.float32), axes, NVFP4_BLOCK)
    blocks = split_blocks(padded, axes, NVFP4_BLOCK)
    global_amax = _blocked_amax(amax, axes)
    block_amax = blocks.abs().amax(inner_axes(axes), keepdim=True)
    if four_over_six:
        d8, encode = choose_scales(blocks, axes, block_amax, global_amax, four_over_six)
    else:
        d8, encode = block_scales(block_amax, global_amax)
    return blocks * torch.where(d8.isnan() & block_amax.isfinite().logical_not(), d8, encode), d8


def _blocked_amax(amax: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The global amax (of the tensor, or size 1 along the contraction axis) shaped to broadcast against blocks."""
    return split_blocks(amax, axes, 1) if amax.ndim else amax


def _blocked_bytes(random: torch.Tensor | None, axes: tuple[int, ...]) -> torch.Tensor | None:
    return None if random is None else split_blocks(pad_to_blocks(random, axes, NVFP4_BLOCK), axes, NVFP4_BLOCK)


def _e4m3_max(four_over_six: FourOverSix | None) -> int:
    return four_over_six.e4m3_max if four_over_six else int(E4M3_MAX)


def _block_axes(x: torch.Tensor, block: str) -> tuple[int, ...]:
    if block not in BLOCK_AXES:
        raise InputError(f"Unknown block '{block}'. Valid blocks: {', '.join(BLOCK_AXES)}.")
    require_quantizable(x, "NVFP4")
    if x.ndim < len(BLOCK_AXES[block]):
        raise InputError(f"{block} blocks need at least {len(BLOCK_AXES[block])} axes; this tensor has {x.ndim}.")
    return tuple(axis % x.ndim for axis in BLOCK_AXES[block])


def _per_row(scales: torch.Tensor, part: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """Scale bytes [..., R, K/16], a 2-D tile's scale repeated on its 16 rows."""
    if len(axes) == 1:
        return scales.squeeze(-1)
    rows = scales.squeeze(-1).squeeze(-2).repeat_interleave(NVFP4_BLOCK, dim=-2)
    return rows[..., : part.shape[-2], :]
