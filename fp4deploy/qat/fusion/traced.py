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

The operators are in `operators`. The functions marked `allow_in_graph` are single nodes of the graph that torch.compile
captures. `passes` finds them by that, and replaces them; whoever does not apply the passes gets the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch

from fp4deploy.formats import NVFP4_BLOCK, FourOverSix, fake_quantize_nvfp4
from fp4deploy.plugins.quantize.dispatch import runs_on_gpu
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST
from fp4deploy.qat.fusion.operators import join, pack, split
from fp4deploy.qat.operators.ste import fake_quantize
from fp4deploy.qat.recipes import QuantSpec

ops = torch.ops.fp4deploy
Choice = tuple[str, int, bool] | None  # of 4/6: metric, e4m3_max, fast


@torch.compiler.allow_in_graph
def amax(x: torch.Tensor) -> torch.Tensor:
    """The largest finite magnitude of `x`, float32 []."""
    largest: torch.Tensor = ops.traced_amax(x.detach())
    return largest


@torch.compiler.allow_in_graph
def track(
    largest: torch.Tensor, tracked: torch.Tensor, decay: float, delayed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the amax to quantise with, the running amax after this step)."""
    both: tuple[torch.Tensor, torch.Tensor] = ops.traced_track(largest, tracked, decay, delayed)
    return both


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
        four_over_six: (metric, e4m3_max, fast); see `supports`.
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
    """`quantize` with an amax that has a gradient (`qat.operators.learned`)."""
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


def supports(x: torch.Tensor, axis: int, groups: int, four_over_six: Choice) -> bool:
    """These operators quantise `x`: 4/6 is left to its kernel, which needs the channels of one group last in memory."""
    if not x.is_floating_point() or x.dtype == torch.float64:
        return False
    last_in_memory = (x.ndim in CHANNELS_LAST and axis == 1 - x.ndim) or axis == -1
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
        if four_over_six is None:
            values, bits = ops.traced_quantize(x, global_amax, axis, groups, clips, rectified)
        else:
            y = torch.relu(x) if rectified else x
            values, passes = _quantized_by_kernel(y, global_amax, axis, four_over_six)
            if rectified:
                positive = split(x, axis, groups) > 0
                passes = positive & passes if clips else positive
            bits = pack(passes)
        ctx.where = (axis, groups)
        ctx.save_for_backward(*([bits] if clips or rectified else []))
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradient = gradients[0]
        if ctx.saved_tensors:
            gradient = ops.traced_pass(gradient, ctx.saved_tensors[0], *ctx.where)
        return gradient, *[None] * 6


class _Rectify(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, slope: float) -> torch.Tensor:
        ctx.slope = slope
        y, bits = ops.traced_rectify(x, slope)
        ctx.save_for_backward(bits)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return ops.traced_unrectify(gradients[0], ctx.saved_tensors[0], ctx.slope), None


class _QuantizeLearned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, global_amax: torch.Tensor, axis: int, groups: int, four_over_six: Choice
    ) -> torch.Tensor:
        ctx.where = (axis, groups)
        if four_over_six is None:
            values, bits = ops.traced_quantize(x, global_amax, axis, groups, True, False)
            ctx.save_for_backward(bits, x, global_amax)
            return values
        values, in_range = _quantized_by_kernel(x, global_amax, axis, four_over_six)
        blocks, quantized = split(x, axis, groups), split(values, axis, groups)
        beyond = blocks.abs().amax(-1, keepdim=True) > global_amax
        moved = torch.where(blocks.abs() > global_amax, quantized, quantized - blocks) / global_amax
        slope = join(torch.where(beyond, moved, 0.0), axis, x.shape[axis]).to(x.dtype)
        ctx.save_for_backward(pack(in_range), slope)
        return values

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bits, *saved = ctx.saved_tensors
        gradient = gradients[0]
        if len(saved) == 2:
            damax = ops.traced_damax(saved[0], gradient, saved[1], *ctx.where)
        else:
            damax = (gradient.float() * saved[0].float()).sum() / saved[0].numel() ** 0.5
        return ops.traced_pass(gradient, bits, *ctx.where), damax, None, None, None


def _quantized_by_kernel(
    x: torch.Tensor, global_amax: torch.Tensor, axis: int, four_over_six: tuple[str, int, bool]
) -> tuple[torch.Tensor, torch.Tensor]:
    metric, e4m3_max, fast = four_over_six
    if not runs_on_gpu(x):
        values, mask = fake_quantize_nvfp4(x, (axis,), global_amax, four_over_six=FourOverSix(*four_over_six))
        return values, split(mask, axis, 1) != 0
    layout = CHANNELS_LAST.get(x.ndim) if axis == 1 - x.ndim else None
    x = x.contiguous(memory_format=layout or torch.contiguous_format)
    variant = [1, e4m3_max, int(metric == "mse"), int(fast), 0, 0]
    values, bits = ops.quantize_along(x.detach(), axis % x.ndim, global_amax, None, variant, True)
    rows = x.movedim(axis, -1).shape[:-1]
    bits = bits.view(*rows, 1, -(-x.shape[axis] // NVFP4_BLOCK))
    place = torch.arange(NVFP4_BLOCK, dtype=torch.int32, device=bits.device)
    return values, (bits.to(torch.int32).unsqueeze(-1) >> place) & 1 != 0
