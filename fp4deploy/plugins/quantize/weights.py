"""Fake quantisation of all weights of a model in two launches, for any number of layers.

Each weight is NVFP4 in 1-D blocks along its own contraction axis, with its own amax as global scale, rounded to the
dtype that the convolution reads: bitwise `formats.fake_quantize_nvfp4(weight, (axis,))[0].to(dtype)`. The table of
addresses and sizes is cached between steps; parameters keep their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache

import torch

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.quantize.layout import is_channels_last
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS, operator

PER_BLOCK = 256
ALIGNMENT = 16


def fake_quantize_weights(
    weights: Sequence[torch.Tensor], axes: Sequence[int], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    """Fake-quantise float32 CUDA weights along their contraction `axes`; the result has `dtype` and their strides.

    The results are views of one buffer. Gradients are not recorded.
    """
    flat = torch.ops.fp4deploy.fake_quantize_weights([weight.detach() for weight in weights], list(axes), dtype)
    starts, _ = _starts(tuple(weight.numel() for weight in weights))
    return tuple(
        flat.as_strided(weight.shape, weight.stride(), start) for weight, start in zip(weights, starts, strict=True)
    )


def weight_fits(weight: torch.Tensor) -> bool:
    """Whether the kernel takes this weight: float32, dense in memory."""
    dense = weight.is_contiguous() or is_channels_last(weight)
    return weight.dtype == torch.float32 and dense and weight.numel() > 0


def _fake_fake_quantize_weights(weights, axes, dtype):  # type: ignore[no-untyped-def]
    _, total = _starts(tuple(weight.numel() for weight in weights))
    return torch.empty(total, dtype=dtype, device=weights[0].device)


@operator(
    "fake_quantize_weights(Tensor[] weights, int[] axes, ScalarType dtype) -> Tensor", _fake_fake_quantize_weights
)
def _fake_quantize_weights(weights: list[torch.Tensor], axes: list[int], dtype: torch.dtype) -> torch.Tensor:
    device = weights[0].device
    layouts = tuple(
        (w.data_ptr(), w.numel(), w.shape[axis], w.stride(axis)) for w, axis in zip(weights, axes, strict=True)
    )
    table, blocks, total = _table(layouts, device)
    amax = torch.zeros(len(weights), dtype=torch.float32, device=device)
    out = torch.empty(total, dtype=dtype, device=device)
    macros = {"DTYPE": CUDA_TYPES[dtype]}
    find = kernel("weights.cu", "weight_amax", "PPi", macros, device)
    find.launch(blocks, THREADS, table, amax, len(weights))
    quantize = kernel("weights.cu", "weight_quantize", "PPPi", macros, device)
    quantize.launch(blocks, THREADS, table, amax, out, len(weights))
    return out


@lru_cache
def _starts(counts: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    starts, total = [], 0
    for count in counts:
        starts.append(total)
        total += -(-count // ALIGNMENT) * ALIGNMENT
    return tuple(starts), total


@cache  # a CUDA graph reads a table as long as it is replayed: none is ever dropped, each a few KB
def _table(layouts: tuple[tuple[int, int, int, int], ...], device: torch.device) -> tuple[torch.Tensor, int, int]:
    starts, total = _starts(tuple(count for _, count, _, _ in layouts))
    rows, block = [], 0
    for (address, count, size, stride), start in zip(layouts, starts, strict=True):
        rows.append((address, start, count, size, stride if size > 1 else 1, block))
        groups = count // size * -(-size // NVFP4_BLOCK)
        block += -(-groups // PER_BLOCK)
    return torch.tensor(rows, dtype=torch.int64, device=device), block, total
