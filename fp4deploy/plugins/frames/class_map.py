"""The most likely class of each pixel of frames, from the logits of a network that computes at another size.

    masks = class_map(logits, (480, 640), torch.uint8)        [N, classes, 352, 480] -> [N, 480, 640]

By torch's operators the enlarged logits are larger than the network's input: 393 MB in float32 for 16 frames of 20
classes. The kernel (`cuda/class_map.cu`) reads the logits and writes the classes.

**Arithmetic.** As `F.interpolate(..., mode="bilinear", align_corners=False)` defines it, along the width and then along
the height, each product and sum rounded to float32: a fused multiply-add decides some ties otherwise, and whether torch
uses one depends on the processor. Of equal logits the first is the class, and NaN is above every number, as of
`torch.argmax`. Where the sizes are equal nothing is interpolated.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch

from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.nvcc import Macros
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

SOURCE = "class_map.cu"
MASKS = {torch.uint8: "unsigned char", torch.uint16: "unsigned short"}
# Measured fact: H200, torch 2.11, 2026-11-30, FP16 in channels_last: 16 x 20 x 352 x 480 to 480 x 640 in 63 us by
# blocks of 128 x 8 pixels, in 65 with staged rows; 4 x 150 x 512 x 512 to 700 x 900 in 516 us staged by blocks of
# 32 x 2, in 1,035 by 128 x 16. A pixel of a line or less is in the cache when its neighbour reads it.
COLUMNS, ROWS = 128, 8  # of a block
STAGED_COLUMNS, STAGED_ROWS = 32, 2
LINE = 128  # bytes of a pixel's logits above which they are staged
SHARED = 64 << 10  # bytes of a block that every GPU from SM80 on has
BAND = 1 << 24  # elements of the enlarged logits that exist at a time in torch
Size = tuple[int, int]

fallback = Fallback("Classes of frames", "torch")


def class_map(logits: torch.Tensor, size: Size, dtype: torch.dtype) -> torch.Tensor:
    """The class of each pixel of frames of `size`, `dtype` [N, *size].

    Args:
        logits: float16, bfloat16 or float32 [N, classes, h, w].
        dtype: uint8 or uint16, which holds the number of every class.

    >>> logits = torch.tensor([[[[0.0, 2.0]], [[1.0, 0.0]]]])
    >>> class_map(logits, (1, 4), torch.uint8).tolist()
    [[[1, 1, 0, 0]]]
    """
    if supports(logits, size) and fallback.runs(logits.device):
        with fallback.guard(logits.device):
            return class_map_kernel(logits, size, dtype)
    return class_map_reference(logits, size, dtype)


@torch.no_grad()
def class_map_reference(logits: torch.Tensor, size: Size, dtype: torch.dtype) -> torch.Tensor:
    """`class_map` in torch, a band of rows at a time."""
    count, classes, *given = logits.shape
    masks = torch.empty((count, *size), dtype=dtype, device=logits.device)
    if given == list(size):
        return masks.copy_(logits.argmax(1))
    if not masks.numel():
        return masks
    left, right, across = _places(given[1], size[1], logits.device)
    above, below, down = _places(given[0], size[0], logits.device)
    step = max(1, BAND // (classes * size[1]))
    for image, mask in zip(logits, masks, strict=True):
        for top in range(0, size[0], step):
            at = slice(top, top + step)
            first, last = int(above[at][0]), int(below[at][-1])
            rows = image[:, first : last + 1].float()
            rows = _mixed(rows.index_select(2, left), rows.index_select(2, right), across)
            upper, lower = (rows.index_select(1, each[at] - first) for each in (above, below))
            mask[at] = _mixed(upper, lower, down[at, None]).argmax(0)
    return masks


def _mixed(first: torch.Tensor, second: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """In the memory of the two."""
    return first.mul_(1 - share).add_(second.mul_(share))


@lru_cache(maxsize=64)
def _places(source: int, target: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of each pixel of an axis: the two that it lies between, int64, and the share of the second, float32."""
    at = ((torch.arange(target, dtype=torch.float32) + 0.5) * (source / target) - 0.5).clamp(0, source - 1)
    first = at.floor()
    second = (first.long() + 1).clamp(max=source - 1)
    return first.long().to(device), second.to(device), (at - first).to(device)


def supports(logits: torch.Tensor, size: Size) -> bool:
    """Whether the kernel takes these: its grid has 65535 blocks along two axes, and it counts an image in 31 bits."""
    count, classes, h, w = logits.shape
    counted = all(0 < each < 1 << 31 for each in (classes * h * w * logits.element_size(), math.prod(size)))
    return logits.dtype in CUDA_TYPES and counted and 0 < count < 1 << 16


def class_map_kernel(logits: torch.Tensor, size: Size, dtype: torch.dtype, block: Size | None = None) -> torch.Tensor:
    """`class_map` by the kernel; block: columns, up to 256, and rows of a thread block in place of the usual ones.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    (count, classes, h, w), (height, width) = logits.shape, size
    last = logits.is_contiguous(memory_format=torch.channels_last)
    logits = logits if last else logits.contiguous()
    logits = logits.clone() if logits.data_ptr() % 16 else logits
    down, across, same = h / height, w / width, (h, w) == size
    pixel = classes * logits.element_size()
    staged = last and not same and pixel > LINE
    columns, rows = block or ((STAGED_COLUMNS, STAGED_ROWS) if staged else (COLUMNS, ROWS))
    rows = max(rows, -(-height // 65535))

    def extent(pixels: int, ratio: float, most: int) -> int:
        """Of the logits that so many pixels lie between; one more for roundings of float32."""
        return min(most, math.ceil((pixels - 1) * ratio) + 3)

    # Two rows never meet, each from and to a multiple of 16; and each lies at its own address modulo 16.
    pitch = -(-(extent(columns, across, w) * pixel + 30) // 16) * 16 + w * pixel % 16
    shared = pitch * extent(rows, down, h) + 32
    staged = staged and shared <= SHARED
    kinds = {"LAST": int(last), "SAME": int(same), "STAGED": int(staged)}
    macros: Macros = {"DTYPE": CUDA_TYPES[logits.dtype], "OUT": MASKS[dtype], "CLASSES": classes, **kinds}
    masks = torch.empty((count, height, width), dtype=dtype, device=logits.device)
    run = kernel(SOURCE, "class_map_of_frames", "PPiiiiffii", macros, logits.device)
    grid = (-(-width // columns), -(-height // rows), count)
    sizes = (h, w, height, width, down, across, rows, pitch)
    run.launch(grid, columns, logits, masks, *sizes, shared=shared if staged else 0)
    return masks
