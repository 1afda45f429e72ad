"""Any GEMM or convolution of unpacked tensors of any strides: in a bundle for the C library, what cuDNN and cuBLAS do.

    y[g, n, p, o] = relu(alpha * sum over taps k and channels c of x[g, n, p @ k, c] * w[g, o, k, c] + bias[g, o])

A batched product has one tap and its batch as groups g; a linear layer has one group. `TRANSPOSED`: the positions of a
transposed convolution. FP16 and BF16 go to tensor cores, FP32 is multiplied as it is; sums are FP32.

Each program computes BLOCK_M pixels of BLOCK_N outputs of a group, groups along the first axis of the grid, which alone
has room for the windows of an attention. What it costs was not measured.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(at, tap, size, stride, padding, dilation, TRANSPOSED: tl.constexpr):
    """Where a tap reads along an axis, and whether that is inside."""
    if TRANSPOSED:
        reached = at + padding - tap * dilation
        return reached // stride, (reached >= 0) & (reached % stride == 0) & (reached // stride < size)
    place = at * stride - padding + tap * dilation
    return place, (place >= 0) & (place < size)


@triton.jit
def contraction_kernel(
    x,
    w,
    bias,
    y,
    alpha,
    M,
    O,  # noqa: E741
    C,
    D,
    H,
    W,
    OD,
    OH,
    OW,
    KD,
    KH,
    KW,
    stride_d,
    stride_h,
    stride_w,
    padding_d,
    padding_h,
    padding_w,
    dilation_d,
    dilation_h,
    dilation_w,
    xg,
    xn,
    xd,
    xh,
    xw,
    xc,
    wg,
    wo,
    wd,
    wh,
    ww,
    wc,
    yg,
    yp,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    RELU: tl.constexpr,
    BIAS: tl.constexpr,
):
    tiles = tl.cdiv(M, BLOCK_M)
    group = (tl.program_id(0) // tiles).to(tl.int64)
    m = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    o = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column, row = (m % OW)[:, None], (m // OW % OH)[:, None]
    slice_, item = (m // (OW * OH) % OD)[:, None], (m // (OW * OH * OD)).to(tl.int64)
    image = x + group * xg + (item * xn)[:, None]
    filters = w + group * wg + (o.to(tl.int64) * wo)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    depth = KD * KH * KW * C
    for begin in range(0, depth, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        c, tap = k % C, k // C
        kw, kh, kd = tap % KW, tap // KW % KH, tap // (KW * KH)
        d, has_d = _place(slice_, kd[None, :], D, stride_d, padding_d, dilation_d, TRANSPOSED)
        h, has_h = _place(row, kh[None, :], H, stride_h, padding_h, dilation_h, TRANSPOSED)
        v, has_v = _place(column, kw[None, :], W, stride_w, padding_w, dilation_w, TRANSPOSED)
        inside = has_d & has_h & has_v & (m < M)[:, None] & (k < depth)[None, :]
        a = tl.load(image + (d * xd + h * xh + v * xw + (c * xc)[None, :]), inside, 0.0)
        place = kd * wd + kh * wh + kw * ww + c * wc
        b = tl.load(filters + place[:, None], (k < depth)[:, None] & (o < O)[None, :], 0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    total *= alpha
    if BIAS:
        total += tl.load(bias + group * O + o, o < O, 0.0)[None, :]
    if RELU:
        total = tl.where(total < 0, 0.0, total)
    out = y + group * yg + (m.to(tl.int64) * yp)[:, None] + o[None, :]
    tl.store(out, total.to(y.dtype.element_ty), (m < M)[:, None] & (o < O)[None, :])
