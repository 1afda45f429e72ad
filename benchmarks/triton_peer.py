"""NVFP4 fake quantisation as a short Triton kernel: what our CUDA kernels must not be slower than.

The values are those of the contract up to the order of the scale's multiplications; no in-range mask, no 4/6, blocks
along rows alone, a size that is a multiple of the block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _kernel(x, y, amax, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.reshape(tl.load(x + at).to(tl.float32), (BLOCK // 16, 16))
    scale = 2688.0 / tl.load(amax)
    d8 = (tl.max(tl.abs(values), 1) * (scale / 6)).to(tl.float8e4nv).to(tl.float32)
    u = tl.minimum(tl.abs(values) * tl.where(d8 > 0, scale / d8, 0.0)[:, None], 6.0)
    steps = tl.where(u < 2, 2.0, tl.where(u < 4, 1.0, 0.5))
    q = ((u * steps + 12582912.0) - 12582912.0) / steps  # adding 1.5 * 2^23 rounds to nearest even
    result = tl.where(values < 0, -q, q) * (d8 / scale)[:, None]
    tl.store(y + at, tl.reshape(result, (BLOCK,)).to(y.dtype.element_ty))


def fake_quantize(x: torch.Tensor, amax: torch.Tensor, block: int = 4096) -> torch.Tensor:
    """Fake quantisation of a contiguous tensor with a global amax, float32 []."""
    y = torch.empty_like(x)
    _kernel[(x.numel() // block,)](x, y, amax, BLOCK=block, num_warps=8)
    return y
