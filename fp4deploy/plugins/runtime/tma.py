"""Descriptions of matrices in memory, by which a GPU's copy engine reads them box by box, from SM90 on.

The driver makes them (`cuTensorMapEncodeTiled`), on the host, in the context of the GPU and without a launch. They hold
an address and sizes, no contents, and are handed to a kernel by value: nothing has to be copied or waited for.

Boxes beside each other are a third axis with a smaller pitch than the second, which the driver's manual does not show;
drivers of CUDA 13.0 take it, and an H200 reads it as it should.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from fp4deploy.plugins.runtime.context import Gpu, library
from fp4deploy.plugins.runtime.nvcc import KernelError

SIZE, _ALIGNMENT = 128, 64  # bytes
_BYTES, _PLAIN, _AS_ASKED, _ZEROS = 0, 0, 0, 0  # of the driver's enumerations: uint8, not interleaved, promotion, fill
_SWIZZLES = {32: 1, 128: 3}  # by bytes of a row of a box


def tensor_map(gpu: Gpu, matrix: torch.Tensor, rows: int, width: int, beside: int = 1) -> bytes:
    """The description of a matrix of bytes in boxes of `rows` x `width` bytes.

    In shared memory 16-byte words of a box's rows change places, as the driver's swizzle by `width` bytes says. What
    lies outside of the matrix is read as zeros.

    Args:
        gpu: the one that the matrix is on.
        matrix: one byte an element [N, W], contiguous, aligned to 16 bytes, W a multiple of 16.
        rows: of a box, at most 256.
        width: of a box, 32 or 128.
        beside: boxes that are read at once, one behind the other in shared memory; with more than one, `width`
            divides W.

    Raises:
        KernelError: the driver refuses the sizes.
    """
    return _encoded(gpu, matrix.data_ptr(), *matrix.shape, rows, width, beside)


@lru_cache(4096)
def _encoded(gpu: Gpu, address: int, n: int, w: int, rows: int, width: int, beside: int) -> bytes:
    room = (ctypes.c_char * (SIZE + _ALIGNMENT))()
    place = (ctypes.addressof(room) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
    # Boxes beside each other lie along a third axis.
    sizes, pitches, box = (
        ((w, n), (w,), (width, rows)) if beside == 1 else ((width, n, w // width), (w, width), (width, rows, beside))
    )
    gpu.context.push()  # a thread that has done nothing on a GPU yet has none
    try:
        result = library().cuTensorMapEncodeTiled(
            *(ctypes.c_void_p(place), _BYTES, len(box), ctypes.c_void_p(address)),
            *((ctypes.c_uint64 * len(sizes))(*sizes), (ctypes.c_uint64 * len(pitches))(*pitches)),
            *((ctypes.c_uint32 * len(box))(*box), (ctypes.c_uint32 * len(box))(*(1 for _ in box))),
            *(_PLAIN, _SWIZZLES[width], _AS_ASKED, _ZEROS),
        )
    finally:
        gpu.driver.Context.pop()
    if result:
        raise KernelError(
            f"The driver does not describe [{n}, {w}] in boxes of [{rows}, {width}]: CUDA error {result}."
        )
    return ctypes.string_at(place, SIZE)
