"""Small kernels for the tests of ahead-of-time compilation."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, out, n, factor, BLOCK: tl.constexpr):
    """out = factor * x."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < n
    tl.store(out + offsets, factor * tl.load(x + offsets, mask=inside), mask=inside)


@triton.jit
def matmul_kernel(
    a, a_scales, b, b_scales, out, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr
):
    """One tile of a b^T: packed NVFP4 with scales where NATIVE, float16 otherwise."""
    rows, columns = tl.arange(0, BM), tl.arange(0, BN)
    acc = tl.zeros((BM, BN), tl.float32)
    if NATIVE:
        bytes_, blocks = tl.arange(0, BK // 2), tl.arange(0, BK // 16)
        for k in range(0, K, BK):
            left = tl.load(a + rows[:, None] * (K // 2) + k // 2 + bytes_[None, :])
            right = tl.load(b + columns[None, :] * (K // 2) + k // 2 + bytes_[:, None])
            left_scales = tl.load(a_scales + rows[:, None] * (K // 16) + k // 16 + blocks[None, :])
            right_scales = tl.load(b_scales + columns[:, None] * (K // 16) + k // 16 + blocks[None, :])
            acc = tl.dot_scaled(
                left,
                left_scales.to(tl.float8e4nv, bitcast=True),
                "e2m1",
                right,
                right_scales.to(tl.float8e4nv, bitcast=True),
                "e2m1",
                acc,
            )
    else:
        depth = tl.arange(0, BK)
        for k in range(0, K, BK):
            left = tl.load(a + rows[:, None] * K + k + depth[None, :])
            right = tl.load(b + columns[None, :] * K + k + depth[:, None])
            acc = tl.dot(left, right, acc)
    tl.store(out + rows[:, None] * BN + columns[None, :], acc)
