"""Implicit GEMM on packed NVFP4: matmul, convolutions with one or two sources, transposed ones, in one kernel.

    out[m, n] = relu(sum over taps and channels of x[pixel(m) + tap, c] * filter[n, tap, c] + bias[n])

M are output pixels, N output channels, and K runs over the taps of the filter and, within a tap, over bytes of
channels (two E2M1 codes each). There is no im2col in memory: the bytes of a row of the operand are loaded from the
pixel that the tap reads, and masked to zero in the padding. The taps of a pixel that lie inside the feature map are the
bits of one word, computed once.

| operation | M | taps | N |
|---|---|---|---|
| matmul | one row of M pixels | 1 | N |
| conv2d | N x OH x OW | KH x KW | O channels |
| conv3d | N x OD x OH x OW | KD x KH x KW | O channels |
| transposed, stride = kernel | N (x D) x H x W | 1 | O channels for each of the KD x KH x KW output pixels |

**Depth** is one more digit of a pixel and one more loop of taps. Without it D and what else only a volume has are None,
constants, and the code is that of two axes. With it strides and paddings may differ between the axes, also where D is
1. A depth that no tap and no stride crosses is part of the batch (`arguments.flat`), and of two axes then.

**Two sources.** A concatenation along channels is read in place: first all taps of one feature map, then of the other.
Each has its own global scale, so the accumulator is rescaled once between them.

**Few channels.** A step of the main loop takes BK bytes of K. Where a tap has fewer, and they divide BK, a step takes
TAPS taps, in filters of up to nine taps and of 3x3x3: with BK 32, nine taps of 16 channels are three steps instead of
nine.

**Groups.** Rows sorted by group, each multiplied with the matrix of its own: a tile has rows of one group alone, and a
table says which rows and which matrix. It is computed on the device (`grouped.tile_table`), so that nobody waits for
the sizes of the groups; tiles that it does not need end at once.

**Native.** On Blackwell `tl.dot_scaled` takes codes and block scales as operands (block-scaled MMA). Elsewhere they are
decoded to float16 in registers (`decode`) for float16 tensor cores. Both are exact up to the order of the sum.
"""

import triton
import triton.language as tl

from fp4deploy.plugins.gemm.triton.decode import SCALED, decode
from fp4deploy.plugins.gemm.triton.epilogue import divide, finish, quantize


@triton.jit
def implicit_gemm_kernel(
    x,  # codes, uint8 [batch, H, W, CB]
    x_scales,  # E4M3 bytes, uint8 [batch, H, W, CB // 8]
    x_amax,  # float32 []
    x2,  # the second source; x again where there is one
    x2_scales,
    x2_amax,
    w,  # uint8 [outputs, KH, KW, CB + CB2]
    w_scales,
    w_amax,
    bias,  # float32 [outputs]; not read without BIAS
    out,  # OUT [pixels, outputs]; with QUANTIZE codes, uint8 [pixels, OB]
    out_scales,  # uint8 [pixels, OB // 8]; not written without QUANTIZE
    out_amax,  # float32 []; not read without QUANTIZE
    H,
    W,
    CB,  # bytes of a pixel of the first source, and of the second
    CB2,
    OH,
    OW,
    M,
    outputs,
    stride,
    padding,
    dilation,
    x_range,  # 6 * 448, or 6 * 256 with 4/6
    x2_range,
    w_range,
    D,  # None: feature maps have two axes, whose strides and paddings are equal. Else those above are of the height
    OD,
    stride_z,
    stride_x,
    padding_z,
    padding_x,
    groups,  # None: one matrix. Else int32 [tiles along M, 3]: matrix, first row, row behind the last one
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TWO: tl.constexpr,
    UP: tl.constexpr,  # a transposed convolution, whose strides are KD, KH and KW: one tap for each output pixel
    EVEN: tl.constexpr,  # BK divides CB and CB2
    TAPS: tl.constexpr,  # taps of a step; if more than 1, CB (and CB2, if there is one) is BK / TAPS
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BF16: tl.constexpr,  # dtype of the output, else float16
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,  # bytes of a step: 2 BK elements
    NATIVE: tl.constexpr,
    ASM: tl.constexpr,
):
    OUT: tl.constexpr = tl.bfloat16 if BF16 else tl.float16
    # No change of the values (blocks of 16 elements are 8 bytes). It tells the compiler that they are multiples of 8,
    # so that eight bytes become one load instead of eight.
    CB, CB2 = CB // 8 * 8, CB2 // 8 * 8
    pid = tl.program_id(0)
    tiles = tl.cdiv(outputs, BN)
    columns = KD * KH * KW * tiles if UP else tiles
    m = (pid // columns) * BM + tl.arange(0, BM)
    if groups is not None:
        of_tile = groups + 3 * (pid // columns)
        begin, M = tl.load(of_tile + 1), tl.load(of_tile + 2)
        if begin >= M:
            return
        m = begin + tl.arange(0, BM)
    position = (pid % columns) // tiles  # which of the output pixels of a transposed convolution
    first = (pid % tiles) * BN
    n = first + tl.arange(0, BN)
    has = n < outputs

    # Row m of the GEMM as (batch item, oz, oy, ox), and one bit for each tap that reads a pixel instead of padding.
    TD: tl.constexpr = 1 if UP else KD  # taps that an output pixel sums
    TH: tl.constexpr = 1 if UP else KH
    TW: tl.constexpr = 1 if UP else KW
    ox, t = m % OW, m // OW
    oy, item = t % OH, t // OH
    if D is None:
        top, left = oy * stride - padding, ox * stride - padding
    else:
        top, left = oy * stride - padding, ox * stride_x - padding_x
        front, item = (item % OD) * stride_z - padding_z, item // OD
    tap_mask = tl.zeros((BM,), tl.int32 if TD * TH * TW <= 32 else tl.int64)
    for tap in tl.static_range(TD * TH * TW):
        iy, ix = top + (tap // TW % TH) * dilation, left + (tap % TW) * dilation
        reads = (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W) & (m < M)
        if D is not None:
            iz = front + (tap // (TH * TW)) * dilation
            reads = reads & (iz >= 0) & (iz < D)
        tap_mask |= reads.to(tap_mask.dtype) << tap
    if D is None:
        pixel = (item.to(tl.int64) * H + top) * W + left
    else:
        pixel = ((item.to(tl.int64) * D + front) * H + top) * W + left
    rows_before = n.to(tl.int64) * (KD * KH * KW) + position if UP else n.to(tl.int64) * (KD * KH * KW)
    if groups is not None:
        matrix = tl.load(of_tile)
        rows_before += matrix.to(tl.int64) * outputs
        w_amax, bias = w_amax + matrix, bias + matrix * outputs
    row = rows_before * (CB + CB2)

    acc = tl.zeros((BM, BN), tl.float32)
    acc = _accumulate(
        acc, x, x_scales, CB, pixel, tap_mask, w, w_scales, row, has, CB + CB2, 0,
        H, W, dilation, TD, TH, TW, EVEN, TAPS, BM, BN, BK, NATIVE, ASM,
    )  # fmt: skip
    factor = divide(tl.load(x_amax), x_range, ASM)
    if TWO:
        second = divide(tl.load(x2_amax), x2_range, ASM)
        second += (second == 0.0).to(tl.float32)  # no division by zero; an amax of 0 means that all its values are 0
        acc = _accumulate(
            acc * divide(factor, second, ASM), x2, x2_scales, CB2, pixel, tap_mask, w, w_scales, row, has, CB + CB2, CB,
            H, W, dilation, TD, TH, TW, EVEN, TAPS, BM, BN, BK, NATIVE, ASM,
        )  # fmt: skip
        factor = second
    # Epilogue: both global scales, bias, ReLU, rounding; then the store or the quantisation for the next layer.
    factor = factor * divide(tl.load(w_amax), w_range, ASM)
    if not NATIVE:
        factor = factor * (SCALED * SCALED)
    y = finish(acc * factor, bias, n, has, RELU, BIAS).to(OUT)

    place = m
    if UP:
        within = position % (KH * KW) if KD > 1 else position
        place = KW * m + (KH - 1) * KW * OW * (m // OW) + KW * OW * (within // KW) + within % KW
        if KD > 1:
            plane = m // (OH * OW)
            place += ((KD - 1) * plane + position // (KH * KW)) * (KH * OH * KW * OW)
    place = place.to(tl.int64)
    rows = (m < M)[:, None]
    if QUANTIZE:
        blocks = (outputs + 15) // 16
        codes, scales = quantize(tl.where(has[None, :], y.to(tl.float32), 0.0), tl.load(out_amax), BM, BN, ASM)
        pair, block = first // 2 + tl.arange(0, BN // 2), first // 16 + tl.arange(0, BN // 16)
        at = out + (place * (8 * blocks))[:, None] + pair[None, :]
        tl.store(at, codes, mask=rows & (pair < 8 * blocks)[None, :])
        tl.store(out_scales + (place * blocks)[:, None] + block[None, :], scales, mask=rows & (block < blocks)[None, :])
    else:
        tl.store(out + (place * outputs)[:, None] + n[None, :], y, mask=rows & has[None, :])


@triton.jit
def _accumulate(
    acc, x, x_scales, CB, pixel, tap_mask, w, w_scales, row, has, WB, first,
    H, W, dilation, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc + the GEMM of one source; WB: bytes of a tap in the filter, `first`: where this source's channels begin."""
    if TAPS == 1:
        acc = _one_tap_per_k_step(
            acc, x, x_scales, CB, pixel, tap_mask, w, w_scales, row, has, WB, first,
            H, W, dilation, KD, KH, KW, EVEN, BM, BN, BK, NATIVE, ASM,
        )  # fmt: skip
    else:
        acc = _several_taps_per_k_step(
            acc, x, x_scales, pixel, tap_mask, w, w_scales, row, has, WB, first,
            H, W, dilation, KD, KH, KW, TAPS, BM, BN, BK, NATIVE, ASM,
        )  # fmt: skip
    return acc


@triton.jit
def _one_tap_per_k_step(
    acc, x, x_scales, CB, pixel, tap_mask, w, w_scales, row, has, WB, first,
    H, W, dilation, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, EVEN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    byte, scale = tl.arange(0, BK), tl.arange(0, BK // 8)
    SB, WSB, row_scales, first_scale = CB // 8, WB // 8, row // 8, (first + tl.zeros((), tl.int32)) // 8
    if (
        EVEN
    ):  # rows are whole steps. Asynchronous copies (the software pipeline) need at least 4 bytes: scales as one word
        SB, WSB = tl.multiple_of(SB, BK // 8), tl.multiple_of(WSB, BK // 8)
        row_scales, first_scale = tl.multiple_of(row_scales, BK // 8), tl.multiple_of(first_scale, BK // 8)
    xp = x + (pixel * CB)[:, None] + byte[None, :]
    xsp = x_scales + (pixel * SB)[:, None] + scale[None, :]
    wp = w + row[:, None] + (first + byte)[None, :]
    wsp = w_scales + row_scales[:, None] + (first_scale + scale)[None, :]
    tap, c = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for _ in range(KD * KH * KW * tl.cdiv(CB, BK)):
        row_of_taps = tap // KW  # not by `_offset`: a call makes the machine code of two axes another
        if KD > 1:
            row_of_taps = tap // (KH * KW) * H + row_of_taps % KH
        offset = (row_of_taps * W + tap % KW) * dilation
        reads = (((tap_mask >> tap) & 1) != 0)[:, None]
        filled = has[:, None]
        if EVEN:
            a = tl.load(xp + (offset * CB + c), mask=reads, other=0)
            b = tl.load(wp + (tap * WB + c), mask=filled, other=0)
            sa = tl.load(xsp + (offset * SB + c // 8), mask=reads, other=0)
            sb = tl.load(wsp + (tap * WSB + c // 8), mask=filled, other=0)
        else:
            bytes_left, scales_left = (c + byte < CB)[None, :], (c // 8 + scale < SB)[None, :]
            a = tl.load(xp + (offset * CB + c), mask=reads & bytes_left, other=0)
            b = tl.load(wp + (tap * WB + c), mask=filled & bytes_left, other=0)
            sa = tl.load(xsp + (offset * SB + c // 8), mask=reads & scales_left, other=0)
            sb = tl.load(wsp + (tap * WSB + c // 8), mask=filled & scales_left, other=0)
        acc = _dot(acc, a, sa, b, sb, BM, BN, BK, NATIVE, ASM)
        c += BK  # tap and channel are counted up: a division would delay the addresses of the next loads
        last = c >= CB
        tap += last.to(tl.int32)
        c = tl.where(last, 0, c)
    return acc


@triton.jit
def _several_taps_per_k_step(
    acc, x, x_scales, pixel, tap_mask, w, w_scales, row, has, WB, first,
    H, W, dilation, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = BK // TAPS  # of a pixel; a constant, so that the compiler knows the alignment of the loads
    STEPS: tl.constexpr = BYTES // 8
    LAST: tl.constexpr = KD * KH * KW - 1
    byte, scale = tl.arange(0, BK), tl.arange(0, BK // 8)
    xp, xsp = x + (pixel * BYTES)[:, None], x_scales + (pixel * STEPS)[:, None]
    wp, wsp = w + row[:, None], w_scales + (row // 8)[:, None]
    for step in range((LAST + TAPS) // TAPS):
        tap, tap_scale = step * TAPS + byte // BYTES, step * TAPS + scale // STEPS
        reads = ((tap_mask[:, None] >> tl.minimum(tap, LAST)[None, :]) & 1) != 0
        reads_scale = ((tap_mask[:, None] >> tl.minimum(tap_scale, LAST)[None, :]) & 1) != 0
        real, real_scale = (tap <= LAST)[None, :], (tap_scale <= LAST)[None, :]
        at = _offset(tap, H, W, dilation, KD, KH, KW) * BYTES + byte % BYTES
        at_scale = _offset(tap_scale, H, W, dilation, KD, KH, KW) * STEPS + scale % STEPS
        a = tl.load(xp + at[None, :], mask=reads & real, other=0)
        b = tl.load(wp + (tap * WB + first + byte % BYTES)[None, :], mask=has[:, None] & real, other=0)
        sa = tl.load(xsp + at_scale[None, :], mask=reads_scale & real_scale, other=0)
        at_scale = tap_scale * (WB // 8) + first // 8 + scale % STEPS
        sb = tl.load(wsp + at_scale[None, :], mask=has[:, None] & real_scale, other=0)
        acc = _dot(acc, a, sa, b, sb, BM, BN, BK, NATIVE, ASM)
    return acc


@triton.jit
def _offset(tap, H, W, dilation, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr):
    """The pixel that a tap reads, counted from that of the first one."""
    row = tap // KW
    if KD > 1:
        row = tap // (KH * KW) * H + row % KH
    return (row * W + tap % KW) * dilation


@triton.jit
def _dot(
    acc, a, sa, b, sb,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc + a b^T of codes a [BM, BK], b [BN, BK] and their block scales sa, sb."""
    if NATIVE:
        acc = tl.dot_scaled(
            a, sa.to(tl.float8e4nv, bitcast=True), "e2m1",
            tl.trans(b), sb.to(tl.float8e4nv, bitcast=True), "e2m1", acc,
        )  # fmt: skip
    else:
        a_even, a_odd = decode(a, sa, BM, BK, ASM)
        b_even, b_odd = decode(b, sb, BN, BK, ASM)
        acc = tl.dot(a_even, tl.trans(b_even), acc)
        acc = tl.dot(a_odd, tl.trans(b_odd), acc)
    return acc
