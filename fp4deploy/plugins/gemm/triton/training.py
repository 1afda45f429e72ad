"""The GEMMs of a training step on packed FP4, NVFP4 or MXFP4: a convolution and its input gradient, a weight gradient.

**gather_gemm_kernel**, an implicit GEMM without im2col in memory, any stride, padding and dilation along each axis:

    out[m, n] = sum over taps and channels of x[pixel(m, tap), c] * w[n, tap, c] + bias[n]

    forward    pixel(m, tap) = m * stride - padding + tap * dilation              conv2d, dgrad of a transposed one
    INVERSE    pixel(m, tap) = (m + padding - tap * dilation) / stride            dgrad of conv2d, a transposed one
               where that is a whole number; other taps add nothing

Blocks of both operands run along c: input channels for a forward, output channels for a dgrad.

**rows_gemm_kernel**, split-K, the weight gradient:

    out[split, m, n] = sum over images and pixels of a[image, m, p] * b[image, n, p]

Rows are channels of G and channels and taps of the shifted X (or the reverse), blocks run along the pixels of a row,
the last one padded with zeros. The contraction is N * H * W long and the output small, so that K is cut into
splits, each computed by programs of its own; the caller adds them, always in the same order. With `segments` nothing is
cut or added: each segment of the only image's pixels, the rows of one expert, has a sum of its own, out[segment].

**W4A8** (`X8` of gather_gemm_kernel): x is MXFP8, w MXFP4. E2M1 values are E4M3 values too, so codes of w become bytes
of E4M3 in registers and one instruction of kind mxf8f6f4 takes both operands: Triton 3.7 has it for e4m3 by e4m3 on
SM100 and SM120, and for e4m3 by e2m1 on SM100 alone (on SM120 that becomes BF16).

**FP8** (`X8` and `W8`): both are E4M3, x with one scale, w with one a row. The instruction is the same one, whose block
scales are all 1: with them it is the faster one on SM120 (others measured about twice the rate of plain FP8 on an RTX
5090). The sum is multiplied with the product of both scales, then the bias is added, as in `packed.own_quantizer`.
Without the instruction E4M3 is decoded to float16, which holds it.

NVFP4 is decoded to float16 as in `decode`. An MXFP4 value, E2M1 times a power of two, is exact in bfloat16, whose
exponent has the range of E8M0. Triton's interpreter cannot multiply bfloat16; without ASM these are float32.
"""

import triton
import triton.language as tl

from fp4deploy.plugins.gemm.triton.decode import SCALED, decode, permute
from fp4deploy.plugins.gemm.triton.epilogue import divide


@triton.jit
def gather_gemm_kernel(
    x,  # codes, uint8 [batch, H, W, CB]
    x_scales,  # uint8 [batch, H, W, CB / 8], E4M3; with MX [..., CB / 16], E8M0; not read with W8
    x_amax,  # float32 []; not read with MX; with W8 the scale
    w,  # uint8 [outputs, KH, KW, CB]
    w_scales,
    w_amax,  # with W8 the scales, float32 [outputs]
    bias,  # float32 [outputs]; not read without BIAS
    out,  # OUT [batch, OH, OW, outputs]
    H,
    W,
    CB,
    OH,
    OW,
    M,  # batch * OH * OW
    outputs,
    stride_y,
    stride_x,
    padding_y,
    padding_x,
    dilation_y,
    dilation_x,
    x_range,  # 6 * 448, or 6 * 256 with 4/6
    w_range,
    KH: tl.constexpr,
    KW: tl.constexpr,
    INVERSE: tl.constexpr,
    MX: tl.constexpr,
    BIAS: tl.constexpr,
    OUT: tl.constexpr,  # "fp16", "bf16" or "fp32"
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,  # bytes of a step: 2 BK elements
    NATIVE: tl.constexpr,
    ASM: tl.constexpr,
    X8: tl.constexpr,  # x is E4M3, uint8 [batch, H, W, 2 CB]
    W8: tl.constexpr,  # and so is w, uint8 [outputs, KH, KW, 2 CB]
):
    BLOCK: tl.constexpr = 16 if MX else 8  # bytes that share a scale
    CB = CB // BLOCK * BLOCK  # no change of the value; it tells the compiler how wide the loads can be
    columns = tl.cdiv(outputs, BN)
    m = (tl.program_id(0) // columns) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % columns) * BN + tl.arange(0, BN)
    has = n < outputs
    ox, rest = m % OW, m // OW
    oy, item = rest % OH, (rest // OH).to(tl.int64)
    byte, scale = tl.arange(0, BK), tl.arange(0, BK // BLOCK)
    steps = tl.cdiv(CB, BK)
    row = n.to(tl.int64) * (KH * KW)
    left_scale, right_scale = _global_scales(x_amax, x_range, w_amax, w_range, MX or W8, NATIVE, ASM)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(KH * KW * steps):
        tap, first = step // steps, (step % steps) * BK
        ky, kx = tap // KW, tap % KW
        if INVERSE:
            ty, tx = oy + padding_y - ky * dilation_y, ox + padding_x - kx * dilation_x
            iy, ix = ty // stride_y, tx // stride_x
            reads = (ty >= 0) & (tx >= 0) & (iy * stride_y == ty) & (ix * stride_x == tx)
        else:
            iy, ix = oy * stride_y - padding_y + ky * dilation_y, ox * stride_x - padding_x + kx * dilation_x
            reads = (iy >= 0) & (ix >= 0)
        reads = reads & (iy < H) & (ix < W) & (m < M)
        pixel = (item * H + iy) * W + ix
        left, left_scales = (first + byte < CB)[None, :], (first // BLOCK + scale < CB // BLOCK)[None, :]
        at, at_scale = (first + byte)[None, :], (first // BLOCK + scale)[None, :]
        element = (2 * first + tl.arange(0, 2 * BK))[None, :]
        if X8:
            a = tl.load(x + (pixel * (2 * CB))[:, None] + element, mask=reads[:, None] & (element < 2 * CB), other=0)
        else:
            a = tl.load(x + (pixel * CB)[:, None] + at, mask=reads[:, None] & left, other=0)
        if W8:
            b = tl.load(
                w + ((row + tap) * (2 * CB))[:, None] + element, mask=has[:, None] & (element < 2 * CB), other=0
            )
            sa, sb = tl.full((BM, BK // 16), 127, tl.uint8), tl.full((BN, BK // 16), 127, tl.uint8)  # 1
        else:
            b = tl.load(w + ((row + tap) * CB)[:, None] + at, mask=has[:, None] & left, other=0)
            at_x, at_w = (pixel * (CB // BLOCK))[:, None] + at_scale, ((row + tap) * (CB // BLOCK))[:, None] + at_scale
            sa = tl.load(x_scales + at_x, mask=reads[:, None] & left_scales, other=0)
            sb = tl.load(w_scales + at_w, mask=has[:, None] & left_scales, other=0)
        if X8:
            acc = _multiply_eight_bits(acc, a, sa, b, sb, BM, BN, BK, W8, NATIVE, ASM)
        else:
            acc = _multiply(acc, a, sa, b, sb, BM, BN, BK, MX, NATIVE, ASM)
    if W8:
        acc = acc * (tl.load(x_amax) * tl.load(w_amax + n, mask=has, other=0.0))[None, :]
    elif not MX:
        acc = (acc * left_scale) * right_scale  # one after the other: their product may underflow
    if BIAS:
        acc += tl.load(bias + n, mask=has, other=0.0)[None, :]
    y = acc.to(tl.float16) if OUT == "fp16" else acc.to(tl.bfloat16) if OUT == "bf16" else acc
    place = m.to(tl.int64) * outputs
    tl.store(out + place[:, None] + n[None, :], y, mask=(m < M)[:, None] & has[None, :])


@triton.jit
def rows_gemm_kernel(
    a,  # codes, uint8 [batch, rows, KB]
    a_scales,
    a_amax,
    b,  # uint8 [batch, columns, KB]
    b_scales,
    b_amax,
    out,  # float32 [splits, rows, columns]
    rows,
    columns,
    KB,  # bytes of a row
    batch,
    split_steps,  # steps of BK bytes of a split
    a_range,
    b_range,
    segments,  # None, or int32 [splits + 1]: where the pixels of each begin, multiples of 128
    MX: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    NATIVE: tl.constexpr,
    ASM: tl.constexpr,
):
    BLOCK: tl.constexpr = 16 if MX else 8
    KB = KB // BLOCK * BLOCK
    across = tl.cdiv(columns, BN)
    m = (tl.program_id(0) // across) * BM + tl.arange(0, BM)
    n = (tl.program_id(0) % across) * BN + tl.arange(0, BN)
    has_m, has_n = (m < rows)[:, None], (n < columns)[:, None]
    byte, scale = tl.arange(0, BK), tl.arange(0, BK // BLOCK)
    steps = tl.cdiv(KB, BK)
    begin = tl.program_id(1) * split_steps
    end = tl.minimum(begin + split_steps, batch * steps)
    if segments is not None:  # the first byte, a multiple of 64, and the one behind the last
        of_split = segments + tl.program_id(1)
        base, KE = tl.load(of_split) // 128 * 64, tl.load(of_split + 1) // 128 * 64
        begin, end = 0, tl.cdiv(KE - base, BK)
    left_scale, right_scale = _global_scales(a_amax, a_range, b_amax, b_range, MX, NATIVE, ASM)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(begin, end):
        if segments is None:
            item, first = (step // steps).to(tl.int64), (step % steps) * BK
        else:
            item, first = tl.zeros((), tl.int64), base + step * BK
        left, left_scales = (first + byte < KB)[None, :], (first // BLOCK + scale < KB // BLOCK)[None, :]
        at, at_scale = (first + byte)[None, :], (first // BLOCK + scale)[None, :]
        row_a, row_b = (item * rows + m)[:, None], (item * columns + n)[:, None]
        codes_a = tl.load(a + row_a * KB + at, mask=has_m & left, other=0)
        sa = tl.load(a_scales + row_a * (KB // BLOCK) + at_scale, mask=has_m & left_scales, other=0)
        codes_b = tl.load(b + row_b * KB + at, mask=has_n & left, other=0)
        sb = tl.load(b_scales + row_b * (KB // BLOCK) + at_scale, mask=has_n & left_scales, other=0)
        acc = _multiply(acc, codes_a, sa, codes_b, sb, BM, BN, BK, MX, NATIVE, ASM)
    if not MX:
        acc = (acc * left_scale) * right_scale
    place = (tl.program_id(1).to(tl.int64) * rows + m) * columns
    tl.store(out + place[:, None] + n[None, :], acc, mask=has_m & (n < columns)[None, :])


@triton.jit
def _multiply(
    acc, a, sa, b, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, MX: tl.constexpr, NATIVE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc + a b^T of codes a [BM, BK], b [BN, BK] and their block scales sa, sb."""
    if NATIVE:
        if not MX:
            sa, sb = sa.to(tl.float8e4nv, bitcast=True), sb.to(tl.float8e4nv, bitcast=True)
        acc = tl.dot_scaled(a, sa, "e2m1", tl.trans(b), sb, "e2m1", acc)
    else:
        if MX:
            a_even, a_odd = decode_mx(a, sa, BM, BK, ASM)
            b_even, b_odd = decode_mx(b, sb, BN, BK, ASM)
        else:
            a_even, a_odd = decode(a, sa, BM, BK, ASM)
            b_even, b_odd = decode(b, sb, BN, BK, ASM)
        acc = tl.dot(a_even, tl.trans(b_even), acc)
        acc = tl.dot(a_odd, tl.trans(b_odd), acc)
    return acc


@triton.jit
def _multiply_eight_bits(
    acc, a, sa, b, sb, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, W8: tl.constexpr, NATIVE: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """acc + a b^T of E4M3 bytes a [BM, 2 BK], E2M1 codes b [BN, BK] or with W8 E4M3 as well, and their scales, E8M0
    [rows, BK // 16], of which W8 has none but 1."""
    w = b
    if not W8:
        even, odd = _as_e4m3(b, ASM)
        w = tl.interleave(even, odd)
    a, w = a.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True)
    if NATIVE:
        acc = tl.dot_scaled(a, sa, "e4m3", tl.trans(w), sb, "e4m3", acc)
    elif W8:
        acc = tl.dot(a.to(tl.float16), tl.trans(w.to(tl.float16)), acc)
    else:  # exact: four significant bits times a power of two
        left, right = a.to(tl.float32) * _powers(sa, BM, BK), w.to(tl.float32) * _powers(sb, BN, BK)
        if ASM:
            left, right = left.to(tl.bfloat16), right.to(tl.bfloat16)
        acc = tl.dot(left, tl.trans(right), acc)
    return acc


# Both codes of four bytes at once: prmt looks their sizes up in a table of eight bytes, by four indices of four bits.
_TO_E4M3: tl.constexpr = tl.constexpr("""
{
    .reg .b32 size, next, sign;
    and.b32 size, $2, 0x07070707;
    shr.u32 next, size, 4;
    or.b32 size, size, next;
    prmt.b32 size, size, 0, 0x4420;
    prmt.b32 size, 0x3C383000, 0x4C484440, size;
    shl.b32 sign, $2, 4;
    and.b32 sign, sign, 0x80808080;
    or.b32 $0, size, sign;
    shr.u32 size, $2, 4;
    and.b32 size, size, 0x07070707;
    shr.u32 next, size, 4;
    or.b32 size, size, next;
    prmt.b32 size, size, 0, 0x4420;
    prmt.b32 size, 0x3C383000, 0x4C484440, size;
    and.b32 sign, $2, 0x80808080;
    or.b32 $1, size, sign;
}
""")


@triton.jit
def _as_e4m3(codes, ASM: tl.constexpr):
    """E4M3 bytes of the even and of the odd E2M1 codes: the exponent moves up by six; 1/2 is no subnormal number any
    more."""
    if ASM:
        return tl.inline_asm_elementwise(
            _TO_E4M3, "=&r,=&r,r", [codes], dtype=(tl.uint8, tl.uint8), is_pure=True, pack=4
        )
    return _as_e4m3_by_code(codes & 15), _as_e4m3_by_code(codes >> 4)


@triton.jit
def _as_e4m3_by_code(code):
    size = code & 7
    byte = tl.where(size > 1, (size << 2) + 0x30, size * 0x30)
    return (byte | ((code & 8) << 4)).to(tl.uint8)


@triton.jit
def _powers(scales, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """float32 [ROWS, 2 BYTES] of E8M0 bytes [ROWS, BYTES // 16]."""
    bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)
    wide = tl.where(scales == 0xFF, float("nan"), bits.to(tl.float32, bitcast=True))
    return tl.reshape(tl.broadcast_to(tl.expand_dims(wide, 2), (ROWS, BYTES // 16, 32)), (ROWS, 2 * BYTES))


@triton.jit
def _global_scales(a_amax, a_range, b_amax, b_range, MX: tl.constexpr, NATIVE: tl.constexpr, ASM: tl.constexpr):
    """Those of NVFP4, before the loop: divisions behind it would take registers from the accumulators."""
    first, second = 1.0, 1.0
    if not MX:
        first, second = divide(tl.load(a_amax), a_range, ASM), divide(tl.load(b_amax), b_range, ASM)
        if not NATIVE:
            first = first * (SCALED * SCALED)
    return first, second


@triton.jit
def decode_mx(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr, ASM: tl.constexpr):
    """(even elements, odd elements), each [ROWS, BYTES] in permuted order: bfloat16, or float32 without ASM.

    codes: uint8 [ROWS, BYTES]; scales: uint8 [ROWS, BYTES // 16], E8M0; 0xFF is NaN.
    """
    bits = tl.where(scales == 0, 1 << 22, scales.to(tl.int32) << 23)
    wide = tl.where(scales == 0xFF, float("nan"), bits.to(tl.float32, bitcast=True))
    wide = tl.reshape(tl.broadcast_to(tl.expand_dims(wide, 2), (ROWS, BYTES // 16, 16)), (ROWS, BYTES))
    codes, wide = permute(codes, ROWS, BYTES), permute(wide, ROWS, BYTES)
    even, odd = _value(codes & 15) * wide, _value(codes >> 4) * wide
    if ASM:
        even, odd = even.to(tl.bfloat16), odd.to(tl.bfloat16)
    return even, odd


@triton.jit
def _value(code):
    """The E2M1 value of a code, float32: in a float's top bits it is times 2^-126, subnormal codes included."""
    word = code.to(tl.int32)
    return (((word & 8) << 28) | ((word & 7) << 22)).to(tl.float32, bitcast=True) * 8.507059173023462e37
