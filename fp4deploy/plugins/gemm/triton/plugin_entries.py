"""The implicit GEMM and the quantiser with parameters in the order in which TensorRT passes them.

    inputs (pointers) ... , 32-bit integers ... , outputs (pointers) ...

An ahead-of-time plugin of TensorRT launches one kernel with its input tensors, then whatever integers its `aot_impl`
asked for, then its output tensors; it passes no floats. So the entries here are wrappers of `implicit_gemm_kernel`,
whose pointers come first and whose ranges are floats. Global scales take the place of amax and range: a scale is
already amax / (6 * 448) (amax / (6 * 256) with 4/6), and its range is 1. Feature maps have two axes.

There is always a bias; a layer without one gets zeros.
"""

import triton
import triton.language as tl

from fp4deploy.plugins.gemm.triton.epilogue import quantize
from fp4deploy.plugins.gemm.triton.gemm import implicit_gemm_kernel


@triton.jit
def _one():
    """A range of 1, as the tensor that an IEEE division takes."""
    return tl.full((), 1.0, tl.float32)


@triton.jit
def gemm_entry(
    x, x_scales, x_scale, w, w_scales, w_scale, bias,
    H, W, CB, OH, OW, M, outputs, stride, padding, dilation,
    out,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, EVEN: tl.constexpr, TAPS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One packed source, float16 output."""
    implicit_gemm_kernel(
        x, x_scales, x_scale, x, x_scales, x_scale, w, w_scales, w_scale, bias, out, out, x_scale,
        H, W, CB, 0, OH, OW, M, outputs, stride, padding, dilation, _one(), _one(), _one(),
        None, None, None, None, None, None, None, 1, KH, KW,
        False, UP, EVEN, TAPS, True, RELU, False, False, BM, BN, BK, NATIVE, ASM,
    )  # fmt: skip


@triton.jit
def packed_gemm_entry(
    x, x_scales, x_scale, w, w_scales, w_scale, bias, out_amax,
    H, W, CB, OH, OW, M, outputs, stride, padding, dilation,
    out, out_scales,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, EVEN: tl.constexpr, TAPS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """One packed source, packed output."""
    implicit_gemm_kernel(
        x, x_scales, x_scale, x, x_scales, x_scale, w, w_scales, w_scale, bias, out, out_scales, out_amax,
        H, W, CB, 0, OH, OW, M, outputs, stride, padding, dilation, _one(), _one(), _one(),
        None, None, None, None, None, None, None, 1, KH, KW,
        False, UP, EVEN, TAPS, True, RELU, True, False, BM, BN, BK, NATIVE, ASM,
    )  # fmt: skip


@triton.jit
def two_source_gemm_entry(
    x, x_scales, x_scale, x2, x2_scales, x2_scale, w, w_scales, w_scale, bias,
    H, W, CB, CB2, OH, OW, M, outputs, stride, padding, dilation,
    out,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, EVEN: tl.constexpr, TAPS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Two packed sources, concatenated along channels without being written; float16 output."""
    implicit_gemm_kernel(
        x, x_scales, x_scale, x2, x2_scales, x2_scale, w, w_scales, w_scale, bias, out, out, x_scale,
        H, W, CB, CB2, OH, OW, M, outputs, stride, padding, dilation, _one(), _one(), _one(),
        None, None, None, None, None, None, None, 1, KH, KW,
        True, UP, EVEN, TAPS, True, RELU, False, False, BM, BN, BK, NATIVE, ASM,
    )  # fmt: skip


@triton.jit
def packed_two_source_gemm_entry(
    x, x_scales, x_scale, x2, x2_scales, x2_scale, w, w_scales, w_scale, bias, out_amax,
    H, W, CB, CB2, OH, OW, M, outputs, stride, padding, dilation,
    out, out_scales,
    KH: tl.constexpr, KW: tl.constexpr, UP: tl.constexpr, EVEN: tl.constexpr, TAPS: tl.constexpr, RELU: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Two packed sources, packed output."""
    implicit_gemm_kernel(
        x, x_scales, x_scale, x2, x2_scales, x2_scale, w, w_scales, w_scale, bias, out, out_scales, out_amax,
        H, W, CB, CB2, OH, OW, M, outputs, stride, padding, dilation, _one(), _one(), _one(),
        None, None, None, None, None, None, None, 1, KH, KW,
        True, UP, EVEN, TAPS, True, RELU, True, False, BM, BN, BK, NATIVE, ASM,
    )  # fmt: skip


@triton.jit
def quantize_entry(
    x,  # float16 [batch, C, pixels]
    amax,  # float32 [1]
    C,
    pixels,  # H W
    codes,  # uint8 [batch, pixels, 8 ceil(C / 16)]
    scales,  # uint8 [batch, pixels, ceil(C / 16)]
    BP: tl.constexpr,
    BC: tl.constexpr,
    ASM: tl.constexpr,
):
    """Packs an NCHW feature map in blocks along channels; a program packs BP pixels and BC channels of a batch item."""
    groups = tl.cdiv(pixels, BP)
    pid = tl.program_id(0)
    item, p = (pid // groups).to(tl.int64), (pid % groups) * BP + tl.arange(0, BP)
    first = tl.program_id(1) * BC
    c = first + tl.arange(0, BC)
    valid = p < pixels
    at = x + (item * C + c[None, :]) * pixels + p[:, None]
    y = tl.load(at, mask=valid[:, None] & (c < C)[None, :], other=0.0)
    packed, block_scales = quantize(y.to(tl.float32), tl.load(amax), BP, BC, ASM)
    blocks = tl.cdiv(C, 16)
    pair, block = first // 2 + tl.arange(0, BC // 2), first // 16 + tl.arange(0, BC // 16)
    row = (item * pixels + p)[:, None]
    tl.store(codes + row * (8 * blocks) + pair[None, :], packed, mask=valid[:, None] & (pair < 8 * blocks)[None, :])
    tl.store(scales + row * blocks + block[None, :], block_scales, mask=valid[:, None] & (block < blocks)[None, :])
