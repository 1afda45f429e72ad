"""Packing an unfolded (im2col) feature map on a GPU, without unfolding it in memory: an operand of a weight gradient.

    operand [N, C * taps, P]     P the output pixels of an image in row-major order, blocks along P

A tap shifts the feature map, so that each tap has blocks of its own, and packed the operand has 4.5 bits for each tap
of an element. `pack_unfolded` packs a few images at a time: the GEMM that reads them adds to the gradient, and their
memory is free again. The global scale is of the whole operand, found in a pass that writes nothing.

The bytes are those of packing `torch.nn.functional.unfold`'s output by `dispatch.quantize_nvfp4` or `quantize_mxfp4`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fp4deploy.formats import MXFP4_BLOCK, NVFP4_BLOCK, FourOverSix, Mxfp4Tensor, Nvfp4Tensor
from fp4deploy.formats.hadamard import WIDTH
from fp4deploy.plugins.quantize.dispatch import mx_variant, nvfp4_variant, random_state
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

SIGNATURE = "PPPPPqqiiiiiiiiiiii"
BYTES = 1 << 28  # of codes that are packed at a time
Pair = tuple[int, int]


@dataclass(frozen=True)
class Unfolding:
    """The taps of a filter on a feature map, (vertical, horizontal) each; `grid`: output pixels."""

    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    grid: Pair


def pack_unfolded(
    x: torch.Tensor,
    unfolding: Unfolding,
    scale_rule: str | None = None,
    rounding: str = "nearest",
    four_over_six: FourOverSix | None = None,
    hadamard: bool = False,
    most_bytes: int = BYTES,
) -> Iterator[tuple[slice, Nvfp4Tensor | Mxfp4Tensor]]:
    """Pack `x` unfolded, in blocks along the pixels, a few images at a time.

    Args:
        x: [N, C, H, W] on a GPU, float16, bfloat16 or float32.
        scale_rule: of MXFP4; None packs NVFP4.
        rounding, four_over_six, hadamard: as of `dispatch.quantize_nvfp4`; one seed is drawn for all images.
        most_bytes: of codes at a time; one image at least.

    Yields:
        Slices of the batch, each with its images packed, [images, C * taps, P].
    """
    x = x.detach().contiguous()
    variant = mx_variant(scale_rule, hadamard) if scale_rule else nvfp4_variant(four_over_six, hadamard, False)
    random = random_state(x, rounding, None, 0)
    pixels, block = unfolding.grid[0] * unfolding.grid[1], MXFP4_BLOCK if scale_rule else NVFP4_BLOCK
    blocks, rows = -(-pixels // block), x.shape[1] * unfolding.kernel[0] * unfolding.kernel[1]
    groups = blocks * (block // NVFP4_BLOCK)
    amax = None
    if scale_rule is None:
        amax = torch.zeros((), dtype=torch.float32, device=x.device)
        _launch(x, unfolding, amax, None, (amax, None), variant, (0, x.shape[0] * rows), groups, packed=3)
    step = max(1, most_bytes // (rows * groups * 8))
    size = -(-pixels // WIDTH) * WIDTH if hadamard else pixels
    for first in range(0, x.shape[0], step):
        count = min(step, x.shape[0] - first)
        codes = torch.empty((count, rows, groups * 8), dtype=torch.uint8, device=x.device)
        scales = torch.empty((count, rows, blocks), dtype=torch.uint8, device=x.device)
        chunk = (first * rows, count * rows)
        _launch(x, unfolding, amax, random, (codes, scales), variant, chunk, groups, packed=1)
        shape = torch.Size((count, rows, size))
        yield (
            slice(first, first + count),
            Mxfp4Tensor(codes, scales, shape)
            if amax is None
            else Nvfp4Tensor(codes, scales.view(torch.float8_e4m3fn), amax, shape, variant[1]),
        )


def _launch(
    x: torch.Tensor,
    unfolding: Unfolding,
    amax: torch.Tensor | None,
    random: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor | None],
    variant: list[int],
    chunk: tuple[int, int],
    groups: int,
    packed: int,
) -> None:
    names = ("FORMAT", "E", "SQUARED", "FAST", "HADAMARD", "ROWS")
    macros: dict[str, str | int] = {
        "DTYPE": CUDA_TYPES[x.dtype],
        "STOCHASTIC": int(random is not None and packed == 1),
        **dict(zip(names, variant, strict=True)),
    }
    macros |= {"PACKED": packed, "IN_RANGE": 0, "INNER": 0, "LINEAR": 0, "BIG": 0}
    taps = unfolding.kernel[0] * unfolding.kernel[1]
    first, rows = chunk
    sizes = (rows, first, *x.shape[2:], *unfolding.grid, taps, unfolding.kernel[1])
    steps = (*unfolding.stride, *unfolding.padding, *unfolding.dilation)
    launch = kernel("pack_taps.cu", "pack_taps", SIGNATURE, macros, x.device).launch
    launch(-(-rows * groups // THREADS), THREADS, x, amax, random, *outputs, *sizes, *steps)
