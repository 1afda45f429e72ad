"""Fake quantisation in torch operators that a compiler fuses with whatever computes the tensor and its gradient.

A kernel of its own reads a feature map and writes it again. Written out in elementary operators instead, the quantiser
becomes part of the kernel that normalises, adds, resizes or concatenates: blocks of 16 channels are adjacent in
channels_last, so that a block is one row of the generated kernel and its amax a reduction within a few lanes.

The numbers are those of `formats.fake_quantize_nvfp4`, bit for bit. Three things keep them so under a compiler that
contracts a * b + c to one rounding and divides approximately: every sum adds to an exact product, divisions are in
float64 (a quotient of two floats, rounded to double and then to float, is the quotient rounded to float), and rounding
to E4M3 and E2M1 adds and subtracts a multiple of the binade, as the CUDA kernels do.

The backward needs to know which elements passed. A bit an element is kept, 16 in an int16, a sixteenth of a float16
feature map; of a ReLU in front of the quantiser it is the same bit.

The functions marked `allow_in_graph` are single nodes of the graph that torch.compile captures. `passes` finds them by
that, and replaces them; whoever does not apply the passes gets the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fp4deploy.formats import NVFP4_BLOCK, FourOverSix, fake_quantize_nvfp4
from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, nvfp4_range
from fp4deploy.formats.scales import FLT_MAX
from fp4deploy.plugins.quantize.dispatch import runs_on_gpu
from fp4deploy.qat.recipes import QuantSpec
from fp4deploy.qat.ste import fake_quantize

ops = torch.ops.fp4deploy
BINADE = 0x7F800000
E2M1_ROUNDER = 1.5 * 2**22  # times the binade of u: leaves one mantissa bit
E4M3_ROUNDER = 1.5 * 2**20  # leaves three
SMALLEST_NORMAL = 2.0**-6  # of E4M3
Choice = tuple[str, int, bool] | None  # of 4/6: metric, e4m3_max, fast


@torch.compiler.allow_in_graph
def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of `x`, float32 []."""
    magnitude = x.detach().abs().to(torch.float32)
    return torch.where(magnitude.isfinite(), magnitude, 0.0).amax()


@torch.compiler.allow_in_graph
def quantize(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, clips: bool, four_over_six: Choice
) -> torch.Tensor:
    """Fake-quantise `x` in 1-D blocks along `axis`, straight through.

    Args:
        global_amax: float32 [].
        axis: from the end.
        groups: of the axis, which blocks do not cross.
        clips: the gradient of what saturates is 0 (a static scale), instead of the identity.
        four_over_six: (metric, e4m3_max, fast); see `takes`.
    """
    result: torch.Tensor = _Quantize.apply(x, global_amax, axis, groups, clips, four_over_six, False)
    return result


@torch.compiler.allow_in_graph
def relu_and_quantize(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, clips: bool, four_over_six: Choice
) -> torch.Tensor:
    """`quantize` of relu(x), with one bit for both gradients."""
    result: torch.Tensor = _Quantize.apply(x, global_amax, axis, groups, clips, four_over_six, True)
    return result


@torch.compiler.allow_in_graph
def rectify(x: torch.Tensor, slope: float) -> torch.Tensor:
    """relu(x), or leaky_relu with a `slope`; x is [N, C, ...], and a bit an element is kept for the gradient."""
    result: torch.Tensor = _Rectify.apply(x, slope)
    return result


@torch.compiler.allow_in_graph
def quantize_learned(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, four_over_six: Choice
) -> torch.Tensor:
    """`quantize` with an amax that has a gradient (`qat.learned`)."""
    result: torch.Tensor = _QuantizeLearned.apply(x, global_amax, axis, groups, four_over_six)
    return result


@torch.compiler.allow_in_graph
def quantize_weight(
    weight: torch.Tensor, block: str, axes: tuple[int, int], groups: tuple[int, int], four_over_six: Choice
) -> torch.Tensor:
    """Fake-quantise a weight along its contraction axis, the last of `axes`, with its own amax, straight through."""
    if block == "1d" and four_over_six is None:
        axis = axes[-1] % weight.ndim - weight.ndim
        return quantize(weight, amax(weight), axis, groups[-1], False, None)
    choice = None if four_over_six is None else FourOverSix(*four_over_six)
    return fake_quantize(weight, QuantSpec(block=block, four_over_six=choice), axes, groups=groups)


def choice_of(spec: QuantSpec) -> Choice:
    """4/6 of a spec, as a graph can hold it."""
    choice = spec.four_over_six
    return None if choice is None else (choice.metric, choice.e4m3_max, choice.fast)


def can_trace(spec: QuantSpec | None) -> bool:
    """These operators have the format and rounding of a spec."""
    plain = QuantSpec(block=spec.block, scale=spec.scale, four_over_six=spec.four_over_six) if spec else None
    return spec is not None and spec == plain


def takes(x: torch.Tensor, axis: int, groups: int, four_over_six: Choice) -> bool:
    """These operators quantise `x`: 4/6 is left to its kernel, which needs the channels of one group last in memory."""
    if not x.is_floating_point() or x.dtype == torch.float64:
        return False
    last_in_memory = (x.ndim == 4 and axis == -3) or axis == -1
    return four_over_six is None or (groups == 1 and last_in_memory)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        global_amax: torch.Tensor,
        axis: int,
        groups: int,
        clips: bool,
        four_over_six: Choice,
        rectified: bool,
    ) -> torch.Tensor:
        y = torch.relu(x) if rectified else x
        values, in_range = _quantized(y, global_amax, axis, groups, four_over_six)
        passes = in_range if clips else None
        if rectified:
            positive = split(x, axis, groups) > 0
            passes = positive if passes is None else passes & positive
        ctx.where = (axis, groups)
        ctx.save_for_backward(*([] if passes is None else [pack(passes)]))
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        if ctx.saved_tensors:
            gradient = torch.where(unpack(ctx.saved_tensors[0], gradient, *ctx.where), gradient, 0.0)
        return gradient, *[None] * 6


class _Rectify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        ctx.save_for_backward(pack(split(x, 1 - x.ndim, 1) > 0))
        return F.leaky_relu(x, slope) if slope else torch.relu(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        positive = unpack(ctx.saved_tensors[0], gradient, 1 - gradient.ndim, 1)
        return torch.where(positive, gradient, gradient * ctx.slope if ctx.slope else 0.0), None


class _QuantizeLearned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, four_over_six: Choice
    ) -> torch.Tensor:
        values, in_range = _quantized(x, global_amax, axis, groups, four_over_six)
        blocks, quantized = split(x, axis, groups), split(values, axis, groups)
        beyond = blocks.abs().amax(-1, keepdim=True) > global_amax
        moved = torch.where(blocks.abs() > global_amax, quantized, quantized - blocks) / global_amax
        slope = join(torch.where(beyond, moved, 0.0), axis, x.shape[axis]).to(x.dtype)
        ctx.where = (axis, groups)
        ctx.save_for_backward(pack(in_range), slope)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        in_range, slope = ctx.saved_tensors
        gradient = gradients[0]
        damax = (gradient.float() * slope.float()).sum() / slope.numel() ** 0.5
        return torch.where(unpack(in_range, gradient, *ctx.where), gradient, 0.0), damax, None, None, None


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


def _quantized(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, four_over_six: Choice
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x' like `x`, in-range mask in blocks)."""
    if four_over_six is not None:
        return _quantized_by_kernel(x, global_amax, axis, four_over_six)
    blocks = split(x, axis, groups)
    block_amax = blocks.abs().amax(-1, keepdim=True)
    encode, step = _block_scales(block_amax, global_amax.to(torch.float32))
    scaled = blocks * encode
    values = join(_round_e2m1(scaled) * step, axis, x.shape[axis]).to(x.dtype)
    return values, scaled.abs() <= E2M1_MAX


def _quantized_by_kernel(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, four_over_six: tuple[str, int, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    metric, e4m3_max, fast = four_over_six
    if not runs_on_gpu(x):
        values, mask = fake_quantize_nvfp4(x, (axis,), global_amax, four_over_six=FourOverSix(*four_over_six))
        return values, split(mask, axis, 1) != 0
    x = x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 and axis == -3 else x.contiguous()
    variant = [1, e4m3_max, int(metric == "mse"), int(fast), 0, 0]
    values, bits = ops.quantize_along(x.detach(), axis % x.ndim, global_amax, None, variant, True)
    rows = x.movedim(axis, -1).shape[:-1]
    bits = bits.view(*rows, 1, -(-x.shape[axis] // NVFP4_BLOCK))
    place = torch.arange(NVFP4_BLOCK, dtype=torch.int32, device=bits.device)
    return values, (bits.to(torch.int32).unsqueeze(-1) >> place) & 1 != 0


def _block_scales(block_amax: torch.Tensor, global_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(e, the value of one E2M1 unit) of each block, NaN for a block with a NaN or an Inf."""
    limit = nvfp4_range(E4M3_MAX)
    scale = (limit / global_amax.double()).float().clamp(max=FLT_MAX)
    scale = torch.where((scale == 0) | (global_amax == 0), 1.0, scale)
    decode = (1.0 / scale.double()).float()
    finite = block_amax.isfinite()
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
