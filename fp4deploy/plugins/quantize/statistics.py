"""Statistics of a GroupNorm for inference: moments of parts of a feature map, combined to y = a x + b.

    moments = chunk_moments(x)                         or those that a convolution wrote with its output
    ab = combine(moments, x.shape, bias, gamma, beta, groups, eps)                 float32 [N, 2, C]

Two small kernels (`cuda/norm_statistics.cu`). At batch 1 a feature map is cut into many parts, and what combines them
must be parallel over the parts as well as over the channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

VECTOR = 8
COMBINING = 1024  # threads at most that combine the parts of a group
SECTOR = 8  # numbers that are read from memory at once
PARTS = 264  # of a batch: two for each multiprocessor of a large GPU


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and squared deviations of each channel over parts of a feature map.

    parts: float32 [parts, 2, 2, C], see `cuda/norm_statistics.cu`.
    rows: pixels of a part.
    per_item: parts of a batch item; 0 where parts are cut from the pixels of the whole batch.
    tile: height and width of a part that is a tile of the feature map; (0, 0) where parts are runs of pixels.
    height: of a slice, where tiles are those of the slices of a volume; 0 of a feature map.
    """

    parts: torch.Tensor
    rows: int
    per_item: int = 0
    tile: tuple[int, int] = (0, 0)
    height: int = 0


def pop_moments(moments: dict[str, Moments] | None, name: str) -> Moments | None:
    """Those of an activation, if there are any; they are not kept."""
    return None if moments is None else moments.pop(name, None)


def chunk_moments(x: torch.Tensor) -> Moments:
    """Moments of a feature map [N, H, W, C], contiguous, float16 or bfloat16, on a GPU.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    n, h, w, c = x.shape
    pixels, at_once = h * w, THREADS // (c // VECTOR)
    count = max(1, min(-(-pixels // (2 * at_once)), -(-PARTS // n)))
    per_chunk = -(-pixels // count)
    count = -(-pixels // per_chunk)
    parts = torch.empty(n * count, 2, 2, c, dtype=torch.float32, device=x.device)
    run = kernel("norm_statistics.cu", "chunk_moments", "PPqiq", {"DTYPE": CUDA_TYPES[x.dtype]}, x.device)
    launch_secondary(run, (count, n), THREADS, x, parts, pixels, c, per_chunk, shared=8 * at_once * c)
    return Moments(parts, per_chunk, count)


def combine(
    moments: Moments,
    shape: Sequence[int],
    bias: torch.Tensor | None,
    weight: torch.Tensor,
    beta: torch.Tensor,
    groups: int,
    eps: float,
) -> torch.Tensor:
    """a and b, float32 [N, 2, C], of a feature map of `shape` [N, H, W, C]; of a volume, of the rows of all slices.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    n, h, w, c = shape
    ab = torch.empty(n, 2, c, dtype=torch.float32, device=weight.device)
    macros: dict[str, str | int] = {"DTYPE": "__half", **({"VOLUME": 1} if moments.height else {})}
    slices = (moments.height,) if moments.height else ()
    run = kernel("norm_statistics.cu", "combine_moments", "PPPPPfqiiqiiiii" + "i" * len(slices), macros, weight.device)
    vectors = (moments.parts, bias, weight, beta, ab)
    span = _span(c // groups, groups)
    sizes = (h * w, c, groups, moments.rows, moments.per_item, *moments.tile, w, span, *slices)
    launch_secondary(run, (c // span, n), _threads(moments, h * w, span), *vectors, eps, *sizes)
    return ab


def _span(width: int, groups: int) -> int:
    """Channels of a block, whole groups of `width`: where each was a block's, as for an InstanceNorm, a load of 4 bytes
    read a sector of 32 (23 us for 16 images of 352x480 with 32 channels, one H200, 2026-11-29).
    """
    whole = (count for count in range(1, groups + 1) if groups % count == 0)
    return width * next(count for count in whole if count == groups or count * width >= SECTOR)


def _threads(moments: Moments, pixels: int, width: int) -> int:
    """Of a block that combines the parts of one batch item, `width` channels of each: two parts a thread or more."""
    parts = moments.per_item or pixels // moments.rows + 2
    lanes = 1 << max(0, (-(-parts // 2) - 1).bit_length())
    return min(COMBINING, -(-width * lanes // 32) * 32)
