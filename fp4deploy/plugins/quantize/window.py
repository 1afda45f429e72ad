"""Layers of packed networks that choose among pixels: maximum pooling over any window, nearest resizing of packed maps.

torch's kernels for these two spend most of their time on what inference does not need, the position of each maximum, or
on codes byte by byte. Both functions use `cuda/window.cu` where it runs and torch elsewhere, with the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from fp4deploy.formats import NVFP4_BLOCK, Nvfp4Tensor
from fp4deploy.plugins.quantize.channels_last import VECTOR
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

SOURCE, ANY = "window.cu", "__half"  # dtype of a kernel that has none
LARGEST = 1 << 31  # threads
Pair = tuple[int, int]

fallback = Fallback("Pooling and resizing of packed networks", "torch")


def max_pool(
    x: torch.Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> torch.Tensor:
    """`torch.nn.functional.max_pool2d` of [N, C, H, W]."""
    y: torch.Tensor
    fits = x.dtype in (torch.float16, torch.bfloat16) and x.ndim == 4 and x.shape[1] % VECTOR == 0
    fits = fits and 0 < x.numel() < LARGEST and x.is_contiguous(memory_format=torch.channels_last)
    if fits and fallback.runs(x.device):
        with fallback.guard(x.device):
            return max_pool_kernel(x, kernel_size, stride, padding, dilation, ceil_mode)
    y = F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)
    return y


def max_pool_kernel(
    x: torch.Tensor, kernel_size: Pair, stride: Pair, padding: Pair, dilation: Pair, ceil_mode: bool
) -> torch.Tensor:
    """`max_pool` by the kernel; `x` is channels_last and C a multiple of 8.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    n, c, h, w = x.shape
    meta = torch.empty((1, 1, h, w), device="meta")
    _, _, height, width = F.max_pool2d(meta, kernel_size, stride, padding, dilation, ceil_mode).shape
    y = torch.empty((n, c, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    run = kernel(SOURCE, "max_window", "PPiiiiiiiiiiiiii", {"DTYPE": CUDA_TYPES[x.dtype]}, x.device)
    threads = y.numel() // VECTOR
    sizes = (h, w, c, height, width, *kernel_size, *stride, *padding, *dilation)
    launch_secondary(run, -(-threads // THREADS), THREADS, x, y, threads, *sizes)
    return y


def resize_nearest(
    x: Nvfp4Tensor, size: Sequence[int] | None, scale: Sequence[float] | None, exact: bool
) -> Nvfp4Tensor:
    """`torch.nn.functional.interpolate` of a packed feature map [N, H, W, C], nearest or nearest-exact."""
    threads = len(x.codes) * math.prod(_resized(x, size, scale)) * x.scales.shape[-1]
    if fallback.runs(x.codes.device) and x.shape[-1] % NVFP4_BLOCK == 0 and 0 < threads < LARGEST:
        with fallback.guard(x.codes.device):
            return resize_kernel(x, size, scale, exact)
    mode = "nearest-exact" if exact else "nearest"
    parts = [part.permute(0, 3, 1, 2) for part in (x.codes, x.scales.view(torch.uint8))]
    given = None if size is None else list(size)
    codes, scales = (
        F.interpolate(each, given, None if scale is None else list(scale), mode).permute(0, 2, 3, 1).contiguous()
        for each in parts
    )
    return _like(x, codes, scales)


def resize_kernel(
    x: Nvfp4Tensor, size: Sequence[int] | None, scale: Sequence[float] | None, exact: bool
) -> Nvfp4Tensor:
    """`resize_nearest` by the kernel; C is a multiple of 16.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    n, h, w, c = x.shape
    height, width = _resized(x, size, scale)
    steps = [_step(h, height), _step(w, width)] if scale is None else [1 / each for each in scale]
    groups = c // NVFP4_BLOCK
    codes = x.codes.new_empty((n, height, width, c // 2))
    scales = torch.empty((n, height, width, groups), dtype=torch.uint8, device=codes.device)
    run = kernel(SOURCE, "nearest_groups", "PPPPiiiiiifff", {"DTYPE": ANY}, codes.device)
    threads = scales.numel()
    given = x.as_bytes[:2]
    sizes = (threads, h, w, groups, height, width, *steps, 0.5 if exact else 0.0)
    launch_secondary(run, -(-threads // THREADS), THREADS, *given, codes, scales, *sizes)
    return _like(x, codes, scales)


def _resized(x: Nvfp4Tensor, size: Sequence[int] | None, scale: Sequence[float] | None) -> tuple[int, int]:
    """Height and width of the result."""
    if size is not None:
        return size[0], size[1]
    assert scale is not None
    return int(x.shape[1] * scale[0]), int(x.shape[2] * scale[1])


def _step(size: int, wanted: int) -> float:
    """Pixels of the source between two of the result, in float32 as torch divides them."""
    return float(torch.tensor(size, dtype=torch.float32) / wanted)


def _like(x: Nvfp4Tensor, codes: torch.Tensor, scales: torch.Tensor) -> Nvfp4Tensor:
    shape = torch.Size((*codes.shape[:-1], x.shape[-1]))
    return replace(x, codes=codes, scales=scales.view(torch.float8_e4m3fn), shape=shape)
