"""Quantisation in torch operators, each as one operator of torch until it is compiled.

    traced_quantize     x' and a bit an element for the gradient, also of relu(x)
    traced_keep         the same, and x' as codes and scales, 0.63 bytes a value, for the weight gradient (`codes`)
    traced_decode       x' from them
    traced_amax         the largest finite magnitude, of blocks first
    traced_norm_amax    that of a normalised tensor, from its moments (`norms`)
    traced_track        the running amax of a static scale
    traced_pass         the gradient where the bit is set
    traced_damax        the gradient of a learned amax (`qat.operators.learned`), from what was quantised
    traced_rectify      relu or leaky ReLU, and a bit an element; traced_unrectify is its gradient

Elementary operators, sixty for a quantiser, are what a compiler fuses. But a network of fifty quantisers is traced
twice, differentiated and divided into what the forward keeps and what the backward computes again, and with them that
takes longer than generating kernels. So these operators stay whole for that long, and `expand` puts in the elementary
ones right before kernels are generated. It also fixes what the forward keeps: x' in the dtype of x, and a sixteenth of
it in bits.

Called without a compiler they compute the same numbers. Blocks are 16 elements of an axis, which counts from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, nvfp4_range
from fp4deploy.formats.scales import FLT_MAX, ZEROS_AMAX, tracked_amax
from fp4deploy.plugins.runtime.torch_library import like_first, operator, scalar

BINADE = 0x7F800000
E2M1_ROUNDER = 1.5 * 2**22  # times the binade of u: leaves one mantissa bit
E4M3_ROUNDER = 1.5 * 2**20  # leaves three
SMALLEST_NORMAL = 2.0**-6  # of E4M3


def quantize(
    x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, clips: bool, rectified: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x', bits of the elements whose gradient passes; none where all do)."""
    values, bits, *_ = _quantized_units(x, amax, axis, groups, clips, rectified)
    return values, bits


def quantize_and_keep(
    x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, clips: bool, rectified: bool
) -> tuple[torch.Tensor, ...]:
    """`quantize`, and x' as it is kept: codes int64 and scales float16 [..., groups, blocks]."""
    values, bits, units, scales, scaled = _quantized_units(x, amax, axis, groups, clips, rectified)
    return values, bits, _pack_units(units, scaled), scales.squeeze(-1).to(torch.float16)


def _quantized_units(
    x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, clips: bool, rectified: bool
) -> tuple[torch.Tensor, ...]:
    """`quantize`, and what `_in_units` gives."""
    y = torch.relu(x) if rectified else x
    units, scales, scaled = _in_units(y, amax, axis, groups)
    values = _from_units(units, scales, amax, axis, x.shape[axis], x.dtype)
    if not (clips or rectified):
        return values, torch.empty(0, dtype=torch.int16, device=x.device), units, scales, scaled
    in_range = scaled.abs() <= E2M1_MAX
    positive = split(x, axis, groups) > 0 if rectified else in_range
    return values, pack(positive & in_range if clips and rectified else positive), units, scales, scaled


def decode(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, axis: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """x' of `quantize_and_keep`, bit for bit; `size`: elements of the axis."""
    return _from_units(_unpack_units(codes), scales.to(torch.float32).unsqueeze(-1), amax, axis, size, dtype)


def amax(x: torch.Tensor) -> torch.Tensor:
    """float32 []. The amax of a block is found in the kernel that computes it; what is read again is a sixteenth."""
    magnitude = x.abs().to(torch.float32)
    finite = torch.where(magnitude < math.inf, magnitude, 0.0)
    if x.ndim > 2 and x.shape[1] % NVFP4_BLOCK == 0:
        finite = split(finite, 1 - x.ndim, 1).amax(-1)
    return finite.amax()


def norm_amax(
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    slope: float,
) -> torch.Tensor:
    """float32 []: of leaky_relu(w (x - mean) rstd + b, slope) in `dtype`, from the extremes of each channel of x."""
    axes = [axis for axis in range(x.ndim) if mean.shape[axis] == 1]
    shape = (1, -1, *(1,) * (x.ndim - 2))
    magnitudes = []
    for extreme in (x.amax(axes, keepdim=True), x.amin(axes, keepdim=True)):
        value = (extreme.float() - mean) * rstd
        value = value if weight is None else value * weight.view(shape)
        value = (value if bias is None else value + bias.view(shape)).to(dtype)
        value = value if slope == 1 else F.leaky_relu(value, slope) if slope else torch.relu(value)
        magnitudes.append(value.abs() if slope else value)
    largest = torch.maximum(*magnitudes).float()
    return torch.where(largest < math.inf, largest, 0.0).amax()


def track(largest: torch.Tensor, tracked: torch.Tensor, decay: float, delayed: bool) -> tuple[torch.Tensor, ...]:
    """(the amax to quantise with; the running amax after this step)."""
    moved = tracked_amax(largest, tracked, decay)
    used = torch.where(tracked > ZEROS_AMAX, tracked, tracked_amax(largest, tracked, 0.0)) if delayed else moved
    return used, moved


def pass_gradient(gradient: torch.Tensor, bits: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """The gradient where the bit is set."""
    return torch.where(unpack(bits, gradient, axis, groups), gradient, 0.0)


def damax(x: torch.Tensor, gradient: torch.Tensor, amax: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """float32 []: the sum over saturated blocks, divided by the root of the number of elements."""
    blocks, values = split(x, axis, groups), split(quantized(x, amax, axis, groups)[0], axis, groups)
    moved = torch.where(blocks.abs() > amax, values, values - blocks)
    beyond = blocks.abs().amax(-1, keepdim=True) > amax
    total = (torch.where(beyond, moved, 0.0) * split(gradient, axis, groups)).sum()
    return total / (amax * x.numel() ** 0.5)


def rectify(x: torch.Tensor, slope: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(relu or leaky ReLU, bits of the positive elements); axis 1 is cut into blocks."""
    return F.leaky_relu(x, slope) if slope else torch.relu(x), pack(split(x, 1 - x.ndim, 1) > 0)


def unrectify(gradient: torch.Tensor, bits: torch.Tensor, slope: float) -> torch.Tensor:
    """The gradient of `rectify`."""
    positive = unpack(bits, gradient, 1 - gradient.ndim, 1)
    return torch.where(positive, gradient, gradient * slope if slope else 0.0)


def split(x: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """`x` in float32 with `axis` (from the end) moved last and cut: [..., groups, blocks, 16], padded with zeros."""
    last = x.movedim(axis, -1).to(torch.float32)
    last = last.unflatten(-1, (groups, last.shape[-1] // groups))
    padding = -last.shape[-1] % NVFP4_BLOCK
    return (F.pad(last, (0, padding)) if padding else last).unflatten(-1, (-1, NVFP4_BLOCK))


def join(blocks: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Undo `split` of a tensor whose `axis` has `size` elements."""
    last = blocks.flatten(-2)[..., : size // blocks.shape[-3]].flatten(-2)
    return last.movedim(-1, axis)


def pack(passes: torch.Tensor) -> torch.Tensor:
    """bool [..., 16] to one int16 each, element i in bit i."""
    place = torch.arange(NVFP4_BLOCK, dtype=torch.int32, device=passes.device)
    return (passes.to(torch.int32) << place).sum(-1, dtype=torch.int32).to(torch.int16)


def unpack(bits: torch.Tensor, like: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    """Undo `pack` for a tensor that was split like `like`: bool, its shape."""
    place = torch.arange(NVFP4_BLOCK, dtype=torch.int32, device=bits.device)
    return join((bits.to(torch.int32).unsqueeze(-1) >> place) & 1, axis, like.shape[axis]) != 0


def quantized(x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(x' like `x`, in-range mask in blocks)."""
    units, scales, scaled = _in_units(x, global_amax, axis, groups)
    return _from_units(units, scales, global_amax, axis, x.shape[axis], x.dtype), scaled.abs() <= E2M1_MAX


def _in_units(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Blocks of E2M1 values in float32, their E4M3 scales [..., 1], and what was rounded to the values."""
    blocks = split(x, axis, groups)
    encode, scales = _block_scales(blocks.abs().amax(-1, keepdim=True), global_amax.to(torch.float32))
    scaled = blocks * encode
    return _round_e2m1(scaled), scales, scaled


def _from_units(
    units: torch.Tensor, scales: torch.Tensor, global_amax: torch.Tensor, axis: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    """x' with `size` elements along `axis`, which is last in memory."""
    step = (scales * global_amax.to(torch.float32)) * (1 / nvfp4_range(E4M3_MAX))
    values = join(units * step, axis, size).to(dtype)
    return values.movedim(axis, -1).contiguous().movedim(-1, axis)


def _pack_units(units: torch.Tensor, scaled: torch.Tensor) -> torch.Tensor:
    """E2M1 values [..., 16] as int64 [...]: four bits each, sign above magnitude, element i from bit 4 i on.

    scaled: what was rounded to them: a negative value that rounds to zero keeps its sign.
    """
    size = units.abs()
    code = torch.where(size < 2, 2 * size, torch.where(size < 4, size + 2, size * 0.5 + 4)) + 8.0 * (scaled < 0)
    place = 4 * torch.arange(NVFP4_BLOCK, dtype=torch.int64, device=units.device)
    return (torch.nan_to_num(code).to(torch.int64) << place).sum(-1)


def _unpack_units(codes: torch.Tensor) -> torch.Tensor:
    """Undo `_pack_units`."""
    place = 4 * torch.arange(NVFP4_BLOCK, dtype=torch.int64, device=codes.device)
    code = ((codes.unsqueeze(-1) >> place) & 15).to(torch.float32)
    size = torch.where(code < 8, code, code - 8)
    value = torch.where(size < 4, 0.5 * size, torch.where(size < 6, size - 2, 2 * size - 8))
    return torch.where(code < 8, value, -value)


def _block_scales(block_amax: torch.Tensor, global_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e, E4M3 scale) of each block, NaN for a block with a NaN or an Inf."""
    limit = nvfp4_range(E4M3_MAX)
    scale = (limit / global_amax.double()).float().clamp(max=FLT_MAX)
    scale = torch.where((scale == 0) | (global_amax == 0), 1.0, scale)
    decode = (1.0 / scale.double()).float()
    finite = block_amax < math.inf
    unrounded = torch.where(finite & (global_amax > 0), block_amax * (scale * (1 / E2M1_MAX)), 0.0)
    d8 = _round_e4m3(unrounded.clamp(max=float(E4M3_MAX)))
    encode = torch.where(d8 > 0, (1.0 / (d8 * decode).double()).float().clamp(max=FLT_MAX), 0.0)
    return torch.where(finite, encode, float("nan")), torch.where(finite, d8, float("nan"))


def _round_e4m3(d: torch.Tensor) -> torch.Tensor:
    """The nearest E4M3 value of 0 <= d <= 448, ties to even."""
    rounder = _binade(d.clamp(min=SMALLEST_NORMAL)) * E4M3_ROUNDER
    return (d + rounder) - rounder


def _round_e2m1(u: torch.Tensor) -> torch.Tensor:
    """The nearest E2M1 value, ties to even, saturating at 6."""
    u = u.clamp(-E2M1_MAX, E2M1_MAX)
    rounder = _binade(u.abs().clamp(min=1.0)) * E2M1_ROUNDER
    return (u + rounder) - rounder


def _binade(magnitude: torch.Tensor) -> torch.Tensor:
    return magnitude.view(torch.int32).bitwise_and(BINADE).view(torch.float32)


def _restrided(function: Callable[..., object]) -> Callable[..., object]:
    """The function, its first result with the strides of its argument."""

    def run(x: torch.Tensor, *arguments: object) -> Any:
        results = function(x, *arguments)
        first, *rest = results if isinstance(results, tuple) else (results,)
        like = torch.empty_like(x).copy_(first)
        return (like, *rest) if rest else like

    return run


def _bits(x: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    last = x.movedim(axis, -1).shape
    blocks = -(-(last[-1] // groups) // NVFP4_BLOCK)
    return torch.empty((*last[:-1], groups, blocks), dtype=torch.int16, device=x.device)


def _fake_values(
    x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, clips: bool, rectified: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    values = torch.empty(x.movedim(axis, -1).shape, dtype=x.dtype, device=x.device).movedim(-1, axis)
    return values, _bits(x, axis, groups) if clips or rectified else torch.empty(0, dtype=torch.int16, device=x.device)


def _fake_kept(x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, *marks: bool) -> tuple[torch.Tensor, ...]:
    kept = _bits(x, axis, groups)
    codes, scales = (torch.empty_like(kept, dtype=dtype) for dtype in (torch.int64, torch.float16))
    return *_fake_values(x, amax, axis, groups, *marks), codes, scales


def _fake_decoded(
    codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor, axis: int, size: int, dtype: torch.dtype
) -> torch.Tensor:
    return torch.empty((*codes.shape[:-2], size), dtype=dtype, device=codes.device).movedim(-1, axis)


# (schema, elementary form, what it gives of tensors without data, whether its result has the argument's strides)
OPERATORS: tuple[tuple[str, Callable[..., Any], Callable[..., Any], bool], ...] = (
    (
        "traced_quantize(Tensor x, Tensor amax, int axis, int groups, bool clips, bool rectified) -> (Tensor, Tensor)",
        *(quantize, _fake_values, False),
    ),
    (
        "traced_keep(Tensor x, Tensor amax, int axis, int groups, bool clips, bool rectified)"
        " -> (Tensor, Tensor, Tensor, Tensor)",
        *(quantize_and_keep, _fake_kept, False),
    ),
    (
        "traced_decode(Tensor codes, Tensor scales, Tensor amax, int axis, int size, ScalarType dtype) -> Tensor",
        *(decode, _fake_decoded, False),
    ),
    ("traced_amax(Tensor x) -> Tensor", amax, scalar, False),
    (
        "traced_norm_amax(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, ScalarType dtype,"
        " float slope) -> Tensor",
        *(norm_amax, scalar, False),
    ),
    (
        "traced_track(Tensor largest, Tensor tracked, float decay, bool delayed) -> (Tensor, Tensor)",
        *(track, lambda largest, tracked, *_: (torch.empty_like(tracked), torch.empty_like(tracked)), False),
    ),
    ("traced_pass(Tensor gradient, Tensor bits, int axis, int groups) -> Tensor", pass_gradient, like_first, True),
    ("traced_damax(Tensor x, Tensor gradient, Tensor amax, int axis, int groups) -> Tensor", damax, scalar, False),
    (
        "traced_rectify(Tensor x, float slope) -> (Tensor, Tensor)",
        *(rectify, lambda x, slope: (torch.empty_like(x), _bits(x, 1 - x.ndim, 1)), True),
    ),
    ("traced_unrectify(Tensor gradient, Tensor bits, float slope) -> Tensor", unrectify, like_first, True),
)
EXPANSIONS: dict[Any, Callable[..., Any]] = {}
for _schema, _function, _fake, _strided in OPERATORS:
    operator(_schema, _fake, "CompositeExplicitAutograd")(_restrided(_function) if _strided else _function)
    EXPANSIONS[getattr(torch.ops.fp4deploy, _schema.partition("(")[0]).default] = _function
