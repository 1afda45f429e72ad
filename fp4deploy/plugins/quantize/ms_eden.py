"""`formats.quantize_ms_eden` and `dequantize`, on a GPU by `cuda/ms_eden.cu`: one read for the amax, one for the rest.

The values of a channels_last map keep its layout where its blocks lie along the channels or along the last axis, as
the GEMMs of a layer need them; any other tensor whose rows are not in their logical order in memory is copied first.
What the columns of a filter read of a map is never written as it is: the kernel finds it in the map.
"""

from __future__ import annotations

from math import prod

import torch

from fp4deploy import formats
from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.formats.blocks import normalized_axis
from fp4deploy.formats.constants import E4M3_MAX_FOUR_OVER_SIX
from fp4deploy.formats.ms_eden import SHRINK, SIGN_STREAM, group_of
from fp4deploy.plugins.quantize.dispatch import Seed, random_state, runs_on_gpu
from fp4deploy.plugins.quantize.layout import CHANNELS_LAST, View, dense, is_channels_last, view_along
from fp4deploy.plugins.quantize.maps import Columns
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.torch_library import ANY_DEVICE, CUDA_TYPES, operator

THREADS = 256
BLOCKS = 12  # thread blocks a multiprocessor: a multiple of four and of six, as many as run there at once; not fitted


def fake_quantize_ms_eden(x: torch.Tensor, rotation: torch.Tensor, seed: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """Rotate and quantise along `axis`, and dequantise; the axis stays in its place, padded to whole groups.

    Args:
        x: any float dtype, [..., K, ...].
        rotation, seed: int64 [], as of `formats.quantize_ms_eden`.

    Returns:
        [..., K padded, ...] in the dtype of `x`.
    """
    axis = normalized_axis(x, axis)
    if not runs_on_gpu(x):
        return formats.quantize_ms_eden(x, rotation, seed, axis).dequantize(x.dtype).movedim(-1, axis)
    values, _, _ = _quantized(x, rotation, seed, axis, packed=False)
    return values


def fake_quantize_columns(
    x: torch.Tensor, rotation: torch.Tensor, seed: torch.Tensor, columns: Columns
) -> torch.Tensor:
    """`fake_quantize_ms_eden` along the width of what each column of a filter reads (`ConvGemms.widen` writes it).

    Args:
        x: [N, C, H, W], on a GPU; a copy is made where it is not channels_last.

    Returns:
        [N, count * C, H, W' padded to whole groups], channels_last, in the dtype of `x`.
    """
    x = x.contiguous(memory_format=torch.channels_last)
    values, _, _ = _quantized(x, rotation, seed, 3, packed=False, at=columns.numbers)
    return values


def quantize_ms_eden(x: torch.Tensor, rotation: Seed, seed: Seed, axis: int = -1) -> Nvfp4Tensor:
    """`formats.quantize_ms_eden` with the amax of `x`, on a GPU by a kernel."""
    if not runs_on_gpu(x):
        assert rotation is not None
        assert seed is not None
        return formats.quantize_ms_eden(x, rotation, seed, axis)
    axis = normalized_axis(x, axis)
    codes, scales, amax = _quantized(x, rotation, seed, axis, packed=True)
    shape = (*(size for at, size in enumerate(x.shape) if at != axis), scales.shape[-1] * NVFP4_BLOCK)
    return Nvfp4Tensor(codes, scales, amax * SHRINK, torch.Size(shape), E4M3_MAX_FOUR_OVER_SIX)


def _quantized(
    x: torch.Tensor, rotation: Seed, seed: Seed, axis: int, packed: bool, at: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and nothing, or codes and scales; and the amax of what is rotated. `at`: fields of `Columns`."""
    turned, random = random_state(x, "stochastic", rotation, SIGN_STREAM), random_state(x, "stochastic", seed, 0)
    amax: torch.Tensor = torch.ops.fp4deploy.ms_eden_amax(x.detach(), turned, axis, at or [])
    first, scales = torch.ops.fp4deploy.ms_eden(x.detach(), amax, turned, random, axis, packed, at or [])
    return first, scales, amax


def _in_order(x: torch.Tensor, axis: int, at: list[int]) -> tuple[torch.Tensor, View, int]:
    """`x` or a copy, its view, and how many of its outer positions are numbered within one of its inner ones."""
    if at:
        return x, View(x.shape[0] * x.shape[2], at[4], at[0] * x.shape[1], False), x.shape[2]
    view = view_along(x, axis)
    if view is not None and not view.in_order and is_channels_last(x) and axis == x.ndim - 1:
        return x, view, prod(x.shape[2:-1])
    return *dense(x, axis, in_order=True), 1


def _launch(
    x: torch.Tensor,
    axis: int,
    at: list[int],
    macros: dict[str, str | int | None],
    *tensors: torch.Tensor | None,
) -> None:
    x, view, middle = _in_order(x, axis, at)
    group, outer, size, inner = group_of(view.size), view.outer, view.size, bool(at) or view.inner > 1
    if not inner and size % group == 0:
        outer, size = 1, outer * size  # groups follow each other: one long row, which needs no division
    macros = {"DTYPE": CUDA_TYPES[x.dtype], "INNER": int(inner), "BLOCKS": group // NVFP4_BLOCK, **macros}
    macros |= {"COLUMNS": int(bool(at))}
    count, slots = outer * -(-size // group), THREADS * NVFP4_BLOCK // group
    channels = x.shape[1] // at[5] if at else view.inner
    blocks = count * (view.inner // channels) * -(-channels // slots) if inner else -(-count // slots)
    launch = kernel("ms_eden.cu", "ms_eden", "PPPPPPPqqqqiiiiii", macros, x.device).launch
    place = (x.shape[-1], *at[:4], channels) if at else (0,) * 6
    launch(min(blocks, BLOCKS * num_sms(x.device)), THREADS, x, *tensors, outer, size, view.inner, middle, *place)


@operator(
    "ms_eden_amax(Tensor x, Tensor rotation, int axis, int[] at) -> Tensor",
    lambda x, rotation, axis, at: x.new_empty((), dtype=torch.float32),
    ANY_DEVICE,
)
def _ms_eden_amax(x: torch.Tensor, rotation: torch.Tensor, axis: int, at: list[int]) -> torch.Tensor:
    cell = torch.zeros((), dtype=torch.float32, device=x.device)
    _launch(x, axis, at, {"PACKED": 0, "MEASURE": 1}, None, rotation, None, None, None, cell)
    return cell


def _outputs(x: torch.Tensor, axis: int, packed: bool, at: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    shape = [x.shape[0], at[0] * x.shape[1], x.shape[2], at[4]] if at else list(x.shape)
    group = group_of(shape[axis])
    size = -(-shape[axis] // group) * group
    if packed:
        rows = [other for place, other in enumerate(shape) if place != axis]
        codes = torch.empty((*rows, size // 2), dtype=torch.uint8, device=x.device)
        return codes, torch.empty((*rows, size // NVFP4_BLOCK), dtype=torch.float8_e4m3fn, device=x.device)
    last = bool(at) or (is_channels_last(x) and not x.is_contiguous())
    shape[axis] = size
    layout = CHANNELS_LAST[x.ndim] if last else torch.contiguous_format
    values = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    return values, x.new_empty(0, dtype=torch.float8_e4m3fn)


def _fake_ms_eden(x, amax, rotation, random, axis, packed, at):  # type: ignore[no-untyped-def]
    return _outputs(_in_order(x, axis, at)[0], axis, packed, at)


@operator(
    "ms_eden(Tensor x, Tensor amax, Tensor rotation, Tensor random, int axis, bool packed, int[] at) "
    "-> (Tensor, Tensor)",
    _fake_ms_eden,
    ANY_DEVICE,
)
def _ms_eden(
    x: torch.Tensor,
    amax: torch.Tensor,
    rotation: torch.Tensor,
    random: torch.Tensor,
    axis: int,
    packed: bool,
    at: list[int],
) -> tuple[torch.Tensor, torch.Tensor]:
    x = _in_order(x, axis, at)[0]
    first, scales = _outputs(x, axis, packed, at)
    outputs = amax, rotation, random, first, scales if packed else None, None
    _launch(x, axis, at, {"PACKED": int(packed), "MEASURE": 0}, *outputs)
    return first, scales
