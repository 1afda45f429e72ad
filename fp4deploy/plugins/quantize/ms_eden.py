"""`formats.quantize_ms_eden` and `dequantize`, on a GPU by `cuda/ms_eden.cu`: one read for the amax, one for the rest.

The values of a channels_last map keep its layout where its blocks lie along the channels or along the last axis, as
the GEMMs of a layer need them; any other tensor whose rows are not in their logical order in memory is copied first.
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
    x: torch.Tensor, rotation: Seed, seed: Seed, axis: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values and nothing, or codes and scales; and the amax of what is rotated."""
    turned, random = random_state(x, "stochastic", rotation, SIGN_STREAM), random_state(x, "stochastic", seed, 0)
    amax: torch.Tensor = torch.ops.fp4deploy.ms_eden_amax(x.detach(), turned, axis)
    first, scales = torch.ops.fp4deploy.ms_eden(x.detach(), amax, turned, random, axis, packed)
    return first, scales, amax


def _in_order(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, View, int]:
    """`x` or a copy, its view, and how many of its outer positions are numbered within one of its inner ones."""
    view = view_along(x, axis)
    if view is not None and not view.in_order and is_channels_last(x) and axis == x.ndim - 1:
        return x, view, prod(x.shape[2:-1])
    return *dense(x, axis, in_order=True), 1


def _launch(
    x: torch.Tensor, view: View, middle: int, macros: dict[str, str | int | None], *tensors: torch.Tensor | None
) -> None:
    group, outer, size = group_of(view.size), view.outer, view.size
    if view.inner == middle == 1 and size % group == 0:
        outer, size = 1, outer * size  # groups follow each other: one long row, which needs no division
    macros = {"DTYPE": CUDA_TYPES[x.dtype], "INNER": int(view.inner > 1), "BLOCKS": group // NVFP4_BLOCK, **macros}
    count, slots = outer * -(-size // group), THREADS * NVFP4_BLOCK // group
    blocks = count * -(-view.inner // slots) if view.inner > 1 else -(-count // slots)
    launch = kernel("ms_eden.cu", "ms_eden", "PPPPPPPqqqq", macros, x.device).launch
    launch(min(blocks, BLOCKS * num_sms(x.device)), THREADS, x, *tensors, outer, size, view.inner, middle)


@operator(
    "ms_eden_amax(Tensor x, Tensor rotation, int axis) -> Tensor",
    lambda x, rotation, axis: x.new_empty((), dtype=torch.float32),
    ANY_DEVICE,
)
def _ms_eden_amax(x: torch.Tensor, rotation: torch.Tensor, axis: int) -> torch.Tensor:
    x, view, middle = _in_order(x, axis)
    cell = torch.zeros((), dtype=torch.float32, device=x.device)
    _launch(x, view, middle, {"PACKED": 0, "MEASURE": 1}, None, rotation, None, None, None, cell)
    return cell


def _outputs(x: torch.Tensor, axis: int, packed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    group = group_of(x.shape[axis])
    size = -(-x.shape[axis] // group) * group
    if packed:
        rows = [other for at, other in enumerate(x.shape) if at != axis]
        codes = torch.empty((*rows, size // 2), dtype=torch.uint8, device=x.device)
        return codes, torch.empty((*rows, size // NVFP4_BLOCK), dtype=torch.float8_e4m3fn, device=x.device)
    last = is_channels_last(x) and not x.is_contiguous()
    shape = [size if at == axis else other for at, other in enumerate(x.shape)]
    layout = CHANNELS_LAST[x.ndim] if last else torch.contiguous_format
    values = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=layout)
    return values, x.new_empty(0, dtype=torch.float8_e4m3fn)


def _fake_ms_eden(x, amax, rotation, random, axis, packed):  # type: ignore[no-untyped-def]
    return _outputs(_in_order(x, axis)[0], axis, packed)


@operator(
    "ms_eden(Tensor x, Tensor amax, Tensor rotation, Tensor random, int axis, bool packed) -> (Tensor, Tensor)",
    _fake_ms_eden,
    ANY_DEVICE,
)
def _ms_eden(
    x: torch.Tensor, amax: torch.Tensor, rotation: torch.Tensor, random: torch.Tensor, axis: int, packed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    x, view, middle = _in_order(x, axis)
    first, scales = _outputs(x, axis, packed)
    _launch(
        x,
        view,
        middle,
        {"PACKED": int(packed), "MEASURE": 0},
        amax,
        rotation,
        random,
        first,
        scales if packed else None,
        None,
    )
    return first, scales
