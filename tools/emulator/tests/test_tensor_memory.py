"""tcgen05.cp, which no shipped kernel has: scales from shared to tensor memory, in a kernel of a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy_emulator.faults import Fault, Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.tensor_core import _sizes
from fp4deploy_emulator.launch import run
from fp4deploy_emulator.ptx import parse

# 512 bytes of shared memory as 32 rows of four words, without a swizzle: 8 rows are 128 bytes apart.
KERNEL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
{
    .reg .pred %p<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<9>;
    .shared .align 128 .b8 words[512];
    .shared .align 8 .b8 barrier[8];
    .shared .align 4 .b8 where[4];
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mul.lo.u32 %r2, %r1, 4;
    mov.u32 %r3, words;
    add.u32 %r4, %r3, %r2;
    st.shared.b32 [%r4], %r1;
    mov.u32 %r5, barrier;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r5], 1;
    mov.u32 %r6, where;
    setp.lt.u32 %p2, %r1, 32;
    @%p2 tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r6], 32;
    fence.proxy.async;
    bar.sync 0;
    ld.shared.b32 %r7, [%r6];
    cvt.u64.u32 %rd2, %r3;
    shr.u64 %rd2, %rd2, 4;
    and.b64 %rd2, %rd2, 0x3FFF;
    or.b64 %rd2, %rd2, 0x0000400800000000;
    @%p1 tcgen05.cp.cta_group::1.32x128b.warpx4 [%r7], %rd2;
    @%p1 tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r5];
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r5], 0;
    @!%p2 bra WAIT;
    shl.b32 %r8, %r1, 16;
    and.b32 %r8, %r8, 0x600000;
    add.u32 %r8, %r8, %r7;
    tcgen05.ld.sync.aligned.32x32b.x4.b32 {%r8, %r9, %r10, %r11}, [%r8];
    tcgen05.wait::ld.sync.aligned;
    mul.wide.u32 %rd3, %r1, 16;
    add.u64 %rd3, %rd1, %rd3;
    st.global.v4.b32 [%rd3], {%r8, %r9, %r10, %r11};
    bar.sync 0;
    setp.lt.u32 %p2, %r1, 32;
    @%p2 tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r7, 32;
    ret;
}
"""
WAIT = KERNEL[KERNEL.index("WAIT:") : KERNEL.index("    shl.b32 %r8")]


def execute(ptx: str) -> torch.Tensor:
    """What 128 threads found in their lanes."""
    out = torch.empty(128, 4, dtype=torch.int32)
    run(parse(ptx), (1, 1, 1), (128, 1, 1), 0, [out], [out], 100, "hardware")
    return out


def test_scales_are_copied_to_every_group_of_lanes() -> None:
    assert np.array_equal(execute(KERNEL).numpy(), np.tile(np.arange(128).reshape(32, 4), (4, 1)))


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (WAIT, "", "unwaited copy"),
        ("    fence.proxy.async;\n", "", "race"),
        ("    bar.sync 0;\n    ld.shared.b32 %r7", "    ld.shared.b32 %r7", ""),
        ("[%r6], 32;\n    fence", "[%r6], 48;\n    fence", "barrier"),
        ("0x0000400800000000", "0x0000410000000000", "out of bounds"),
        ("    st.shared.b32 [%r4], %r1;\n", "", "uninitialised"),
        ("    @%p1 tcgen05.commit", "    @!%p1 tcgen05.commit", "barrier: tcgen05.commit by another thread"),
    ],
    ids=["no wait", "no proxy fence", "no barrier", "48 columns", "another layout", "no content", "a commit by others"],
)
def test_a_fault_planted_into_a_copy_is_found(old: str, new: str, kind: str) -> None:
    assert old in KERNEL
    with pytest.raises(Hazard) as found:
        execute(KERNEL.replace(old, new))
    assert str(found.value).startswith(kind)


def test_other_shapes_are_named() -> None:
    with pytest.raises(UnknownInstruction, match=r"tcgen05\.cp\.cta_group::1\.128x256b"):
        execute(KERNEL.replace("32x128b.warpx4", "128x256b"))
    assert issubclass(UnknownInstruction, Fault)


@pytest.mark.parametrize("bit", [0, 1, 2, 3, 6, 13, 16, 31])
def test_bits_of_a_descriptor_that_mean_something_else_are_named(bit: int) -> None:
    """Bit 3 among them, which Triton sets for SM107 to multiply 128 elements at once."""
    plain = 0x8200480  # E2M1, 128 x 128
    assert _sizes(plain, (1, 1), 27, (128,)) == (128, 128)
    with pytest.raises(UnknownInstruction, match="the instruction descriptor"):
        _sizes(plain | 1 << bit, (1, 1), 27, (128,))
