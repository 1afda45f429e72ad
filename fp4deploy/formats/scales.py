"""The two-level scale of NVFP4: from amax values to E4M3 block scales and what multiplies the elements.

With A the global amax (of a tensor, of a row, or calibrated), a the amax of a block and E the largest block scale used
(448, E4M3's largest value, or 256 where a block may need 1.5 times as much), all in fp32 and in this order:

    S  = min(6E / A, FLT_MAX)                  encodes: the largest block's scale becomes exactly E
    d8 = E4M3(min(a * (S * fp32(1/6)), 448))   the block scale
    e  = min(1 / (d8 * (1 / S)), FLT_MAX)      multiplies an element into E2M1's range
    (d8 * A) * fp32(1 / 6E)                    what one unit of E2M1 stands for

Q/DQ operators and tensor-core GEMMs take A / 6E instead of A: `global_scale` and `global_amax` convert. The round trip
moves A by at most one ulp and is idempotent, so `deployed_amax`, the A that every runtime reads back, is a fixed point.

Without the global scale, E4M3's smallest value would end the range at 2^-9: gradients below 6 * 2^-9 would vanish.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", 2025, for the two levels; the order of operations is
this project's contract, checked bitwise against public references.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeVar

import numpy as np
import torch

from fp4deploy.formats.constants import E2M1_MAX, E4M3_MAX, nvfp4_range

FLT_MAX = torch.finfo(torch.float32).max
ZEROS_AMAX = 2.0**-14  # the tracked amax of zeros alone: the smallest normal number of FP16

Float32 = TypeVar("Float32", torch.Tensor, np.float32)


def constant(value: float, like: torch.Tensor) -> torch.Tensor:
    """float32 [] on the device of `like`.

    A Python number would do for sums and products. In a quotient torch makes number / tensor a product with the
    reciprocal, and on CUDA tensor / number too: one rounding more than the contract has.
    """
    return torch.full((), value, dtype=torch.float32, device=like.device)


@lru_cache(maxsize=1024)
def kept(value: float) -> torch.Tensor:
    """float32 [] on the CPU, the same in every call: not to be written to. Of a number torch makes one in each call."""
    return torch.tensor(value, dtype=torch.float32)


def encoding_scale(amax: torch.Tensor, e4m3_max: float = E4M3_MAX) -> torch.Tensor:
    """S, float32 like `amax`; 1 where the quotient vanishes or nothing is to be encoded."""
    scale = (constant(nvfp4_range(e4m3_max), amax) / amax).clamp(max=FLT_MAX)
    return torch.where((scale == 0) | (amax == 0), 1.0, scale)


def round_scales(
    unrounded: torch.Tensor, block_amax: torch.Tensor, amax: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round block scales to E4M3: (d8, e), float32, shaped like `block_amax`.

    d8 is NaN for a block with a NaN or an Inf. e is 0 where every code of the block is 0: zero scales and those blocks.
    """
    finite = torch.isfinite(block_amax)
    clamped = torch.where(finite & (amax > 0), unrounded, 0.0).clamp(max=E4M3_MAX)
    d8 = clamped.to(torch.float8_e4m3fn).to(torch.float32)
    encode = torch.where(d8 > 0, (1 / (d8 * (1 / scale))).clamp(max=FLT_MAX), 0.0)
    return torch.where(finite, d8, float("nan")), encode


def block_scales(
    block_amax: torch.Tensor, amax: torch.Tensor, e4m3_max: float = E4M3_MAX
) -> tuple[torch.Tensor, torch.Tensor]:
    """(d8, e) of blocks that map their amax to 6; `amax` broadcasts against `block_amax`."""
    scale = encoding_scale(amax, e4m3_max)
    return round_scales(block_amax * (scale * constant(1 / E2M1_MAX, scale)), block_amax, amax, scale)


def block_step(d8: torch.Tensor, amax: torch.Tensor, e4m3_max: float = E4M3_MAX) -> torch.Tensor:
    """What one unit of E2M1 stands for in each block: (d8 * A) * fp32(1 / 6E), float32, shaped like `d8`."""
    return (d8.to(torch.float32) * amax) * constant(1 / nvfp4_range(e4m3_max), d8)


def finite_amax(x: torch.Tensor, axis: int | None = None) -> torch.Tensor:
    """The largest finite magnitude of `x` (0 if there is none), float32: [], or with `axis` reduced to size 1."""
    if x.numel() == 0:
        shape = () if axis is None else tuple(1 if at == axis else size for at, size in enumerate(x.shape))
        return torch.zeros(shape, device=x.device)
    if axis is None and x.device.type == "cpu" and not torch.compiler.is_compiling():
        low, high = torch.aminmax(x)
        amax = torch.maximum(-low, high).abs().to(torch.float32)  # of zeros no -0, which values would take over
        if torch.isfinite(amax):
            return amax
    magnitude = x.abs().to(torch.float32)
    magnitude = torch.where(torch.isfinite(magnitude), magnitude, 0.0)
    return magnitude.amax() if axis is None else magnitude.amax(axis, keepdim=True)


def global_scale(amax: Float32, e4m3_max: float = E4M3_MAX) -> Float32:
    """fp32(A / 6E): the global scale that ONNX's Q/DQ operators and scaled matrix multiplications take."""
    if isinstance(amax, torch.Tensor):
        return amax / constant(nvfp4_range(e4m3_max), amax)
    return np.float32(amax / np.float32(nvfp4_range(e4m3_max)))


def global_amax(scale: Float32, e4m3_max: float = E4M3_MAX) -> Float32:
    """fp32(scale * 6E): the A of a stored global scale. A file that does not say its E is read with E = 448."""
    if isinstance(scale, torch.Tensor):
        return scale * constant(nvfp4_range(e4m3_max), scale)
    return np.float32(scale * np.float32(nvfp4_range(e4m3_max)))


def tracked_amax(largest: torch.Tensor, tracked: torch.Tensor, decay: float) -> torch.Tensor:
    """The amax that is tracked after a tensor of the finite amax `largest`: max(largest, decay * tracked).

    A tensor of zeros is exact with any scale, but 0 is none, and means that there was no tensor: it gives at least
    `ZEROS_AMAX`.

    >>> tracked_amax(torch.tensor(0.0), torch.tensor(0.0), 0.99)
    tensor(6.1035e-05)
    """
    moved = torch.maximum(largest, tracked * decay)
    return torch.where(largest > 0, moved, moved.clamp_min(ZEROS_AMAX))


def deployed_amax(amax: Float32, e4m3_max: float = E4M3_MAX) -> Float32:
    """The A that is read back after `amax` was stored as a global scale: at most one ulp away, and a fixed point."""
    return global_amax(global_scale(amax, e4m3_max), e4m3_max)
