"""Work of two blocks at once, `.cta_group::2`: TMA, tcgen05.alloc, cp, mma and commit, in a kernel of a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy_emulator.accumulate import block_scaled
from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.tensor_maps import encode
from fp4deploy_emulator.launch import parameters
from fp4deploy_emulator.machine import Launch, execute
from fp4deploy_emulator.memory import GlobalMemory
from fp4deploy_emulator.ptx import parse

ROWS, COLUMNS = 256, 32

# Block r loads rows 128 r on of A and their scales, rows 16 r on of B, and half of B's scales for both blocks. The
# mbarrier of block 0 counts all of it; its thread multiplies and signals both blocks.
KERNEL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .align 64 .b8 kernel_param_0[128], .param .align 64 .b8 kernel_param_1[128],
    .param .align 64 .b8 kernel_param_2[128], .param .align 64 .b8 kernel_param_3[128], .param .u64 kernel_param_4)
{
    .reg .pred %p<5>;
    .reg .b16 %rs<2>;
    .reg .b32 %r<60>;
    .reg .b64 %rd<12>;
    .shared .align 1024 .b8 a[4096];
    .shared .align 1024 .b8 b[512];
    .shared .align 128 .b8 sa[512];
    .shared .align 128 .b8 sb[512];
    .shared .align 8 .b8 full[8];
    .shared .align 8 .b8 done[8];
    .shared .align 4 .b8 where[4];
    cvta.param.u64 %rd1, kernel_param_0;
    cvta.param.u64 %rd2, kernel_param_1;
    cvta.param.u64 %rd3, kernel_param_2;
    cvta.param.u64 %rd4, kernel_param_3;
    ld.param.u64 %rd5, [kernel_param_4];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %cluster_ctarank;
    mov.u32 %r3, a;
    mov.u32 %r4, b;
    mov.u32 %r5, sa;
    mov.u32 %r6, sb;
    mov.u32 %r7, full;
    mov.u32 %r8, done;
    mov.u32 %r9, where;
    mov.u32 %r10, 0;
    setp.eq.u32 %p1, %r1, 0;
    setp.lt.u32 %p2, %r1, 32;
    @%p1 mbarrier.init.shared::cta.b64 [%r7], 1;
    @%p1 mbarrier.init.shared::cta.b64 [%r8], 1;
    mov.u32 %r11, 32;
    mov.u32 %r12, 64;
    @%p2 tcgen05.alloc.cta_group::2.sync.aligned.shared::cta.b32 [%r9], %r12;
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.aligned;
    ld.shared.b32 %r13, [%r9];
    @!%p1 bra LOADED;
    setp.ne.u32 %p3, %r2, 0;
    @%p3 bra LOAD;
    mbarrier.arrive.expect_tx.shared.b64 _, [%r7], 11264;
LOAD:
    and.b32 %r14, %r7, 0xFEFFFFFF;
    shl.b32 %r15, %r2, 7;
    shl.b32 %r16, %r2, 4;
    shl.b32 %r17, %r2, 8;
    add.u32 %r18, %r6, %r17;
    mov.b16 %rs1, 3;
    TMA.cta_group::2 [%r3], [%rd1, {%r10, %r15}], [%r14];
    TMA.cta_group::2 [%r4], [%rd2, {%r10, %r16}], [%r14];
    TMA.cta_group::2 [%r5], [%rd3, {%r10, %r2}], [%r14];
    TMA.multicast::cluster.cta_group::2 [%r18], [%rd4, {%r10, %r2}], [%r14], %rs1;
    @%p3 bra LOADED;
FULL:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r7], 0;
    @!%p4 bra FULL;
    cvt.u64.u32 %rd6, %r3;
    shr.u64 %rd6, %rd6, 4;
    and.b64 %rd6, %rd6, 0x3FFF;
    or.b64 %rd6, %rd6, 0xC000001000010000;
    cvt.u64.u32 %rd7, %r4;
    shr.u64 %rd7, %rd7, 4;
    and.b64 %rd7, %rd7, 0x3FFF;
    or.b64 %rd7, %rd7, 0xC000001000010000;
    cvt.u64.u32 %rd8, %r5;
    shr.u64 %rd8, %rd8, 4;
    and.b64 %rd8, %rd8, 0x3FFF;
    or.b64 %rd8, %rd8, 0x0000400800000000;
    cvt.u64.u32 %rd9, %r6;
    shr.u64 %rd9, %rd9, 4;
    and.b64 %rd9, %rd9, 0x3FFF;
    or.b64 %rd9, %rd9, 0x0000400800000000;
    add.u32 %r19, %r13, 32;
    add.u32 %r20, %r13, 36;
    tcgen05.cp.cta_group::2.32x128b.warpx4 [%r19], %rd8;
    tcgen05.cp.cta_group::2.32x128b.warpx4 [%r20], %rd9;
    mov.u32 %r21, 0x10080480;
    setp.ne.u32 %p3, %r10, 0;
    MMA.collector::a::discard [%r13], %rd6, %rd7, %r21, [%r19], [%r20], %p3;
    tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %rs1;
LOADED:
    mbarrier.try_wait.parity.shared.b64 %p4, [%r8], 0;
    @!%p4 bra LOADED;
    shl.b32 %r22, %r1, 16;
    and.b32 %r22, %r22, 0x600000;
    add.u32 %r22, %r22, %r13;
    tcgen05.ld.sync.aligned.32x32b.x32.b32 {REGISTERS}, [%r22];
    tcgen05.wait::ld.sync.aligned;
    shl.b32 %r23, %r2, 7;
    add.u32 %r23, %r23, %r1;
    mul.wide.u32 %rd10, %r23, 128;
    add.u64 %rd10, %rd5, %rd10;
STORES
    barrier.cluster.arrive.aligned;
    barrier.cluster.wait.aligned;
    @%p2 tcgen05.dealloc.cta_group::2.sync.aligned.b32 %r13, %r12;
    ret;
}
"""
_NAMES = [f"%r{24 + i}" for i in range(32)]
_STORES = [f"    st.global.b32 [%rd10+{4 * i}], {name};" for i, name in enumerate(_NAMES)]
KERNEL = KERNEL.replace("TMA", "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes")
KERNEL = KERNEL.replace("MMA", "tcgen05.mma.cta_group::2.kind::mxf4nvf4.block_scale.block16")
KERNEL = KERNEL.replace("REGISTERS", ", ".join(_NAMES)).replace("STORES", "\n".join(_STORES))


def multiplied(ptx: str, cluster: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """D of a pair of blocks, and as one computation."""
    generator = np.random.default_rng(3)
    a, b = (torch.from_numpy(generator.integers(0, 256, (rows, 32), dtype=np.uint8)) for rows in (ROWS, COLUMNS))
    scales = [torch.from_numpy(generator.integers(48, 64, (rows, 4), dtype=np.uint8)) for rows in (ROWS, 128)]
    # 32 rows of 16 bytes for 128 rows of scales: row r, then r + 32, r + 64, r + 96.
    tiles = [each.view(-1, 4, 32, 4).transpose(1, 2).contiguous() for each in scales]
    out = torch.empty(ROWS, COLUMNS)
    maps = [
        encode(a.data_ptr(), (32, ROWS), (32,), (32, 128), 32),
        encode(b.data_ptr(), (32, COLUMNS), (32,), (32, 16), 32),
        encode(tiles[0].data_ptr(), (512, 2), (512,), (512, 1), 0),
        encode(tiles[1].data_ptr(), (256, 2), (256,), (256, 1), 0),
    ]
    memory, entry = GlobalMemory(), parse(ptx)
    for each in (a, b, *tiles):
        memory.add(each)
    memory.add(out, output=True)
    launch = Launch((2, 1, 1), (128, 1, 1), 0, parameters(entry, [*maps, out]), capability=100, cluster=cluster)
    execute(entry, launch, memory)
    codes = [np.stack([each & 15, each >> 4], -1).reshape(-1, 64) for each in (a.numpy(), b.numpy())]
    start = np.zeros((ROWS, COLUMNS), np.float32)
    return out.numpy(), block_scaled(*codes, scales[0].numpy(), scales[1].numpy()[:COLUMNS], start)


def test_two_blocks_multiply_256_rows() -> None:
    got, expected = multiplied(KERNEL)
    assert np.array_equal(got.view(np.uint32), expected.view(np.uint32))


MULTICAST = "complete_tx::bytes.multicast::cluster.cta_group::2 [%r18], [%rd4, {%r10, %r2}], [%r14], %rs1;"
COMMIT = "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r8], %rs1;"
FULL = KERNEL[KERNEL.index("FULL:\n") : KERNEL.index("    cvt.u64.u32 %rd6")]
CLUSTER = "    barrier.cluster.arrive.aligned;\n    barrier.cluster.wait.aligned;\n"
DONE = KERNEL[KERNEL.index("LOADED:\n    mb") + len("LOADED:\n") : KERNEL.index("    shl.b32 %r22")]


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("[%r7], 11264;", "[%r7], 5632;", "deadlock"),
        ("and.b32 %r14, %r7, 0xFEFFFFFF;", "mov.b32 %r14, %r7;", "deadlock"),
        (
            MULTICAST,
            MULTICAST.replace(".multicast::cluster", "").replace(", %rs1", ""),
            "deadlock",
        ),
        (COMMIT, COMMIT.replace(".multicast::cluster", "").replace(", %rs1", ""), "deadlock"),
        (FULL, "", "race: shared memory is read"),
        (DONE, CLUSTER, "unwaited copy: tensor memory"),
        ("    setp.lt.u32 %p2, %r1, 32;", "    sub.u32 %r12, 32, %r2;\n    setp.lt.u32 %p2, %r1, %r12;", "barrier"),
        ("mov.b16 %rs1, 3;", "mov.b16 %rs1, 7;", "out of bounds: a multicast to more blocks"),
        ("0x10080480;", "0x08080480;", "the instruction descriptor"),
        (
            "tcgen05.cp.cta_group::2.32x128b.warpx4 [%r20]",
            "tcgen05.cp.cta_group::1.32x128b.warpx4 [%r20]",
            "uninitialised",
        ),
        (".collector::a::discard [%r13]", " [%r12]", "out of bounds: tensor memory"),
    ],
    ids=[
        *(
            "half of the bytes",
            "each its own mbarrier",
            "scales for itself",
            "a commit for itself",
            "no wait for operands",
        ),
        *("no wait for the result", "a warp too few", "a third block", "128 rows", "scales of one block"),
        "another accumulator",
    ],
)
def test_a_fault_planted_into_the_pair_is_found(old: str, new: str, kind: str) -> None:
    assert old in KERNEL
    with pytest.raises((Hazard, UnknownInstruction)) as found:
        multiplied(KERNEL.replace(old, new))
    assert str(found.value).startswith(kind)


def test_a_pair_needs_a_cluster() -> None:
    with pytest.raises(Hazard, match=r"barrier|out of bounds|deadlock"):
        multiplied(KERNEL, cluster=1)
