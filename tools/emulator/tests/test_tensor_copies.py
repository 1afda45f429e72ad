"""im2col copies by TMA, stores by TMA and bulk groups, in a kernel of a few lines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from fp4deploy_emulator.faults import Hazard
from fp4deploy_emulator.instructions.tensor_maps import encode
from fp4deploy_emulator.launch import run
from fp4deploy_emulator.ptx import parse

CHANNELS, PIXELS, SIZE = 32, 24, (2, 5, 6)  # images, height, width

# Pixels of a padded image under one tap of a filter; the threads add 1 to each byte; the result is stored.
KERNEL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .align 64 .b8 kernel_param_0[128], .param .align 64 .b8 kernel_param_1[128])
{
    .reg .pred %p<3>;
    .reg .b16 %rs<3>;
    .reg .b32 %r<12>;
    .reg .b64 %rd<4>;
    .shared .align 128 .b8 rows[768];
    .shared .align 8 .b8 barrier[8];
    cvta.param.u64 %rd1, kernel_param_0;
    cvta.param.u64 %rd2, kernel_param_1;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, rows;
    mov.u32 %r3, barrier;
    mov.u32 %r9, 0;
    setp.eq.u32 %p1, %r1, 0;
    @%p1 mbarrier.init.shared::cta.b64 [%r3], 1;
    bar.sync 0;
    mov.b16 %rs1, 2;
    mov.b16 %rs2, 1;
    mov.u32 %r4, 3;
    mov.u32 %r5, -1;
    @%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r3], 768;
    @%p1 cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes
        [%r2], [%rd1, {%r9, %r4, %r5, %r9}], [%r3], {%rs1, %rs2};
WAIT:
    mbarrier.try_wait.parity.shared.b64 %p2, [%r3], 0;
    @!%p2 bra WAIT;
    mul.lo.u32 %r6, %r1, 4;
    add.u32 %r6, %r2, %r6;
    ld.shared.b32 %r7, [%r6];
    add.u32 %r7, %r7, 0x01010101;
    st.shared.b32 [%r6], %r7;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%p1 bra DONE;
    mov.u32 %r8, 4;
    mov.u32 %r10, 1;
    cp.async.bulk.tensor.4d.global.shared::cta.im2col_no_offs.bulk_group [%rd2, {%r9, %r8, %r10, %r9}], [%r2];
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
DONE:
    bar.sync 0;
    st.shared.b32 [%r6], %r1;
    ret;
}
""".replace("bytes\n        [", "bytes [")


def im2col(tensor: torch.Tensor, lower: Sequence[int], upper: Sequence[int], step: int = 1) -> bytes:
    """The tensor map of [N, H, W, C] bytes: rows of all channels of `PIXELS` pixels. Corners: width, height."""
    n, h, w, c = tensor.shape
    strides = [tensor.stride(axis) for axis in (2, 1, 0)]
    return encode(tensor.data_ptr(), (c, w, h, n), strides, (c,), 0, lower, upper, (1, step, step, 1), PIXELS)


def copied(ptx: str, step: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """The image, and what was stored to a tensor of zeros."""
    x = torch.randint(0, 250, (*SIZE, CHANNELS), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    out = torch.zeros_like(x)
    maps = [im2col(x, (-1, -1), (-1, -1), step), im2col(out, (0, 0), (0, 0))]
    run(parse(ptx), (1, 1, 1), (192, 1, 1), 0, maps, [], 100, "hardware", [x, out])
    return x, out


@pytest.mark.parametrize("step", [1, 2])
def test_pixels_of_a_padded_image_are_gathered_and_stored(step: int) -> None:
    """As torch would: pad, take every `step`-th pixel under the tap, run through the images, store from a pixel on."""
    x, out = copied(KERNEL, step)
    padded = torch.nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
    under_tap = padded[:, 1 : 1 + SIZE[1] : step, 2 : 2 + SIZE[2] : step].reshape(-1, CHANNELS)
    columns = -(-SIZE[2] // step)
    first = 4 // step  # from the corner at -1 to 3
    expected = torch.zeros(SIZE[0] * SIZE[1] * SIZE[2], CHANNELS, dtype=torch.uint8)
    gathered = under_tap[first : first + PIXELS]
    gathered = torch.cat([gathered, gathered.new_zeros(PIXELS - len(gathered), CHANNELS)]) + 1
    assert columns > first
    start = SIZE[2] + 4
    expected[start : start + PIXELS] = gathered
    assert torch.equal(out.view(-1, CHANNELS), expected)


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("    @!%p2 bra WAIT;\n", "", "unwaited copy"),
        ("    fence.proxy.async.shared::cta;\n", "", "race: shared memory is read by the asynchronous proxy without"),
        ("async.shared::cta;\n    bar.sync 0;\n", "async.shared::cta;\n", "race"),
        ("    cp.async.bulk.wait_group.read 0;\n", "", "unwaited copy: a block ends"),
        ("    cp.async.bulk.commit_group;\n", "", "unwaited copy: a block ends"),
        ("wait_group.read 0;", "wait_group.read 1;", "unwaited copy: a block ends"),
        ("DONE:\n    bar.sync 0;\n", "DONE:\n", "race"),
        ("mov.u32 %r5, -1;", "mov.u32 %r5, -2;", "out of bounds"),
        ("global.im2col.mb", "global.tile.mb", "barrier: a tensor copy of mode tile"),
        ("[%rd1, {%r9, %r4, %r5, %r9}]", "[%rd1, {%r9, %r4, %r5}]", "barrier: a tensor copy of 3 axes"),
        ("[%r3], 768;", "[%r3], 640;", "deadlock"),
        ("cvta.param.u64 %rd1, kernel_param_0;", "mov.b64 %rd1, 4096;", "out of bounds: a tensor map that is not"),
    ],
    ids=[
        *("no wait", "no proxy fence", "no barrier", "no wait for the store", "no commit", "a wait for too few"),
        *("changed too early", "outside of the box", "another mode", "axes missing", "fewer bytes", "no tensor map"),
    ],
)
def test_a_fault_planted_into_the_copies_is_found(old: str, new: str, kind: str) -> None:
    assert old in KERNEL
    with pytest.raises(Hazard) as found:
        copied(KERNEL.replace(old, new))
    assert str(found.value).startswith(kind)


def test_a_source_that_is_overwritten_before_it_was_read_is_a_race() -> None:
    wait = "    cp.async.bulk.wait_group.read 0;\n"
    late = KERNEL.replace(wait, "").replace("    ret;", f"    @!%p1 bra END;\n{wait}END:\n    ret;")
    with pytest.raises(Hazard, match="race: shared memory is read, and the write before it may still come"):
        copied(late)
