"""Implicit GEMM of packed activations and a weight decoded to float16 before: for GPUs without FP4 tensor cores.

    out[m, n] = relu(sum over taps and channels of x[pixel(m) + tap, c] * filter[n, tap, c] + bias[n])

`gemm.implicit_gemm_kernel` decodes both operands in registers, and a weight again in every program that reads it. Here
only the activations are decoded; the weight comes as two planes of float16, its even and its odd elements (`decode`
says why), in the order in which the main loop reads them. The elements are the same numbers, so that for one K step
(BK), one division of K and one order of the sum both kernels give the same bits.

**Split-K.** Deep layers of a small batch have few output tiles and a long K. With SPLIT the K steps of a tile are
divided among `splits` programs, each writes its sum in float32, and `split_sum_kernel` adds them in ascending order.
The result depends on `splits` and BK, as on any order of a sum, and never on which program ends first.

**Rows of padding.** With a large dilation most tiles of a small feature map read nothing but padding for the upper or
the lower taps. With ROWS the K steps of such rows of taps are left out: they would add zeros, so that the bits stay.

**Depth** is one more digit of a pixel and one more loop of taps, as in `gemm`.

**Moments.** GroupNorm needs mean and variance of what a convolution writes. With MOMENTS the epilogue stores both for
each tile and channel, of the rounded values, so that no further pass reads the feature map:

    moments [tiles, 2, 2, outputs] float32: of the pixels of the tile's first batch item and of those of the next one
    the mean, then the sum of squared deviations from it
"""

import triton
import triton.language as tl

from fp4deploy.plugins.gemm.triton.decode import SCALED, begin_after_primary, decode, finished
from fp4deploy.plugins.gemm.triton.epilogue import divide, finish, quantize

VOLUME = ["D", "OD", "stride_z", "stride_x", "padding_z", "padding_x", "per_item"]


@triton.jit(do_not_specialize=["H", "W", "OH", "OW", "M", "stride", "padding", "dilation", "splits", *VOLUME])
def decoded_conv_kernel(
    x,  # codes, uint8 [batch, H, W, CB]
    x_scales,  # E4M3 bytes, uint8 [batch, H, W, CB // 8]
    x_amax,  # float32 []
    x2,  # the second source; x again where there is one
    x2_scales,
    x2_amax,
    w,  # float16 [2, rows, K]: even and odd elements times 2^-7, in the order of the K steps
    w_amax,
    bias,  # float32 [outputs]; not read without BIAS
    out,  # [pixels, outputs]; with QUANTIZE codes [pixels, OB]; with SPLIT float32 [splits, pixels, outputs]
    out_scales,  # uint8 [pixels, OB // 8]; not written without QUANTIZE
    out_amax,  # float32 []; not read without QUANTIZE
    moments,  # float32 [tiles, 2, 2, outputs]; not written without MOMENTS
    H,
    W,
    CB,  # bytes of a pixel of the first source, and of the second
    CB2,
    OH,
    OW,
    M,
    outputs,
    K,  # elements of a row of a plane
    stride,
    padding,
    dilation,
    splits,  # 1 without SPLIT
    x_range,  # 6 * 448, or 6 * 256 with 4/6
    x2_range,
    w_range,
    D,  # None: feature maps have two axes, whose strides and paddings are equal. Else those above are of the height
    OD,
    stride_z,
    stride_x,
    padding_z,
    padding_x,
    per_item,  # pixels of a batch item; None: OH OW
    KD: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    TWO: tl.constexpr,
    UP: tl.constexpr,  # a transposed convolution of KD x 2 x 2
    TAPS: tl.constexpr,  # taps of a step; with 1, BK divides CB and CB2; with more, each is BK / TAPS
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    MOMENTS: tl.constexpr,  # 0; batch items a tile may touch: 1 or 2
    SPLIT: tl.constexpr,
    ROWS: tl.constexpr,  # rows of taps that a tile does not need are left out; with TAPS 1
    FULL: tl.constexpr,  # BN divides outputs
    BF16: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,  # bytes of a step: 2 BK elements
    ASM: tl.constexpr,
    SECONDARY: tl.constexpr,  # launched by programmatic dependent launch
):
    CB, CB2 = CB // 8 * 8, CB2 // 8 * 8  # no change of the values: it tells the compiler that they are multiples of 8
    pid = tl.program_id(0)
    split = pid % splits if SPLIT else 0
    pid = pid // splits if SPLIT else pid
    tiles = tl.cdiv(outputs, BN)
    columns = 4 * KD * tiles if UP else tiles
    tile = pid // columns
    m = tile * BM + tl.arange(0, BM)
    position = (pid % columns) // tiles  # which of the output pixels of a transposed convolution
    n = (pid % tiles) * BN + tl.arange(0, BN)
    has = n < outputs

    # Row m of the GEMM as (batch item, oz, oy, ox), and one bit for each tap that reads a pixel instead of padding.
    TD: tl.constexpr = 1 if UP else KD  # slices that an output pixel sums
    FILTER: tl.constexpr = TD * KH * KW
    ox, t = m % OW, m // OW
    oy, item = t % OH, t // OH
    if D is None:
        top, left = oy * stride - padding, ox * stride - padding
    else:
        top, left = oy * stride - padding, ox * stride_x - padding_x
        front, item = (item % OD) * stride_z - padding_z, item // OD
    tap_mask = tl.zeros((BM,), tl.int32 if FILTER <= 32 else tl.int64)
    for tap in tl.static_range(FILTER):
        iy, ix = top + (tap // KW % KH) * dilation, left + (tap % KW) * dilation
        reads = (iy >= 0) & (iy < H) & (ix >= 0) & (ix < W) & (m < M)
        if D is not None:
            iz = front + (tap // (KH * KW)) * dilation
            reads = reads & (iz >= 0) & (iz < D)
        tap_mask |= reads.to(tap_mask.dtype) << tap
    if D is None:
        pixel = (item.to(tl.int64) * H + top) * W + left
    else:
        pixel = ((item.to(tl.int64) * D + front) * H + top) * W + left
    rows = outputs * 4 * KD if UP else outputs
    row = n.to(tl.int64) * (4 * KD) + position if UP else n.to(tl.int64)
    even = w + (row * K)[:, None] + tl.arange(0, BK)[None, :]
    odd = even + rows.to(tl.int64) * K

    steps = _steps(CB, FILTER, TAPS, BK)
    total = steps + _steps(CB2, FILTER, TAPS, BK) if TWO else steps
    low = (total * split) // splits if SPLIT else 0
    high = (total * (split + 1)) // splits if SPLIT else total
    upper, lower = 0, KH
    if ROWS:
        upper, lower = _rows_of_taps(tile, M, OH, OW, H, stride, padding, dilation, KH, BM)
    if SECONDARY:
        begin_after_primary()
    acc = tl.zeros((BM, BN), tl.float32)
    acc = _accumulate(
        acc, x, x_scales, CB, pixel, tap_mask, even, odd, has, 0, tl.minimum(low, steps), tl.minimum(high, steps),
        upper, lower, H, W, dilation, TD, KH, KW, TAPS, ROWS, FULL, BM, BN, BK, ASM,
    )  # fmt: skip
    factor = divide(tl.load(x_amax), x_range, ASM)
    if TWO:
        second = divide(tl.load(x2_amax), x2_range, ASM)
        second += (second == 0.0).to(tl.float32)  # no division by zero; an amax of 0 means that all its values are 0
        padded = tl.cdiv(FILTER * CB, 64) * 64  # where the second source begins in a row of the planes
        acc = _accumulate(
            acc * divide(factor, second, ASM), x2, x2_scales, CB2, pixel, tap_mask, even, odd, has, padded,
            tl.maximum(low, steps) - steps, tl.maximum(high, steps) - steps,
            upper, lower, H, W, dilation, TD, KH, KW, TAPS, ROWS, FULL, BM, BN, BK, ASM,
        )  # fmt: skip
        factor = second
    acc = acc * (factor * divide(tl.load(w_amax), w_range, ASM) * (SCALED * SCALED))

    place = m
    if UP:
        within = position % 4 if KD > 1 else position
        place = 2 * m + 2 * OW * (m // OW) + 2 * OW * (within // 2) + within % 2
        if KD > 1:
            place += (m // (OH * OW) + position // 4) * (4 * OH * OW)
    place = place.to(tl.int64)
    if SPLIT:
        pixels = M.to(tl.int64) * (4 * KD if UP else 1)
        at = out + split * pixels * outputs + (place * outputs)[:, None] + n[None, :]
        tl.store(at, acc, mask=(m < M)[:, None] & has[None, :])
    else:
        y = finish(acc, bias, n, has, RELU, BIAS).to(tl.bfloat16 if BF16 else tl.float16)
        _write(y, m < M, place, n, has, (pid % tiles) * BN, outputs, out, out_scales, out_amax, QUANTIZE, BM, BN, ASM)
        if MOMENTS:
            if per_item is None:
                store_moments(y, moments, m, M, OH * OW, outputs, n, has, tile, MOMENTS, BM)
            else:
                store_moments(y, moments, m, M, per_item, outputs, n, has, tile, MOMENTS, BM)


@triton.jit(do_not_specialize=["M", "pixels"])
def split_sum_kernel(
    parts,  # float32 [SPLITS, pixels, outputs]
    bias,
    out,
    out_scales,
    out_amax,
    moments,
    M,  # pixels
    pixels,  # of a batch item
    outputs,
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    QUANTIZE: tl.constexpr,
    MOMENTS: tl.constexpr,
    SPLITS: tl.constexpr,
    BF16: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    ASM: tl.constexpr,
):
    """The epilogue of `decoded_conv_kernel` after a division of K: partial sums are added in ascending order."""
    tiles = tl.cdiv(outputs, BN)
    tile, first = tl.program_id(0) // tiles, (tl.program_id(0) % tiles) * BN
    m, n = tile * BM + tl.arange(0, BM), first + tl.arange(0, BN)
    has = n < outputs
    at = parts + (m.to(tl.int64) * outputs)[:, None] + n[None, :]
    inside = (m < M)[:, None] & has[None, :]
    acc = tl.load(at, mask=inside, other=0.0)
    for split in tl.static_range(1, SPLITS):
        acc += tl.load(at + split * M.to(tl.int64) * outputs, mask=inside, other=0.0)
    y = finish(acc, bias, n, has, RELU, BIAS).to(tl.bfloat16 if BF16 else tl.float16)
    _write(y, m < M, m.to(tl.int64), n, has, first, outputs, out, out_scales, out_amax, QUANTIZE, BM, BN, ASM)
    if MOMENTS:
        store_moments(y, moments, m, M, pixels, outputs, n, has, tile, MOMENTS, BM)


@triton.jit
def store_moments(y, moments, m, M, pixels, outputs, n, has, tile, ITEMS: tl.constexpr, BM: tl.constexpr):
    """Mean and sum of squared deviations of each channel over the pixels of one tile, by batch item."""
    values = y.to(tl.float32)
    item, first = m // pixels, (tile * BM) // pixels
    for index in tl.static_range(ITEMS):
        inside = (item == first + index) & (m < M)
        count = tl.sum(inside.to(tl.float32), 0)
        mean = tl.sum(tl.where(inside[:, None], values, 0.0), 0) / tl.maximum(count, 1.0)
        deviation = tl.where(inside[:, None], values - mean[None, :], 0.0)
        at = moments + ((tile * 2 + index) * 2).to(tl.int64) * outputs + n
        tl.store(at, mean, mask=has)
        tl.store(at + outputs, tl.sum(deviation * deviation, 0), mask=has)


@triton.jit
def _write(
    y, valid, place, n, has, first, outputs, out, out_scales, out_amax,
    QUANTIZE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A tile of rounded values: stored, or quantised for the next layer."""
    if QUANTIZE:
        blocks = (outputs + 15) // 16
        codes, scales = quantize(tl.where(has[None, :], y.to(tl.float32), 0.0), tl.load(out_amax), BM, BN, ASM)
        pair, block = first // 2 + tl.arange(0, BN // 2), first // 16 + tl.arange(0, BN // 16)
        at = out + (place * (8 * blocks))[:, None] + pair[None, :]
        tl.store(at, codes, mask=valid[:, None] & (pair < 8 * blocks)[None, :])
        at = out_scales + (place * blocks)[:, None] + block[None, :]
        tl.store(at, scales, mask=valid[:, None] & (block < blocks)[None, :])
    else:
        tl.store(out + (place * outputs)[:, None] + n[None, :], y, mask=valid[:, None] & has[None, :])


@triton.jit
def _steps(CB, FILTER: tl.constexpr, TAPS: tl.constexpr, BK: tl.constexpr):
    """K steps of one source."""
    return FILTER * (CB // BK) if TAPS == 1 else (FILTER + TAPS - 1) // TAPS + CB * 0


@triton.jit
def _rows_of_taps(tile, M, OH, OW, H, stride, padding, dilation, KH: tl.constexpr, BM: tl.constexpr):
    """The rows of taps, `upper` to `lower` exclusively, that read a pixel for any of a tile's output pixels."""
    first, last = tile * BM, tl.minimum(tile * BM + BM, M) - 1
    one = first // (OH * OW) == last // (OH * OW)  # batch item; of two all rows are taken
    top = tl.where(one, (first // OW) % OH, 0) * stride - padding
    bottom = tl.where(one, (last // OW) % OH, OH - 1) * stride - padding
    upper, lower = tile * 0, tile * 0
    for row in tl.static_range(KH):
        upper += (bottom + row * dilation < 0).to(tl.int32)
        lower += (top + row * dilation < H).to(tl.int32)
    return upper, lower


@triton.jit
def _accumulate(
    acc, x, x_scales, CB, pixel, tap_mask, even, odd, has, begin, low, high, upper, lower,
    H, W, dilation, KD: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
    FULL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """acc + K steps `low` to `high` of one source, whose elements begin at `begin` in a row of the planes."""
    byte, scale = tl.arange(0, BK), tl.arange(0, BK // 8)
    if TAPS == 1:
        SB = tl.multiple_of(CB // 8, BK // 8)
        xp = x + (pixel * CB)[:, None] + byte[None, :]
        xsp = x_scales + (pixel * SB)[:, None] + scale[None, :]
        depth = CB // BK
        if ROWS:
            low, high = tl.maximum(low, upper * KW * depth), tl.minimum(high, lower * KW * depth)
        tap, c = low // depth, (low % depth) * BK
        for step in range(low, high):
            row_of_taps = tap // KW
            if KD > 1:
                row_of_taps = tap // (KH * KW) * H + row_of_taps % KH
            offset = (row_of_taps * W + tap % KW) * dilation
            reads = (((tap_mask >> tap) & 1) != 0)[:, None]
            a = tl.load(xp + (offset * CB + c), mask=reads, other=0)
            sa = tl.load(xsp + (offset * SB + c // 8), mask=reads, other=0)
            at = begin + step * BK
            if FULL:
                b_even, b_odd = tl.load(even + at), tl.load(odd + at)
            else:
                b_even = tl.load(even + at, mask=has[:, None], other=0.0)
                b_odd = tl.load(odd + at, mask=has[:, None], other=0.0)
            a_even, a_odd = decode(a, sa, BM, BK, ASM)
            acc = tl.dot(a_even, tl.trans(b_even), acc)
            acc = finished(tl.dot(a_odd, tl.trans(b_odd), acc), ASM)
            c += BK  # tap and channel are counted up: a division would delay the addresses of the next loads
            last = c >= CB
            tap += last.to(tl.int32)
            c = tl.where(last, 0, c)
    else:
        BYTES: tl.constexpr = BK // TAPS  # of a pixel; a constant, so that the compiler knows the alignment of loads
        BLOCKS: tl.constexpr = BYTES // 8
        LAST: tl.constexpr = KD * KH * KW - 1
        xp, xsp = x + (pixel * BYTES)[:, None], x_scales + (pixel * BLOCKS)[:, None]
        for step in range(low, high):
            tap, tap_scale = step * TAPS + byte // BYTES, step * TAPS + scale // BLOCKS
            reads = ((tap_mask[:, None] >> tl.minimum(tap, LAST)[None, :]) & 1) != 0
            reads_scale = ((tap_mask[:, None] >> tl.minimum(tap_scale, LAST)[None, :]) & 1) != 0
            row_of_taps, row_of_scales = tap // KW, tap_scale // KW
            if KD > 1:
                row_of_taps = tap // (KH * KW) * H + row_of_taps % KH
                row_of_scales = tap_scale // (KH * KW) * H + row_of_scales % KH
            offset = ((row_of_taps * W + tap % KW) * dilation) * BYTES + byte % BYTES
            offset_scale = ((row_of_scales * W + tap_scale % KW) * dilation) * BLOCKS + scale % BLOCKS
            a = tl.load(xp + offset[None, :], mask=reads & (tap <= LAST)[None, :], other=0)
            sa = tl.load(xsp + offset_scale[None, :], mask=reads_scale & (tap_scale <= LAST)[None, :], other=0)
            at = begin + step * BK
            b_even = tl.load(even + at, mask=has[:, None], other=0.0)
            b_odd = tl.load(odd + at, mask=has[:, None], other=0.0)
            a_even, a_odd = decode(a, sa, BM, BK, ASM)
            acc = tl.dot(a_even, tl.trans(b_even), acc)
            acc = finished(tl.dot(a_odd, tl.trans(b_odd), acc), ASM)
    return acc
