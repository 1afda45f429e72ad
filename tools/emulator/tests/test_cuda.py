"""The CUDA kernels' PTX, executed: bit-equal to the reference, and planted faults are found."""

from __future__ import annotations

import pytest

from fp4deploy.plugins.runtime.nvcc import find_nvcc
from fp4deploy_emulator.cases import CUDA
from fp4deploy_emulator.cases.case import Case, Setting
from fp4deploy_emulator.cases.warpgroup import FAMILY as WARPGROUP
from tools.emulator.tests import planted

pytestmark = pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")

FIRST = ("pack rows", "amax", "GroupNorm and pack", "quantising a map both ways")  # in every run of the tests
FIRST += ("FP16 convolution, 3x2, stride 1x2", "images, planes and classes")
FIRST += ("quantising a map both ways, MXFP4, stochastic", "blocks of 16 x 16, stochastic")


CONVERTING = ("quantisers", "training operands", "norm and pack", "GEMV")  # before SM100 by other instructions


def _listed() -> list[object]:
    """SM120, and SM90 where its code is another, or the only one.

    The PTX for SM100 is that for SM120 (`test_compile`), but GEMV has other macros there.
    """
    found = []
    for case in CUDA:
        others = ("sm_90",) * (case.family in CONVERTING) + ("sm_100",) * (case.family == "GEMV")
        for arch in ("sm_90",) if case.family == WARPGROUP else ("sm_120", *others):
            marks = () if case.name in FIRST and arch == "sm_120" else pytest.mark.emulate
            found.append(pytest.param(case, arch, marks=marks, id=f"{arch}-{case.name}"))
    return found


@pytest.mark.parametrize(("case", "arch"), _listed())
def test_bit_equal_to_the_reference(case: Case, arch: str) -> None:
    outcome = case.outcome(Setting(arch=arch))
    assert outcome.good, outcome


FAULTS = {
    "pack rows": {
        "a barrier is missing": planted.without_barrier(0),
        "a product is not rounded as it should": planted.replaced(
            r"mul\.rn\.f32(\s+%f\d+, %f\d+, )%f\d+;", r"mul.rn.f32\g<1>0f3F800001;", 3
        ),
        "the loop does not end": planted.replaced(r"setp\.(ge|lt)\.s64", "setp.ne.s64", 0),
        "stores are shifted": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+8]", None),
        "stores are misaligned": planted.replaced(r"(st\.global\.v\d\.u32\s+\[%rd\d+)\]", r"\1+4]", None),
    },
    "pack rows, stochastic": {
        "a barrier is missing": planted.without_barrier(0),
        "what exceeds 6 is not cut off": planted.replaced(
            r"min\.u16x2 (%r\d+), (%r\d+), %r\d+;", r"mov.b32 \1, \2;", None
        ),
        "sums are rounded": planted.replaced(r"cvt\.rz\.f16x2\.f32", "cvt.rn.f16x2.f32", None),
        "steps do not grow from 2 on": planted.replaced(r"mov\.b32(\s+%r\d+, )25165824;", r"mov.b32\g<1>0;", None),
        "a byte is another element's": planted.replaced(r"mov\.b32(\s+%r\d+, )17428;", r"mov.b32\g<1>17412;", None),
        "signs are another element's": planted.replaced(
            r"and\.b32(\s+%r\d+, %r\d+, )-2147450880;", r"and.b32\g<1>-2147483648;", 3
        ),
        "keys are another round's": planted.replaced(
            r"mul\.wide\.u32(\s+%rd\d+, %r\d+, )-766435501;", r"mul.wide.u32\g<1>-766435503;", -1
        ),
    },
    "pack rows, stochastic, swizzled scales": {
        "rows 32 apart are not adjacent": planted.replaced(r"and\.b32(\s+%r\d+, %r\d+, )12;", r"and.b32\g<1>28;", -1),
        "a tile has eight columns": planted.replaced(r"and\.b32(\s+%r\d+, %r\d+, )3;", r"and.b32\g<1>7;", -1),
        "tiles of rows have 256": planted.replaced(r"shr\.u32(\s+%r\d+, %r\d+, )7;", r"shr.u32\g<1>8;", -1),
    },
    "blocks of 16 x 16, packed": {
        "a barrier is missing": planted.without_barrier(0),
        "the other lane is left out": planted.replaced(r"(shfl\.sync\.bfly\.b32\s*\S+\s+\S+\s+)1,", r"\g<1>0,", None),
        "rows are left out of the amax": planted.replaced(
            r"max\.NaN\.xorsign\.abs\.bf16x2 (%r\d+), \1, %r\d+;", "", None
        ),
        "codes are another vector's": planted.replaced(r"(st\.global\.u32\s+\[%rd\d+)\]", r"\1+4]", None),
        "scales are another tile's": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+1]", 5),
        "a lane writes the other's scales": planted.replaced(r"and\.b32(\s+%r\d+, %r\d+, )1;", r"and.b32\g<1>0;", -1),
        "vectors are of another lane": planted.replaced(r"(ld\.global\.v4\.u32\s+[^\[]*\[%rd\d+)\]", r"\1+16]", 7),
    },
    "row-scaled, a warp a row": {
        "rows are read before they have come": planted.replaced(r"cp\.async\.wait_all;", "", 0),
        "what the other lanes have is left out": planted.replaced(
            r"shfl\.sync\.bfly\.b32\s*(%r\d+)\|%p\d+, (%r\d+), [^;]*;", r"mov.b32 \1, \2;", None
        ),
        "words are left out of the amax": planted.replaced(
            r"max\.NaN\.xorsign\.abs\.bf16x2 (%r\d+), \1, %r\d+;", "", None
        ),
        "vectors do not change places": planted.replaced(r"and\.b32(\s+%r\d+, %r\d+, )3;", r"and.b32\g<1>1;", 0),
        "amaxes are shifted": planted.replaced(r"(st\.global\.f32\s+\[%rd\d+)\]", r"\1+4]", 0),
    },
    "MS-EDEN, columns of a filter": {
        "a barrier is missing": planted.without_barrier(0),
        "a barrier is missing behind the elements": planted.without_barrier(1),
        "another column is read": planted.replaced(r"rem\.u32(\s+%r\d+), %r\d+, %r\d+;", r"mov.b32\1, 0;", -1),
        "nothing is carried": planted.replaced(r"selp\.u32(\s+%r\d+, )1, 0, (%p\d+);", r"selp.u32\g<1>0, 0, \2;", None),
        "what is outside is read": planted.replaced(r"setp\.lt\.u32", "setp.le.u32", None),
        "stores are another channel's": planted.replaced(r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", 0),
        "elements go to another block": planted.replaced(r"(st\.shared\.v4\.f32\s+\[%r\d+)\+1024\]", r"\1+2048]", 0),
    },
    "blocks of 16 x 16": {
        "a barrier is missing behind the scale": planted.without_barrier(0),
        "a barrier is missing behind the rows": planted.without_barrier(1),
        "half of the rows are left out": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)16,", r"\g<1>0,", 0),
        "a word is read from another place": planted.replaced(
            r"(ld\.global\.v4\.u32\s+[^\[]*\[%rd\d+)\+16\]", r"\1+0]", 0
        ),
        "a word goes to another place": planted.replaced(r"(st\.global\.v4\.u32\s+\[%rd\d+)\+16\]", r"\1+0]", 0),
        "the mask of a row is another's": planted.replaced(r"setp\.le\.f32", "setp.gt.f32", 0),
    },
    "blocks of 16 x 16, 4/6, FP32": {
        "errors are added in another place": planted.replaced(
            r"(st\.shared\.(?:u32|f32)\s+\[%r\d+)\+512\]", r"\1+516]", 0
        ),
    },
    "row-scaled, a block a row": {
        "rows are read before they have come": planted.replaced(r"cp\.async\.wait_all;", "", 0),
        "a barrier is missing behind the copies": planted.without_barrier(0),
        "a barrier is missing behind the amaxes of warps": planted.without_barrier(1),
        "half of the lanes are left out": planted.replaced(
            r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)16,", r"\g<1>8,", None
        ),
        "vectors are copied to another place": planted.replaced(
            r"(cp\.async\.cg\.shared\.global\s+\[%r\d+)\]", r"\1+16]", 0
        ),
        "every value is taken for an infinity": planted.replaced(
            r"setp\.equ\.f32(\s+%p\d+, %f\d+, )0f7F800000;", r"setp.equ.f32\g<1>0f7FFFFFFF;", None
        ),
        "amaxes are shifted": planted.replaced(r"(st\.global\.f32\s+\[%rd\d+)\]", r"\1+4]", 0),
        "stores are misaligned": planted.replaced(r"(st\.global\.v2\.u32\s+\[%rd\d+)\]", r"\1+4]", None),
    },
    "blocks of 16 x 16, stochastic": {
        "sums are rounded": planted.replaced(r"fma\.rz\.f32", "fma.rn.f32", 3),
        "a byte is another element's": planted.replaced(r"mov\.b32(\s+%r\d+, )30289;", r"mov.b32\g<1>30288;", 0),
    },
    "GroupNorm, ReLU, fake quantisation": {
        "a barrier is missing": planted.without_barrier(1),
        "another barrier is missing": planted.without_barrier(4),
        "a shuffle reads another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)\d+", r"\g<1>3", 2),
        "a wrong atomic": planted.replaced(r"atom\.global\.max\.s32", "atom.global.min.s32", 0),
        "a misaligned load": planted.replaced(r"(ld\.global\.v4\.u32\s+[^\[]*\[%rd\d+)\]", r"\1+4]", 0),
    },
    "segmentation loss": {
        "a barrier is missing behind the logits": planted.without_barrier(0),
        "a barrier is missing before classes are added": planted.without_barrier(1),
        "a barrier is missing behind them": planted.without_barrier(2),
        "an exponential is scaled wrongly": planted.replaced(r"shl\.b32(\s+%r\d+, %r\d+, )23;", r"shl.b32\g<1>22;", 0),
        "a logit is of another class": planted.replaced(r"(ld\.global\.u16\s+\S+\s+\[%rd\d+)\]", r"\1+2]", 0),
        "gradients are shifted": planted.replaced(r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", None),
    },
    "preparation of frames": {
        "sums are cut off": planted.replaced(r"2097152;", "0;", None),
        "pixels behind the last are read": planted.replaced(r"min\.s32(\s+%r\d+, %r\d+), %r\d+;", r"mov.b32\1;", None),
        "red is green": planted.replaced(r"(ld\.global\.nc\.u8\s+%rs\d+, \[%rd\d+)\]", r"\1+1]", None),
        "products and sums are one": planted.replaced(
            r"mul\.rn\.f32\s+(%f\d+), (%f\d+, %f\d+);([\s\S]*?)add\.rn\.f32(\s+%f\d+, )\1, (%f\d+);",
            r"\3fma.rn.f32\4\2, \5;",
            0,
        ),
        "stores are shifted": planted.replaced(r"(st\.global\.f32\s+\[%rd\d+)\]", r"\1+4]", None),
    },
    "preparation of frames, the height first": {
        "the width is first": planted.replaced(
            r"ld\.param\.u32(\s+%r\d+), \[prepare_frames_param_15\];", r"mov.b32\1, 0;", 0
        ),
    },
    "preparation of frames, letterboxed": {
        "the padding is of one colour": planted.replaced(r"shr\.u32(\s+%r\d+, %r\d+), \d+;", r"mov.b32\1;", None),
        "the padding is one column less": planted.replaced(r"setp\.ge\.s32", "setp.gt.s32", 3),
    },
    "image as FP4 terms": {
        "a colour is not rounded to FP16": planted.replaced(
            r"cvt\.rn\.f16\.f32 (%rs\d+), (%f\d+);\}([\s\S]*?)cvt\.f32\.f16 (%f\d+), \1;", r"mov.f32 \4, \2;}\3", 0
        ),
        "rounding is down": planted.replaced(r"cvt\.rni\.f32\.f32", "cvt.rmi.f32.f32", 2),
        "nothing saturates": planted.replaced(r"selp\.f32(\s+%f\d+, )0f40900000, (%f\d+), %p\d+;", r"mov.f32\1\2;", 0),
        "red is green": planted.replaced(r"(ld\.global\.f32\s+%f\d+, \[%rd\d+)\]", r"\1+4]", 1),
        "two terms change places": planted.replaced(
            r"(mul\.rn\.f32\s+%f\d+, %f\d+, )0f3F000000;", r"\g<1>0f3F800000;", 1
        ),
        "infinity is no NaN": planted.replaced(
            r"sub\.rn\.f32(\s+%f\d+, )(%f\d+), \2;(\s+add\.rn\.f32\s+%f\d+, %f\d+, 0f40C00000;)",
            r"mov.f32\g<1>0f00000000;\3",
            0,
        ),
        "a barrier is missing": planted.without_barrier(0),
        "codes are shifted": planted.replaced(r"(st\.global\.v2\.u32\s+\[%rd\d+)\]", r"\1+8]", None),
        "scales are shifted": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+1]", None),
    },
    "frames as FP4 terms": {
        "a barrier is missing": planted.without_barrier(0),
        "sums are cut off": planted.replaced(r"2097152;", "0;", None),
        "pixels behind the last are read": planted.replaced(r"min\.s32(\s+%r\d+, %r\d+), %r\d+;", r"mov.b32\1;", None),
        "red is green": planted.replaced(r"(ld\.global\.nc\.u8\s+%rs\d+, \[%rd\d+)\]", r"\1+1]", None),
        "rounding is down": planted.replaced(r"cvt\.rni\.f32\.f32", "cvt.rmi.f32.f32", 2),
        "a term is twice as large": planted.replaced(
            r"(mul\.rn\.f32\s+%f\d+, %f\d+, )0f3F000000;", r"\g<1>0f3F800000;", 1
        ),
        "codes are shifted": planted.replaced(r"(st\.global\.v2\.u32\s+\[%rd\d+)\]", r"\1+8]", None),
        "scales are shifted": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+1]", None),
    },
    "frames as FP4 terms, the height first": {
        "the width is first": planted.replaced(
            r"ld\.param\.u32(\s+%r\d+), \[prepare_frames_param_17\];", r"mov.b32\1, 0;", 0
        ),
    },
    "frames as FP4 terms, letterboxed, another amax": {
        "the padding is of one colour": planted.replaced(r"shr\.u32(\s+%r\d+, %r\d+), (8|16);", r"mov.b32\1;", None),
        "the amax is another": planted.replaced(
            r"(ld\.global\.nc\.f32\s+(%f\d+), \[%rd\d+\];)", r"\1 mov.f32 \2, 0f40C00000;", 0
        ),
    },
    "classes of frames": {
        "rows are read before they have come": planted.replaced(r"cp\.async\.wait_all;", "", 0),
        "a barrier is missing": planted.without_barrier(0),
        "the last bytes of the logits are left out": planted.replaced(
            r"(cp\.async\.cg\.shared\.global \[%r\d+\], \[%rd\d+\], 16, )%r\d+;", r"\g<1>8;", 0
        ),
        "the last of equals": planted.replaced(
            r"setp\.gtu\.f32(\s+%p\d+, )(%f\d+), (%f\d+);", r"setp.geu.f32\1\2, \3;", None
        ),
        "a number above a NaN": planted.replaced(r"setp\.num\.f32(\s+%p\d+, %f\d+, %f\d+;)", r"setp.leu.f32\1", None),
        "classes of another pixel": planted.replaced(r"(ld\.shared\.v4\.u16\s+[^\[]*\[%r\d+)\]", r"\1+40]", 0),
        "products and sums are one": planted.replaced(
            r"add\.rn\.f32(\s+%f\d+, %f\d+, )(%f\d+);", r"fma.rn.f32\1\2, \2;", 4
        ),
        "stores are shifted": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+1]", None),
    },
    "concatenate and separate, with a bias": {
        "a barrier is missing before the sums": planted.without_barrier(-1),
        "a bias is read from another place": planted.replaced(
            r"(ld\.global\.v4\.f32\s+[^\[]*\[%rd\d+)\]", r"\1+16]", None
        ),
        "sums are written to another place": planted.replaced(r"(st\.global\.f32\s+\[%rd\d+)\]", r"\1+4]", None),
    },
    "GEMV, 16 rows, K = 4352": {
        "a stage is read before its bytes arrived": planted.replaced(r"@!done bra AGAIN;", "", -1),
        "a stage is filled before it was read": planted.replaced(r"@!done bra AGAIN;", "", 0),
        "more bytes are announced than come": planted.replaced(
            r"(mbarrier\.arrive\.expect_tx\S+ _, \[%r\d+\], )(%r\d+);",
            r"{ .reg .b32 more; add.s32 more, \2, 16; \1more; }",
            None,
        ),
        "a named barrier is missing": planted.replaced(r"barrier\.sync 1, \d+;", "", -1),
        "a named barrier waits for too few": planted.replaced(r"barrier\.sync 1, \d+;", "barrier.sync 1, 64;", 0),
        "an mbarrier expects another arrival": planted.replaced(
            r"(mbarrier\.init\S+ \[%r\d+\], )(%r\d+);", r"{ .reg .b32 more; add.s32 more, \2, 1; \1more; }", 1
        ),
        "a tensor copy reads another column": planted.replaced(
            r"(cp\.async\.bulk\.tensor\.2d\S+ \[%r\d+\], \[%rd\d+, \{)%r\d+(, %r\d+\}\])", r"\g<1>0\g<2>", None
        ),
        "rows are copied to an unaligned address": planted.replaced(
            r"(cp\.async\.bulk\.shared\S+ \[%r\d+)\]", r"\1 + 4]", None
        ),
    },
    "all weights": {
        "rows end one element later": planted.replaced(r"setp\.ge\.s64", "setp.gt.s64", None),
        "shuffles read another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)16,", r"\g<1>8,", None),
        "a wrong atomic": planted.replaced(r"atom\.global\.max\.s32", "atom.global.min.s32", 0),
        "another entry of the table": planted.replaced(r"(ld\.global\.u64\s+%rd\d+, \[%rd\d+)\+16\]", r"\1+8]", 0),
        "stores are shifted": planted.replaced(r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", None),
        "a misaligned load": planted.replaced(r"(ld\.f32\s+%f\d+, \[%rd\d+)\]", r"\1+2]", 0),
    },
    "quantising a map for three columns": {
        "pixels right of a row are read": planted.replaced(
            r"setp\.ge\.u32(\s+%p\d+, %r\d+, %r\d+;)", r"setp.gt.u32\1", None
        ),
        "stores are shifted": planted.replaced(r"(st\.global\.v2\.u32\s+\[%rd\d+)\]", r"\1+8]", 0),
        "stores are misaligned": planted.replaced(r"(st\.global\.v2\.u32\s+\[%rd\d+)\]", r"\1+4]", None),
        "a load is another position's": planted.replaced(r"(ld\.global\.v2\.u32\s+[^\[]*\[%rd\d+)\]", r"\1+8]", 20),
        "a barrier is missing": planted.without_barrier(0),
        "the row is the image": planted.replaced(r"div\.u32(\s+%r\d+, %r\d+, %r\d+;)", r"rem.u32\1", 1),
    },
    "quantising a map both ways": {
        "shuffles read another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)2,", r"\g<1>1,", 0),
        "a scale is another position's": planted.replaced(r"(shfl\.sync\.idx\.b32\s+\S+\s+\S+\s+)2,", r"\g<1>1,", 0),
    },
    "quantising a map both ways, stochastic, RHT along the width": {
        "a wrong atomic": planted.replaced(r"atom\.global\.max\.s32", "atom.global.min.s32", 0),
        "a byte is another element's": planted.replaced(
            r"prmt\.b32(\s+%r\d+, %r\d+, %r\d+, )%r\d+;", r"prmt.b32\g<1>30288;", 5
        ),
        "words are another thread's": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)1,", r"\g<1>2,", 8),
    },
    "MS-EDEN along the channels": {
        "a barrier is missing": planted.without_barrier(0),
        "elements go to another place": planted.replaced(r"(st\.shared\.v4\.f32\s+\[%r\d+)\+16\]", r"\1+32]", -1),
        "elements go to another block": planted.replaced(r"(st\.shared\.v2\.f32\s+\[%r\d+)\+80\]", r"\1+160]", 0),
        "lanes do not wait for those of their group": planted.replaced(r"bar\.warp\.sync\s+\S+;", "", 0),
        "a division is no quotient": planted.replaced(r"div\.rn\.f32", "mul.rn.f32", 1),
        "a word is read from another place": planted.replaced(
            r"(ld\.global\.v4\.u32\s+[^\[]*\[%rd\d+)\+16\]", r"\1+0]", 0
        ),
        "a word goes to another place": planted.replaced(r"(st\.global\.v4\.u32\s+\[%rd\d+)\+-16\]", r"\1+0]", 0),
        "amaxes of other warps are left out": planted.replaced(
            r"setp\.gt\.u32(\s+%p\d+, %r\d+, )7;", r"setp.gt.u32\g<1>0;", 0
        ),
    },
    "MS-EDEN along rows that begin between words": {
        "words are read from there": planted.replaced(r"and\.b64(\s+%rd\d+, %rd\d+, )15;", r"and.b64\g<1>0;", 0),
    },
    "MS-EDEN along a width of 9": {
        "a wrong atomic": planted.replaced(r"atom\.global\.max\.s32", "atom.global.min.s32", 0),
        "stores are another channel's": planted.replaced(r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", 0),
    },
    "depthwise, 7x7": {
        "a barrier is missing": planted.without_barrier(0),
        "a product is not added": planted.replaced(
            r"fma\.rn\.f32(\s+%f\d+, %f\d+, %f\d+), %f\d+;", r"fma.rn.f32\1, 0f00000000;", 5
        ),
        "a filter is another pixel's": planted.replaced(r"(ld\.shared\.v2\.f32\s+[^\[]*\[%r\d+)\]", r"\1+8]", 0),
        "a pixel is another channel's": planted.replaced(r"(ld\.global\.u32\s+\S+\s+\[%rd\d+)\]", r"\1+4]", -1),
        "stores are shifted": planted.replaced(r"(st\.global\.u32\s+\[%rd\d+)\]", r"\1+4]", None),
        "stores are misaligned": planted.replaced(r"(st\.global\.u32\s+\[%rd\d+)\]", r"\1+2]", None),
    },
    "FP16 convolution, 16 channels": {
        "a barrier is missing before the weights of a step": planted.without_barrier(0),
        "a barrier is missing after them": planted.without_barrier(1),
        "the products are not added": planted.replaced(
            r"fma\.rn\.f32(\s+%f\d+, %f\d+, %f\d+), %f\d+;", r"fma.rn.f32\1, 0f00000000;", 5
        ),
        "the mask of the padding is inverted": planted.replaced(r"setp\.gt\.s32", "setp.le.s32", 0),
        "weights are read from another place": planted.replaced(
            r"(ld\.shared\.v4\.f32\s+[^\[]*\[%r\d+)\]", r"\1+16]", 0
        ),
        "stores are shifted": planted.replaced(r"(st\.global\.u16\s+\[%rd\d+)\]", r"\1+2]", None),
    },
    "GroupNorm and pack": {
        "a register is not written": planted.replaced(r"^\s*mov\.u32\s+%r\d+, %tid\.x;", "", 0),
        "fused multiply-adds are subtractions": planted.replaced(
            r"fma\.rn\.f32(\s+)(%f\d+), (%f\d+), (%f\d+), (%f\d+);",
            r"mul.rn.f32 \2, \3, \4; sub.rn.f32 \2, \2, \5;",
            None,
        ),
        "scales are shifted": planted.replaced(r"(st\.global\.u8\s+\[%rd\d+)\]", r"\1+1]", None),
        "a mask is inverted": planted.replaced(r"setp\.ge\.u32", "setp.lt.u32", 0),
        "shuffles read another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)1,", r"\g<1>2,", None),
    },
    "direct convolution, two sources of 32": {
        "a barrier is missing before the second source is decoded": planted.without_barrier(2),
        "a barrier is missing behind the first one": planted.without_barrier(1),
        "registers of an operand change places": planted.swapped_operands(0),
        "pixels are read from another place": planted.replaced(r"(ldmatrix[^;]*\[%r\d+)\]", r"\1+16]", 0),
        "an accumulator is not the one before": planted.replaced(
            r"(mma\.sync[^;]*\{%f\d+, %f\d+, %f\d+, )%f\d+(\};)", r"\g<1>0f00000000\2", 3
        ),
        "shuffles read another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)4,", r"\g<1>8,", None),
        "stores are shifted": planted.replaced(r"(st\.global\.v2\.(?:u|b)32\s+\[%rd\d+)\]", r"\1+8]", None),
    },
    "block-scaled convolution, 3x3, two sources": {
        "a stage is read before its copies have come": planted.replaced(r"@!done bra AGAIN;", "", -1),
        "pixels are read before their copies have come": planted.replaced(r"@!done bra AGAIN;", "", -2),
        "a stage is filled before it was read": planted.replaced(r"@!done bra AGAIN;", "", 1),
        "an mbarrier does not wait for the copies": planted.replaced(
            r"cp\.async\.mbarrier\.arrive\.noinc\.shared::cta\.b64 (\[%r\d+\]);",
            r"mbarrier.arrive.shared::cta.b64 _, \1;",
            None,
        ),
        "scales of A are those of other rows": planted.replaced(r"(, %r\d+, \{0, )1(\}, %r\d+, )", r"\g<1>0\2", 0),
        "scales of B are those of other columns": planted.replaced(r"(\}, %r\d+, \{0, )3(\};)", r"\g<1>2\2", 0),
        "registers of an operand change places": planted.swapped_operands(0),
        "pixels are read from another place": planted.replaced(r"(ldmatrix[^;]*\[%r\d+)\]", r"\1+32]", 0),
        "pixels beside the image are not zero": planted.replaced(
            r"(cp\.async\.cg\.shared\.global\s+\[%r\d+\], \[%rd\d+\], 16, )%r\d+;", r"\g<1>16;", None
        ),
        "an accumulator is not the one before": planted.replaced(
            r"(mma\.sync[^;]*\{%r\d+, %r\d+\}, \{%f\d+, %f\d+, %f\d+, )%f\d+(\})", r"\g<1>0f00000000\2", 3
        ),
        "the first source has the scale of the second": planted.replaced(r"div\.rn\.f32", "mul.rn.f32", -1),
        "stores are shifted": planted.replaced(r"(st\.global\.v4\.(?:u|b)32\s+\[%rd\d+)\]", r"\1+16]", None),
    },
    "block-scaled convolution, 2x2": {
        "pixels are overwritten before they were read": planted.replaced(r"@!done bra AGAIN;", "", 0),
    },
    "block-scaled convolution, 3x3, 20 channels, 5 outputs": {
        "channels behind the last one are not zero": planted.replaced(
            r"(cp\.async\.ca\.shared\.global\s+\[%r\d+\], \[%rd\d+\], 8, )%r\d+;", r"\g<1>8;", None
        ),
        "scales are another row's": planted.replaced(r"(st\.shared\.u32\s+\[%r\d+)\]", r"\1+4]", 0),
        "scales that were stored have not arrived": planted.replaced(
            r"^\s*mbarrier\.arrive\.shared::cta\.b64 _, \[%r\d+\];", "", 0
        ),
    },
    "small K, 3 to 64 channels, moments": {
        "a barrier is missing before the first tile is read": planted.without_barrier(0),
        "a barrier is missing behind a tile": planted.without_barrier(1),
        "registers of an operand change places": planted.swapped_operands(0),
        "elements behind the last one of K are not zero": planted.replaced(
            r"selp\.b32(\s+%r\d+), 0, (%r\d+), %p\d+;", r"mov.b32\1, \2;", None
        ),
        "pixels are read from another place": planted.replaced(
            r"(ld\.shared\.v2\.(?:u|b)32\s+[^\[]*\[%r\d+[^\]]*)\]", r"\1+8]", 1
        ),
        "pixels left of and above the image are read": planted.replaced(
            r"(setp\.gt\.s32\s+%p\d+, %r\d+, )-1;", r"\g<1>-2;", None
        ),
        "an accumulator is not the one before": planted.replaced(
            r"(mma\.sync[^;]*\{%f\d+, %f\d+, %f\d+, )%f\d+(\};)", r"\g<1>0f00000000\2", 5
        ),
        "shuffles read another lane": planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)4,", r"\g<1>8,", None),
        "a mean has another count": planted.replaced(r"(div\.rn\.f32\s+%f\d+, %f\d+, )%f\d+;", r"\g<1>0f42000000;", 0),
        "stores are shifted": planted.replaced(r"(st\.global\.v4\.(?:u|b)32\s+\[%rd\d+)\]", r"\1+16]", None),
    },
    "small K, 7x7, stride 2": {
        "weights are another step's": planted.replaced(
            r"(ld\.shared\.v4\.(?:u|b)32\s+[^\[]*\[%r\d+)(?:\+\d+)?\]", r"\1+1024]", 0
        ),
    },
    "small K, 48 to 21 channels, 1x1": {
        "rows are read before they are complete": planted.replaced(r"^\s*bar\.warp\.sync\s+-1;", "", 1),
        "rows are overwritten before they are read": planted.replaced(r"^\s*bar\.warp\.sync\s+-1;", "", 2),
        "pixels past the end are read": planted.replaced(
            r"min\.s32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;", None
        ),
        "rows are copied to an unaligned address": planted.replaced(
            r"(st\.global\.v4\.(?:u|b)32\s+\[%rd\d+)\]", r"\1+2]", 0
        ),
    },
    "wgrad, 16 to 16 channels, BF16": {
        "tiles are read before their copies have ended": planted.replaced(r"^\s*cp\.async\.wait_all;", "", 0),
        "a barrier is missing before the first tile is read": planted.without_barrier(0),
        "a barrier is missing behind a tile": planted.without_barrier(1),
        "registers of an operand change places": planted.swapped_operands(0),
        "pixels beside the image are not zero": planted.replaced(
            r"(cp\.async\.cg\.shared\.global\s+\[%r\d+\], \[%rd\d+\], 16, )%r\d+;", r"\g<1>16;", 0
        ),
        "an accumulator is not the one before": planted.replaced(
            r"(mma\.sync[^;]*\{%f\d+, %f\d+, %f\d+, )%f\d+(\};)", r"\g<1>0f00000000\2", 5
        ),
        "a sum of a warp is added to another": planted.replaced(r"(st\.shared\.f32\s+\[%r\d+)\+4\]", r"\1+8]", 0),
    },
    "warpgroup convolution, two sources": {
        "decoded pixels are not visible to wgmma": planted.replaced(r"^\s*fence\.proxy\.async\.shared::cta;", "", None),
        "weights are freed while they are read": planted.replaced(
            r"(wgmma\.wait_group\.sync\.aligned\s+)1;", r"\g<1>7;", 0
        ),
        "sums are read while they are written": planted.replaced(
            r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;", -1
        ),
        "sums of the first source are not waited for": planted.replaced(
            r"(wgmma\.wait_group\.sync\.aligned\s+)0;", r"\g<1>1;", 0
        ),
        "wgmma has no fence": planted.replaced(r"wgmma\.fence\.sync\.aligned;", "", 0),
        "a plane has the weights of another": planted.replaced(
            r"(cp\.async\.bulk\.tensor[^;]*\{%r\d+, )(%r\d+), (%r\d+)(\})", r"\1\2, \2\4", -1
        ),
        "fewer bytes are waited for": planted.replaced(
            r"(mbarrier\.arrive\.expect_tx[^;]*, )[^,;]+;", r"\g<1>4096;", None
        ),
        "stores are shifted": planted.replaced(r"(st\.global\.v4\.u32\s+\[%rd\d+)\]", r"\1+16]", None),
    },
    "warpgroup convolution, pairs of slices": {
        "slices are read without their padding": planted.replaced(r"_param_33\]", "_param_24]", None),
        "a slice behind the volume is read": planted.replaced(r"_param_31\]", "_param_13]", None),
        "a second slice is written that is not there": planted.replaced(r"_param_32\]", "_param_13]", None),
        "both halves of a chunk are of one slice": planted.replaced(
            r"and\.b32(\s+%r\d+, %r\d+, )1;", r"and.b32\g<1>0;", None
        ),
    },
    "warpgroup convolution, joint, moments": {
        "a tile is not transposed": planted.replaced(r"(stmatrix\.sync\.aligned\.m8n8\.x4)\.trans", r"\1", None),
        "shuffles read another lane": planted.replaced(r"shfl\.sync\.bfly", "shfl.sync.up", None),
    },
    "statistics of GroupNorm, 6 channels a group": {
        "a barrier is missing in the moments of a chunk": planted.without_barrier(0),
        "a barrier is missing before lanes are added": planted.without_barrier(1),
        "a barrier is missing in a sum over the block": planted.without_barrier(-1),
        "the variance has another count": planted.replaced(
            r"(div\.rn\.f32\s+%f\d+, %f\d+, )%f\d+;", r"\g<1>0f42000000;", -1
        ),
        "a channel is at another place of its group": planted.replaced(
            r"rem\.u32(\s+%r\d+, %r\d+, %r\d+;)", r"div.u32\1", -1
        ),
        "the root of something else": planted.replaced(r"sqrt\.rn\.f32", "rcp.rn.f32", 0),
        "a store is shifted": planted.replaced(r"(st\.global\.f32\s+\[%rd\d+)\]", r"\1+4]", -1),
    },
}


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        pytest.param(name, fault, marks=() if name == "pack rows" else pytest.mark.emulate)
        for name, faults in FAULTS.items()
        for fault in faults
    ],
)
def test_a_planted_fault_is_found(name: str, fault: str) -> None:
    (case,) = [case for case in CUDA if case.name == name]
    edited = []

    def edit(ptx: str) -> str:
        try:
            changed = FAULTS[name][fault](ptx)
        except IndexError:  # another kernel of the case
            return ptx
        edited.append(changed)
        return changed

    outcome = case.outcome(Setting(arch="sm_90" if case.family == WARPGROUP else "sm_120", edit=edit))
    assert edited
    assert not outcome.good
