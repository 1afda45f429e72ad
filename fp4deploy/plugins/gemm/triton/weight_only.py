"""Weight-only GEMM (W4A16): float16 or bfloat16 activations, packed weights decoded in registers.

    out[m, n] = sum over k of x[m, k] * w[n, k] + bias[n]

With few rows (small M, GEMV) the time is that of reading the weight, 4.5 bits an element. There the operands are
swapped (`SWAP`): the weight becomes operand A of the MMA, which tensor cores read from registers, where it was decoded,
and the rows of x become operand B. No decoded weight passes through shared memory. With many rows the operands are as
usual.

On SM90 and later, `cuda/gemv_tma.cu` takes over where M is at most 16 and K a multiple of 256 (`gemm.gemv`).
"""

import triton
import triton.language as tl

from fp4deploy.plugins.gemm.triton.decode import SCALED, decode, permute
from fp4deploy.plugins.gemm.triton.epilogue import divide, finish


@triton.jit
def weight_only_kernel(
    x,  # [M, K] of dtype OUT, rows contiguous
    w,  # uint8 [N, CB]
    w_scales,  # uint8 [N, CB // 8]
    w_amax,  # float32 []
    bias,  # float32 [N]; not read without BIAS
    out,  # OUT [M, N]
    M,
    N,
    K,
    CB,
    w_range,
    SWAP: tl.constexpr,
    EVEN: tl.constexpr,  # BK divides CB, and 2 CB = K
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    BF16: tl.constexpr,  # dtype of x and out, else float16
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    ASM: tl.constexpr,
):
    OUT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    CB = CB // 8 * 8  # no change of the value; tells the compiler that eight bytes of a row can be one load
    pid = tl.program_id(0)
    tiles = tl.cdiv(N, BN)
    m = (pid // tiles) * BM + tl.arange(0, BM)
    n = (pid % tiles) * BN + tl.arange(0, BN)
    byte, scale, k = tl.arange(0, BK), tl.arange(0, BK // 8), tl.arange(0, 2 * BK)
    rows, has = (m < M)[:, None], (n < N)[:, None]
    xp = x + (m.to(tl.int64) * K)[:, None] + k[None, :]
    wp = w + (n.to(tl.int64) * CB)[:, None] + byte[None, :]
    wsp = w_scales + (n.to(tl.int64) * (CB // 8))[:, None] + scale[None, :]
    acc = tl.zeros((BN, BM), tl.float32) if SWAP else tl.zeros((BM, BN), tl.float32)
    for c in range(0, CB, BK):
        if EVEN:
            b = tl.load(wp + c, mask=has, other=0)
            sb = tl.load(wsp + c // 8, mask=has, other=0)
            a = tl.load(xp + 2 * c, mask=rows, other=0.0)
        else:
            b = tl.load(wp + c, mask=has & (c + byte < CB)[None, :], other=0)
            sb = tl.load(wsp + c // 8, mask=has & (c // 8 + scale < CB // 8)[None, :], other=0)
            a = tl.load(xp + 2 * c, mask=rows & (2 * c + k < K)[None, :], other=0.0)
        b_even, b_odd = decode(b, sb, BN, BK, ASM)
        b_even, b_odd = b_even.to(OUT), b_odd.to(OUT)  # exact: six significant bits, bfloat16 has eight
        a_even, a_odd = tl.split(tl.reshape(a, (BM, BK, 2)))
        a_even, a_odd = permute(a_even, BM, BK), permute(a_odd, BM, BK)
        if SWAP:
            acc = tl.dot(b_even, tl.trans(a_even), acc)
            acc = tl.dot(b_odd, tl.trans(a_odd), acc)
        else:
            acc = tl.dot(a_even, tl.trans(b_even), acc)
            acc = tl.dot(a_odd, tl.trans(b_odd), acc)
    factor = divide(tl.load(w_amax), w_range, ASM) * SCALED
    if SWAP:
        acc = tl.trans(acc)
    y = finish(acc * factor, bias, n, n < N, RELU, BIAS).to(OUT)
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], y, mask=rows & (n < N)[None, :])
