"""Tensor maps (`CUtensorMap`) for the Tensor Memory Accelerator (TMA), which copies boxes of a matrix, from SM90 on.

The driver encodes them on the host (`cuTensorMapEncodeTiled`), in the context of the GPU and without a launch. A tensor
map has an address, sizes, strides and a swizzle, no contents. It is passed to a kernel by value (`__grid_constant__`),
so nothing is copied to the device first.

Adjacent boxes of the same rows are loaded by one instruction: they are a third axis whose stride is smaller than that
of the second. The driver's manual shows no such case; drivers of CUDA 13.0 accept it, and it was tested on an H200.

Source: CUDA Driver API, "Tensor Map Object Management"; CUDA C++ Programming Guide, "Asynchronous Data Copies using the
Tensor Memory Accelerator (TMA)".
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.plugins.runtime.context import Gpu, library
from fp4deploy.plugins.runtime.launch import Kernel
from fp4deploy.plugins.runtime.nvcc import LaunchError

Sizes = tuple[int, ...]

SIZE, _ALIGNMENT = 128, 64  # bytes
# Of the driver's enumerations: uint8, not interleaved, no L2 promotion, out-of-range elements are zeros.
_UINT8, _NOT_INTERLEAVED, _NO_PROMOTION, _ZERO_FILL = 0, 0, 0, 0
_SWIZZLES = {32: 1, 64: 2, 128: 3}  # CUtensorMapSwizzle by bytes of a row of a box


def tensor_map(gpu: Gpu, matrix: torch.Tensor, rows: int, width: int, adjacent: int = 1) -> bytes:
    """The tensor map of a matrix of bytes, in boxes of `rows` x `width` bytes.

    In shared memory the 16-byte words of each row are permuted by the swizzle of `width` bytes, so that a warp that
    reads a column of words has no bank conflicts. Bytes outside of the matrix are read as zeros.

    Args:
        gpu: the one that the matrix is on.
        matrix: one byte an element [N, W], contiguous, aligned to 16 bytes, W a multiple of 16.
        rows: of a box, at most 256.
        width: of a box, 32 or 128.
        adjacent: boxes along a row that one instruction loads, stored one after the other; if more than one, `width`
            divides W.

    Raises:
        LaunchError: the driver refuses the sizes.
    """
    return _encoded(gpu, matrix.data_ptr(), *matrix.shape, rows, width, adjacent)


def kernel_tensor_map(kernel: Any, tensor: torch.Tensor, sizes: Sizes, strides: Sizes, box: Sizes, width: int) -> bytes:
    """The tensor map of bytes for a launch of a kernel.

    Args:
        kernel: of `runtime.launch.kernel`; what is substituted for one encodes by itself.
        tensor: the bytes, contiguous, aligned to 16 bytes.
        sizes, strides, box: as `tiling` gives them, the innermost axis first.
        width: of the swizzle: 32, 64 or 128 bytes.

    Raises:
        LaunchError: the driver refuses the sizes.
    """
    if not isinstance(kernel, Kernel):
        return kernel.tensor_map(tensor.data_ptr(), sizes, strides, box, width)
    return _kept(kernel.gpu, tensor.data_ptr(), sizes, strides, box, width)


def tiling(
    n: int, w: int, rows: int, width: int, adjacent: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Sizes, strides in bytes (of all axes but the innermost) and box of `tensor_map`, the innermost axis first."""
    if adjacent == 1:
        return (w, n), (w,), (width, rows)
    return (width, n, w // width), (w, width), (width, rows, adjacent)  # adjacent boxes are a third axis


@lru_cache(4096)
def _encoded(gpu: Gpu, address: int, n: int, w: int, rows: int, width: int, adjacent: int) -> bytes:
    return encode(gpu, address, *tiling(n, w, rows, width, adjacent), width)


@lru_cache(4096)
def _kept(gpu: Gpu, address: int, sizes: Sizes, strides: Sizes, box: Sizes, width: int) -> bytes:
    return encode(gpu, address, sizes, strides, box, width)


def encode(
    gpu: Gpu, address: int, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], width: int
) -> bytes:
    """The tensor map of bytes at an address, of the form that `tiling` gives; `width`: of the swizzle.

    Raises:
        LaunchError: the driver refuses the sizes.
    """
    room = (ctypes.c_char * (SIZE + _ALIGNMENT))()
    place = (ctypes.addressof(room) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    gpu.context.push()  # a host thread that has used no GPU yet has no context
    try:
        result = library().cuTensorMapEncodeTiled(
            *(ctypes.c_void_p(place), _UINT8, len(box), ctypes.c_void_p(address)),
            *((ctypes.c_uint64 * len(sizes))(*sizes), (ctypes.c_uint64 * len(strides))(*strides)),
            *((ctypes.c_uint32 * len(box))(*box), (ctypes.c_uint32 * len(box))(*(1 for _ in box))),
            *(_NOT_INTERLEAVED, _SWIZZLES[width], _NO_PROMOTION, _ZERO_FILL),
        )
    finally:
        gpu.driver.Context.pop()
    if result:
        raise LaunchError(
            f"The driver encodes no tensor map of {list(sizes)[::-1]} in boxes of {list(box)[::-1]}: CUDA error "
            f"{result}."
        )
    return ctypes.string_at(place, SIZE)
