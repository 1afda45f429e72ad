"""GEMM epilogue: bias and ReLU, and the fused quantisation of the output for the next layer.

The quantisation reads the rounded values that the kernel would have stored, and repeats `formats.quantize_nvfp4`
(docs/numerics.md) operation by operation, so that fusing changes no byte. That needs `enable_fp_fusion=False` (no FMA
contraction) and IEEE divisions.
"""

import triton
import triton.language as tl

FLOAT_MAX: tl.constexpr = tl.constexpr(3.4028234663852886e38)
SIXTH: tl.constexpr = tl.constexpr(0.1666666716337204)  # fp32(1 / 6)
RANGE: tl.constexpr = tl.constexpr(2688.0)  # 6 * 448
INFINITE: tl.constexpr = tl.constexpr(0x7F800000)


@triton.jit
def finish(acc, bias, columns, valid, RELU: tl.constexpr, BIAS: tl.constexpr):
    """acc + bias, ReLU; zero in columns that are not `valid`."""
    if BIAS:
        acc += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)[None, :]
    if RELU:
        acc = tl.where(acc > 0, acc, tl.where(acc != acc, acc, 0.0))
    return acc


@triton.jit
def quantize(y, amax, ROWS: tl.constexpr, COLUMNS: tl.constexpr, RN_DIVIDE: tl.constexpr):
    """(codes uint8 [ROWS, COLUMNS // 2], scales uint8 [ROWS, COLUMNS // 16]) of float32 y, blocks along columns."""
    blocks = tl.reshape(y, (ROWS, COLUMNS // 16, 16))
    # Amax over the bits: integers order like the magnitudes, and NaN is above infinity, so that a broken block is seen.
    magnitude = blocks.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    largest = tl.max(magnitude, 2)
    finite = largest < INFINITE
    block_amax = tl.where(finite, largest, 0).to(tl.float32, bitcast=True)

    amax += tl.zeros((1, 1), tl.float32)
    scale = tl.minimum(divide(RANGE, amax, RN_DIVIDE), FLOAT_MAX)
    scale = tl.where((scale == 0.0) | (amax == 0.0), 1.0, scale)
    d = tl.minimum(tl.minimum(block_amax * (scale * SIXTH), FLOAT_MAX), 448.0)
    # Adding and subtracting 1.5 * 2^20 times the binade rounds to E4M3's three mantissa bits, ties to even.
    rounder = (tl.maximum(d, 0.015625).to(tl.int32, bitcast=True) & INFINITE).to(tl.float32, bitcast=True) * 1572864.0
    d8 = tl.where(amax > 0.0, (d + rounder) - rounder, 0.0)
    small = (d8 * 512.0).to(tl.int32)
    byte = tl.where(d8 < 0.015625, small, (d8.to(tl.int32, bitcast=True) >> 20) - 960)
    encode = tl.minimum(divide(1.0, d8 * divide(1.0, scale, RN_DIVIDE), RN_DIVIDE), FLOAT_MAX)
    encode = tl.where(d8 > 0.0, encode, 0.0)

    u = blocks * tl.expand_dims(encode, 2)
    m = tl.minimum(tl.abs(u), 6.0)
    # The same for E2M1: the rounded value's code is read from the bits of the sum instead of subtracting again.
    step = ((tl.maximum(m, 1.0).to(tl.int32, bitcast=True) & INFINITE) | 0x00400000).to(tl.float32, bitcast=True)
    rounded = (step * 4194304.0 + m).to(tl.int32, bitcast=True)
    code = (rounded & 7) + (rounded >> 22) - 299 + tl.where(u < 0.0, 8, 0)
    code = tl.where(tl.expand_dims(finite, 2), code, 0)
    low, high = tl.split(tl.reshape(code, (ROWS, COLUMNS // 2, 2)))
    return (low | (high << 4)).to(tl.uint8), tl.where(finite, byte, 0x7F).to(tl.uint8)


@triton.jit
def divide(a, b, RN: tl.constexpr):
    """a / b as IEEE divides; `/` of Triton is off by an ulp at times, and codes and products would be, too."""
    if RN:
        return tl.math.div_rn(a + b * 0, b)
    # The interpreter divides like IEEE. Triton 3.7 makes a constexpr of constexpr / tensor, hence the zeros.
    b = b + a * 0.0
    return (tl.zeros_like(b) + a) / b
