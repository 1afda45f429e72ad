"""Quantising an unfolded (im2col) feature map on a GPU without unfolding it in memory: an operand of a weight gradient.

    operand [N, C * taps, P]     P the output pixels of an image in row-major order, blocks along P

A tap shifts the feature map, so that each tap has blocks of its own, and packed the operand has 4.5 bits for each tap
of an element. `pack_unfolded` packs a few images at a time: the GEMM that reads them adds to the gradient, and their
memory is free again. `fake_quantize_unfolded` writes the values that a GEMM in higher precision multiplies, once. The
global scale is of the whole operand, found in a pass that writes nothing.

The bytes are those of quantising `torch.nn.functional.unfold`'s output by `dispatch`'s functions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp4deploy.formats import MXFP4_BLOCK, NVFP4_BLOCK, FourOverSix, Mxfp4Tensor, Nvfp4Tensor
from fp4deploy.formats.hadamard import WIDTH
from fp4deploy.formats.mxfp4 import SCALE_RULES
from fp4deploy.plugins.quantize.dispatch import finite_amax, mx_variant, nvfp4_variant, random_state, runs_on_gpu
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, SMALL, THREADS

SIGNATURE = "PPPPPqqiiiiiiiiiiiiii"
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

    @property
    def taps(self) -> int:
        """Taps of the filter."""
        return self.kernel[0] * self.kernel[1]


@lru_cache
def reads_all(unfolding: Unfolding, size: Pair) -> bool:
    """Whether some tap of some output pixel reads each pixel of a feature map of this height and width."""
    steps = (unfolding.grid, unfolding.kernel, unfolding.stride, unfolding.padding, unfolding.dilation)
    return all(
        {at * stride - padding + tap * dilation for at in range(pixels) for tap in range(taps)} >= set(range(length))
        for length, pixels, taps, stride, padding, dilation in zip(size, *steps, strict=True)
    )


def supports(x: torch.Tensor, scale_rule: str | None = None) -> bool:
    """Whether the kernel quantises this feature map [N, C, H, W] with this rule (None: NVFP4)."""
    return x.ndim == 4 and runs_on_gpu(x) and (scale_rule is None or scale_rule in SCALE_RULES)


def fake_quantize_unfolded(
    x: torch.Tensor,
    unfolding: Unfolding,
    dtype: torch.dtype,
    scale_rule: str | None = None,
    rounding: str = "nearest",
    four_over_six: FourOverSix | None = None,
    hadamard: bool = False,
) -> torch.Tensor:
    """Quantise and dequantise `x` unfolded, in blocks along the pixels.

    Args:
        dtype: of the result.
        x, unfolding, scale_rule, rounding, four_over_six, hadamard: as of `pack_unfolded`.

    Returns:
        [N, C * taps, P], with `hadamard` P padded to a multiple of 16; in memory [C * taps, N, P], so that a GEMM over
        images and pixels reads it as a matrix without a copy.
    """
    x = x.detach().contiguous()
    variant = mx_variant(scale_rule, hadamard) if scale_rule else nvfp4_variant(four_over_six, hadamard, False)
    random, amax = random_state(x, rounding, None, 0), None if scale_rule else _amax(x, unfolding, variant)
    size, groups = _padded(unfolding, hadamard), _groups(unfolding, scale_rule)
    rows = x.shape[1] * unfolding.taps
    values = torch.empty((rows, x.shape[0], size), dtype=dtype, device=x.device)
    _launch(x, unfolding, amax, random, (values, None), variant, (0, x.shape[0] * rows), groups, packed=0)
    return values.transpose(0, 1)


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
    rows, groups = x.shape[1] * unfolding.taps, _groups(unfolding, scale_rule)
    blocks = groups // (MXFP4_BLOCK // NVFP4_BLOCK) if scale_rule else groups
    amax = None if scale_rule else _amax(x, unfolding, variant)
    step = max(1, most_bytes // (rows * groups * 8))
    size = _padded(unfolding, hadamard)
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


def _groups(unfolding: Unfolding, scale_rule: str | None) -> int:
    """Groups of 16 pixels of a row, in whole blocks."""
    block = MXFP4_BLOCK if scale_rule else NVFP4_BLOCK
    return -(-unfolding.grid[0] * unfolding.grid[1] // block) * (block // NVFP4_BLOCK)


def _padded(unfolding: Unfolding, hadamard: bool) -> int:
    pixels = unfolding.grid[0] * unfolding.grid[1]
    return -(-pixels // WIDTH) * WIDTH if hadamard else pixels


def _amax(x: torch.Tensor, unfolding: Unfolding, variant: list[int]) -> torch.Tensor:
    """The finite amax of the unfolded and, with a Hadamard transform, transformed operand."""
    height, width = x.shape[2:]
    if not variant[4] and reads_all(unfolding, (height, width)):
        return finite_amax(x)
    amax = torch.zeros((), dtype=torch.float32, device=x.device)
    rows = x.shape[0] * x.shape[1] * unfolding.taps
    _launch(x, unfolding, amax, None, (amax, None), variant, (0, rows), _groups(unfolding, None), packed=3)
    return amax


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
        "STOCHASTIC": int(random is not None and packed != 3),
        **dict(zip(names, variant, strict=True)),
    }
    macros |= {"PACKED": packed, "IN_RANGE": 0, "INNER": 0, "LINEAR": 0}
    macros["OUT"] = CUDA_TYPES[outputs[0].dtype] if packed == 0 else macros["DTYPE"]
    images, channels, taps = *x.shape[:2], unfolding.taps
    first, rows = chunk
    macros["BIG"] = int(max(rows * groups, first + rows) > SMALL)
    sizes = (rows, first, channels * taps, images, *x.shape[2:], *unfolding.grid, taps, unfolding.kernel[1])
    steps = (*unfolding.stride, *unfolding.padding, *unfolding.dilation)
    launch = kernel("pack_taps.cu", "pack_taps", SIGNATURE, macros, x.device).launch
    launch(-(-rows * groups // THREADS), THREADS, x, amax, random, *outputs, *sizes, *steps)
