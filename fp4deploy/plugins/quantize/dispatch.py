"""Quantisation on a GPU: functions with the names and the bytes of `formats`, as CUDA kernels where they run.

| function | reference in `formats` |
|---|---|
| `fake_quantize_nvfp4`, `fake_quantize_mxfp4` | the same names: quantise and dequantise, memory layout kept |
| `quantize_nvfp4`, `quantize_mxfp4` | the same names: packed codes and scales |

CUDA tensors go to the kernels where these are available; everything else, and what the kernels do not support
(float64, stochastic 2-D blocks over other axes than the last two), goes to the reference. The bytes are the same. A
seed or an amax that is a tensor stays on the device.

With `hadamard`, groups of 16 are transformed in float32 before anything else, as `formats.random_hadamard` does; the
result has the contraction axis padded to whole groups.
"""

from __future__ import annotations

import torch

import fp4deploy.plugins.quantize.operators  # noqa: F401
from fp4deploy import formats
from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Mxfp4Tensor, Nvfp4Tensor
from fp4deploy.formats.blocks import normalized_axis, require_quantizable
from fp4deploy.formats.hadamard import WIDTH
from fp4deploy.formats.mxfp4 import SCALE_RULES
from fp4deploy.formats.nvfp4 import BLOCK_AXES, check_options, require_amax, static_amax
from fp4deploy.formats.philox import ROUNDINGS, draw_seed, signed
from fp4deploy.plugins.runtime.launch import available
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

ops = torch.ops.fp4deploy
Seed = int | torch.Tensor | None


def runs_on_gpu(x: torch.Tensor) -> bool:
    """Whether kernels take this tensor: device, dtype, not empty."""
    return x.is_cuda and x.dtype in CUDA_TYPES and x.numel() > 0 and x.ndim > 0 and available(x.device)


def fake_quantize_nvfp4(
    x: torch.Tensor,
    axes: tuple[int, ...] = (-1,),
    amax: float | torch.Tensor | None = None,
    row_scaled: bool = False,
    four_over_six: FourOverSix | None = None,
    rounding: str = "nearest",
    seed: Seed = None,
    offset: int | torch.Tensor = 0,
    hadamard: bool = False,
    mask: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`formats.fake_quantize_nvfp4`, on a GPU by a kernel.

    Returns:
        x' and the in-range mask, true where an element was not clipped: bool, or from the 1-D kernels as bits, int16
        (`mask_gradient` takes both); None without `mask`.
    """
    if not runs_on_gpu(x) or not _has_tiles(x, axes, rounding):
        source = formats.random_hadamard(x, axes[-1]) if hadamard else x
        values, in_range = formats.fake_quantize_nvfp4(
            source, axes, amax, row_scaled, four_over_six, rounding, seed, offset
        )
        return values.to(x.dtype), in_range if mask else None
    axes = tuple(normalized_axis(x, axis) for axis in axes)
    check_options(axes, row_scaled, four_over_six, rounding)
    random, variant = random_state(x, rounding, seed, offset), nvfp4_variant(four_over_six, hadamard, row_scaled)
    scale = None if row_scaled and amax is None else _global_amax(x, axes[-1], amax, row_scaled, hadamard)
    if len(axes) == 2:
        values, in_range = ops.quantize_tiles(x.detach(), *axes, scale, random, variant, mask)
    else:
        values, in_range = ops.quantize_along(x.detach(), axes[0], scale, random, variant, mask)
    return values, in_range if mask else None


def fake_quantize_and_amax(
    x: torch.Tensor,
    axes: tuple[int, ...],
    amax: torch.Tensor,
    four_over_six: FourOverSix | None = None,
    rounding: str = "nearest",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`fake_quantize_nvfp4` with the static `amax`, and the finite amax of `x` itself, float32 [].

    On a GPU one pass over `x` computes both for plain 1-D blocks; otherwise the amax needs a pass of its own.
    """
    if not runs_on_gpu(x) or len(axes) != 1:
        values, in_range = fake_quantize_nvfp4(x, axes, amax, False, four_over_six, rounding)
        assert in_range is not None
        return values, in_range, finite_amax(x)
    axis = normalized_axis(x, axes[0])
    check_options((axis,), False, four_over_six, rounding)
    scale, random = _global_amax(x, axis, amax, False, False), random_state(x, rounding, None, 0)
    result: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = ops.quantize_and_amax(
        x.detach(), axis, scale, random, nvfp4_variant(four_over_six, False, False)
    )
    return result


def fake_quantize_mxfp4(
    x: torch.Tensor,
    axis: int = -1,
    scale_rule: str = "floor",
    rounding: str = "nearest",
    seed: Seed = None,
    offset: int | torch.Tensor = 0,
    hadamard: bool = False,
) -> torch.Tensor:
    """`formats.fake_quantize_mxfp4`, on a GPU by a kernel."""
    if not runs_on_gpu(x) or scale_rule not in SCALE_RULES:
        source = formats.random_hadamard(x, axis) if hadamard else x
        return formats.fake_quantize_mxfp4(source, axis, scale_rule, rounding, seed, offset).to(x.dtype)
    random = random_state(x, rounding, seed, offset)
    values: torch.Tensor
    values, _ = ops.quantize_along(
        x.detach(), normalized_axis(x, axis), None, random, mx_variant(scale_rule, hadamard), False
    )
    return values


def quantize_nvfp4(
    x: torch.Tensor,
    block: str = "1d",
    amax: float | torch.Tensor | None = None,
    row_scaled: bool = False,
    four_over_six: FourOverSix | None = None,
    rounding: str = "nearest",
    seed: Seed = None,
    offset: int | torch.Tensor = 0,
    axis: int = -1,
    hadamard: bool = False,
) -> Nvfp4Tensor:
    """`formats.quantize_nvfp4` along `axis` (moved last in the result), on a GPU by a kernel."""
    require_quantizable(x, "NVFP4")
    if not runs_on_gpu(x) or block not in BLOCK_AXES or (block == "2d" and (axis % x.ndim != x.ndim - 1 or x.ndim < 2)):
        moved = x.movedim(axis, -1) if x.ndim else x
        source = formats.random_hadamard(moved) if hadamard else moved
        return formats.quantize_nvfp4(source, block, amax, row_scaled, four_over_six, rounding, seed, offset)
    axis = normalized_axis(x, axis)
    require_amax(amax)
    check_options(BLOCK_AXES[block], row_scaled, four_over_six, rounding)
    random, variant = random_state(x, rounding, seed, offset), nvfp4_variant(four_over_six, hadamard, row_scaled)
    if row_scaled and isinstance(amax, torch.Tensor) and amax.ndim:
        amax = amax.unsqueeze(axis)
    if row_scaled and amax is None:
        codes, scales, scale = ops.pack_row_scaled(x.detach(), axis, random, variant)
    else:
        scale = _global_amax(x, axis, amax, row_scaled, hadamard)
        if block == "2d":
            codes, scales = ops.pack_tiles(x.detach(), scale, random, variant)
        else:
            codes, scales = ops.pack_along(x.detach(), axis, scale, random, variant, False)
    return Nvfp4Tensor(
        codes,
        scales.view(torch.float8_e4m3fn),
        scale.squeeze(axis) if row_scaled else scale,
        _packed_shape(x, axis, hadamard),
        variant[1],
    )


def quantize_mxfp4(
    x: torch.Tensor,
    scale_rule: str = "floor",
    rounding: str = "nearest",
    seed: Seed = None,
    offset: int | torch.Tensor = 0,
    axis: int = -1,
    hadamard: bool = False,
) -> Mxfp4Tensor:
    """`formats.quantize_mxfp4` along `axis` (moved last in the result), on a GPU by a kernel."""
    require_quantizable(x, "MXFP4")
    if not runs_on_gpu(x) or scale_rule not in SCALE_RULES:
        moved = x.movedim(axis, -1) if x.ndim else x
        source = formats.random_hadamard(moved) if hadamard else moved
        return formats.quantize_mxfp4(source, scale_rule, rounding, seed, offset)
    axis = normalized_axis(x, axis)
    random = random_state(x, rounding, seed, offset)
    codes, scales = ops.pack_along(x.detach(), axis, None, random, mx_variant(scale_rule, hadamard), False)
    return Mxfp4Tensor(codes, scales, _packed_shape(x, axis, hadamard))


def finite_amax(x: torch.Tensor) -> torch.Tensor:
    """`formats.finite_amax` of the whole tensor, on a GPU by a kernel."""
    if not runs_on_gpu(x):
        return formats.finite_amax(x)
    amax: torch.Tensor = ops.finite_amax(x.detach())
    return amax


def previous_amax(x: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
    """`previous`, float32 []; where it is that of zeros or of nothing, the finite amax of `x`, as it is tracked.

    On a GPU the kernel decides: nothing synchronises, and `x` is read only if needed.
    """
    if not runs_on_gpu(x):
        first = formats.tracked_amax(formats.finite_amax(x.detach()), previous, 0.0)
        return torch.where(previous > formats.ZEROS_AMAX, previous, first)
    amax: torch.Tensor = ops.finite_amax(x.detach(), previous.float())
    return amax.where(amax > 0, formats.ZEROS_AMAX)


def mask_gradient(gradient: torch.Tensor, in_range: torch.Tensor, strides: tuple[int, ...], axis: int) -> torch.Tensor:
    """`gradient` where the in-range mask is set, else 0: the clipped straight-through estimator.

    Args:
        in_range: bool, or the bits of a kernel that quantised along `axis`.
        strides: of the quantised tensor; the bits are in its memory order.
    """
    if in_range.dtype == torch.bool:
        return gradient * in_range
    if gradient.stride() != strides:
        gradient = torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    masked: torch.Tensor = ops.mask_gradient(gradient, in_range, axis % gradient.ndim)
    return masked


def _packed_shape(x: torch.Tensor, axis: int, hadamard: bool) -> torch.Size:
    """The shape with `axis` moved last; a Hadamard transform pads it to whole groups."""
    size = -(-x.shape[axis] // WIDTH) * WIDTH if hadamard else x.shape[axis]
    return torch.Size([*(other for at, other in enumerate(x.shape) if at != axis), size])


def _has_tiles(x: torch.Tensor, axes: tuple[int, ...], rounding: str) -> bool:
    """1-D blocks; or 2-D ones of a tensor of up to four axes, in the order that random bits are numbered in."""
    if len(axes) == 1:
        return True
    last = tuple(axis % x.ndim for axis in axes) == (x.ndim - 2, x.ndim - 1)
    return x.ndim <= 4 and (rounding == "nearest" or last)


def _global_amax(
    x: torch.Tensor, axis: int, amax: float | torch.Tensor | None, row_scaled: bool, hadamard: bool
) -> torch.Tensor:
    if amax is not None:
        return static_amax(x, axis, amax, row_scaled).contiguous()
    whole: torch.Tensor = ops.hadamard_amax(x.detach(), axis) if hadamard else ops.finite_amax(x.detach())
    return whole


def nvfp4_variant(four_over_six: FourOverSix | None, hadamard: bool, row_scaled: bool) -> list[int]:
    """What the kernels of `operators` are compiled for."""
    if four_over_six is None:
        return [0, 448, 0, 0, int(hadamard), int(row_scaled)]
    squared, fast = int(four_over_six.metric == "mse"), int(four_over_six.fast)
    return [1, four_over_six.e4m3_max, squared, fast, int(hadamard), int(row_scaled)]


def mx_variant(scale_rule: str, hadamard: bool) -> list[int]:
    """`nvfp4_variant` of MXFP4."""
    return [2 + SCALE_RULES.index(scale_rule), 448, 0, 0, int(hadamard), 0]


def random_state(x: torch.Tensor, rounding: str, seed: Seed, offset: int | torch.Tensor) -> torch.Tensor | None:
    """Seed and offset, int64 [2] on the device of `x`; None for rounding to nearest."""
    if rounding not in ROUNDINGS:
        raise InputError(f"Unknown rounding '{rounding}'. Valid roundings: {', '.join(ROUNDINGS)}.")
    if rounding == "nearest":
        return None
    random = torch.empty(2, dtype=torch.int64, device=x.device)
    for place, value in zip(random, (draw_seed(x.device) if seed is None else seed, offset), strict=True):
        if isinstance(value, torch.Tensor):
            place.copy_(value)
        else:
            place.fill_(signed(value))
    return random
