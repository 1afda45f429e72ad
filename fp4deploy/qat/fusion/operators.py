"""Quantisation in torch operators, each as one operator of torch until it is compiled.

    traced_quantize     x' and a bit an element for the gradient, also of relu(x)
    traced_amax         the largest finite magnitude, of blocks first
    traced_norm_amax    that of a normalised tensor, from its moments (`norms`)
    traced_track        the running amax of a static scale
    traced_pass         the gradient where the bit is set
    traced_damax        the gradient of a learned amax (`qat.learned`), from what was quantised
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
from fp4deploy.formats.scales import FLT_MAX
from fp4deploy.plugins.runtime.torch_library import LIBRARY

BINADE = 0x7F800000
E2M1_ROUNDER = 1.5 * 2**22  # times the binade of u: leaves one mantissa bit
E4M3_ROUNDER = 1.5 * 2**20  # leaves three
SMALLEST_NORMAL = 2.0**-6  # of E4M3

LIBRARY.define(
    "traced_quantize(Tensor x, Tensor amax, int axis, int groups, bool clips, bool rectified) -> (Tensor, Tensor)"
)
LIBRARY.define("traced_amax(Tensor x) -> Tensor")
LIBRARY.define(
    "traced_norm_amax(Tensor x, Tensor mean, Tensor rstd, Tensor? weight, Tensor? bias, ScalarType dtype, float slope)"
    " -> Tensor"
)
LIBRARY.define("traced_track(Tensor largest, Tensor tracked, float decay, bool delayed) -> (Tensor, Tensor)")
LIBRARY.define("traced_pass(Tensor gradient, Tensor bits, int axis, int groups) -> Tensor")
LIBRARY.define("traced_damax(Tensor x, Tensor gradient, Tensor amax, int axis, int groups) -> Tensor")
LIBRARY.define("traced_rectify(Tensor x, float slope) -> (Tensor, Tensor)")
LIBRARY.define("traced_unrectify(Tensor gradient, Tensor bits, float slope) -> Tensor")


def quantize(
    x: torch.Tensor, amax: torch.Tensor, axis: int, groups: int, clips: bool, rectified: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x', bits of the elements whose gradient passes; none where all do)."""
    y = torch.relu(x) if rectified else x
    values, in_range = quantized(y, amax, axis, groups)
    if not (clips or rectified):
        return values, torch.empty(0, dtype=torch.int16, device=x.device)
    positive = split(x, axis, groups) > 0 if rectified else in_range
    return values, pack(positive & in_range if clips and rectified else positive)


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
    """(the amax to quantise with, NaN where there is none; the running amax after this step)."""
    moved = torch.maximum(largest, tracked * decay)
    used = torch.where(tracked > 0, tracked, largest) if delayed else moved
    return torch.where(used > 0, used, math.nan), moved


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
    blocks = split(x, axis, groups)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    encode, step = _block_scales(block_amax, global_amax.to(torch.float32))
    scaled = blocks * encode
    values = join(_round_e2m1(scaled) * step, axis, x.shape[axis]).to(x.dtype)
    return values.movedim(axis, -1).contiguous().movedim(-1, axis), scaled.abs() <= E2M1_MAX


def _block_scales(block_amax: torch.Tensor, global_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e, the value of one E2M1 unit) of each block, NaN for a block with a NaN or an Inf."""
    limit = nvfp4_range(E4M3_MAX)
    scale = (limit / global_amax.double()).float().clamp(max=FLT_MAX)
    scale = torch.where((scale == 0) | (global_amax == 0), 1.0, scale)
    decode = (1.0 / scale.double()).float()
    finite = block_amax < math.inf
    unrounded = torch.where(finite & (global_amax > 0), block_amax * (scale * (1 / E2M1_MAX)), 0.0)
    d8 = _round_e4m3(unrounded.clamp(max=float(E4M3_MAX)))
    encode = torch.where(d8 > 0, (1.0 / (d8 * decode).double()).float().clamp(max=FLT_MAX), 0.0)
    step = (d8 * global_amax) * (1 / limit)
    return torch.where(finite, encode, float("nan")), torch.where(finite, step, float("nan"))


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


def _restrided(function: Callable[..., Any]) -> Callable[..., Any]:
    """The results with the strides that the operators promise: those of the argument, but for a quantised tensor."""

    def run(x: torch.Tensor, *arguments: Any) -> Any:
        found = function(x, *arguments)
        if function in (quantize, amax, norm_amax, track, damax):
            return found
        first, *rest = found if isinstance(found, tuple) else (found,)
        like = torch.empty_like(x).copy_(first)
        return (like, *rest) if rest else like

    return run


def _bits(x: torch.Tensor, axis: int, groups: int) -> torch.Tensor:
    last = x.movedim(axis, -1).shape
    blocks = -(-(last[-1] // groups) // NVFP4_BLOCK)
    return torch.empty((*last[:-1], groups, blocks), dtype=torch.int16, device=x.device)


@torch.library.register_fake("fp4deploy::traced_quantize", lib=LIBRARY)
def _(x, amax, axis, groups, clips, rectified):  # type: ignore[no-untyped-def]
    values = torch.empty(x.movedim(axis, -1).shape, dtype=x.dtype, device=x.device).movedim(-1, axis)
    return values, _bits(x, axis, groups) if clips or rectified else torch.empty(0, dtype=torch.int16, device=x.device)


@torch.library.register_fake("fp4deploy::traced_amax", lib=LIBRARY)
def _(x):  # type: ignore[no-untyped-def]
    return torch.empty((), dtype=torch.float32, device=x.device)


@torch.library.register_fake("fp4deploy::traced_norm_amax", lib=LIBRARY)
def _(x, mean, rstd, weight, bias, dtype, slope):  # type: ignore[no-untyped-def]
    return torch.empty((), dtype=torch.float32, device=x.device)


@torch.library.register_fake("fp4deploy::traced_track", lib=LIBRARY)
def _(largest, tracked, decay, delayed):  # type: ignore[no-untyped-def]
    return torch.empty_like(tracked), torch.empty_like(tracked)


@torch.library.register_fake("fp4deploy::traced_pass", lib=LIBRARY)
def _(gradient, bits, axis, groups):  # type: ignore[no-untyped-def]
    return torch.empty_like(gradient)


@torch.library.register_fake("fp4deploy::traced_damax", lib=LIBRARY)
def _(x, gradient, amax, axis, groups):  # type: ignore[no-untyped-def]
    return torch.empty((), dtype=torch.float32, device=x.device)


@torch.library.register_fake("fp4deploy::traced_rectify", lib=LIBRARY)
def _(x, slope):  # type: ignore[no-untyped-def]
    return torch.empty_like(x), _bits(x, 1 - x.ndim, 1)


@torch.library.register_fake("fp4deploy::traced_unrectify", lib=LIBRARY)
def _(gradient, bits, slope):  # type: ignore[no-untyped-def]
    return torch.empty_like(gradient)


EXPANSIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.fp4deploy.traced_quantize.default: quantize,
    torch.ops.fp4deploy.traced_amax.default: amax,
    torch.ops.fp4deploy.traced_norm_amax.default: norm_amax,
    torch.ops.fp4deploy.traced_track.default: track,
    torch.ops.fp4deploy.traced_pass.default: pass_gradient,
    torch.ops.fp4deploy.traced_damax.default: damax,
    torch.ops.fp4deploy.traced_rectify.default: rectify,
    torch.ops.fp4deploy.traced_unrectify.default: unrectify,
}
for _operator, _function in EXPANSIONS.items():
    LIBRARY.impl(_operator, _restrided(_function), "CompositeExplicitAutograd")
