"""E2M1 codes and E4M3 scales to float16, in registers.

    byte of codes  s eem s eem     high nibble: odd element, low nibble: even element

As the top byte of a float16, "s 000 eem 0" is the E2M1 value times 2^-14, subnormal codes included, so decoding only
moves bits. The block scale, an E4M3 byte, becomes a float16 in the same way, times 2^7. Their product is the element
times 2^-7, exact in float16. `SCALED` removes the power of two after the sum.

**No interleaving.** The order of a contraction is free. Even elements (low nibbles) of one operand are multiplied with
even elements of the other, odd ones with odd ones: two dot products of half the depth, and no shuffles.

**Permuted bytes.** For the same reason the bytes of a row may come in any order that both operands share. The fragment
layout of a tensor core gives a thread elements 2t, 2t+1, 2t+8, 2t+9 of 16. `permute` puts the bytes 8t to 8t+7 of each
32 there: a thread then reads them in one access, and they have one scale.

With ASM, inline PTX decodes four bytes (8 elements) in 11 instructions and 4 packed multiplications. Without it the
same is done by operators that Triton's interpreter can run.
"""

import triton
import triton.language as tl

SCALED: tl.constexpr = tl.constexpr(128.0)  # what decoded elements have to be multiplied by

_SPREAD: tl.constexpr = tl.constexpr("""{
.reg .b32 h, l, m;
shr.b32 m, $4, 3;
and.b32 m, m, 0x0E0E0E0E;
lop3.b32 h, $4, 0x80808080, m, 0xEA;
shl.b32 l, $4, 4;
and.b32 l, l, 0x80808080;
shl.b32 m, $4, 1;
lop3.b32 l, m, 0x0E0E0E0E, l, 0xEA;
prmt.b32 $0, l, 0, 0x1404;
prmt.b32 $1, l, 0, 0x3424;
prmt.b32 $2, h, 0, 0x1404;
prmt.b32 $3, h, 0, 0x3424;
}""")


@triton.jit
def permute(x, ROWS: tl.constexpr, BYTES: tl.constexpr):
    """[ROWS, BYTES] with the bytes of each 32 in the order of a tensor core's fragment."""
    x = tl.reshape(x, (ROWS, BYTES // 32, 4, 2, 2, 2))
    return tl.reshape(tl.permute(x, (0, 1, 3, 4, 2, 5)), (ROWS, BYTES))


@triton.jit
def decode(codes, scales, ROWS: tl.constexpr, BYTES: tl.constexpr, ASM: tl.constexpr):
    """(even elements, odd elements), each float16 [ROWS, BYTES] in permuted order, times 2^-7.

    codes: uint8 [ROWS, BYTES]; scales: uint8 [ROWS, BYTES // 8], E4M3; 0x7F is NaN.
    """
    # 2^15 is exact for every scale, subnormal ones too. The bits of the E4M3 NaN would be a number in float16.
    wide = (scales.to(tl.uint16) << 7).to(tl.float16, bitcast=True) * 32768.0  # (scale * 2^-8) * 2^15
    wide = tl.where(scales == 0x7F, float("nan"), wide)
    wide = tl.reshape(tl.broadcast_to(tl.expand_dims(wide, 2), (ROWS, BYTES // 8, 8)), (ROWS, BYTES))
    codes = permute(codes, ROWS, BYTES)
    wide = permute(wide, ROWS, BYTES)
    if ASM:
        even, odd = tl.inline_asm_elementwise(
            _SPREAD, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        even, odd = _bits(codes & 15), _bits(codes >> 4)
    return even * wide, odd * wide


@triton.jit
def _bits(code):
    word = code.to(tl.uint16)
    return (((word & 8) << 12) | ((word & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def begin_after_primary():
    """Before the first access of a secondary kernel (`runtime.pdl`) to global memory; it waits for earlier kernels."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait;\ngriddepcontrol.launch_dependents;\nmov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def finished(acc, ASM: tl.constexpr):
    """acc, when the multiplications that add to it have read their operands.

    On SM90 a multiplication (`wgmma`) reads decoded elements from registers while the program goes on, here to the next
    step of the loop. ptxas before CUDA 13.3 gives these registers to what that step loads, although the multiplication
    may not have read them. An instruction on acc, of no text, makes Triton wait for it.
    """
    return tl.inline_asm_elementwise("", "=f,0", [acc], dtype=tl.float32, is_pure=True, pack=1) if ASM else acc
