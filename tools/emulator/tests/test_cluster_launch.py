"""clusterlaunchcontrol, 128-bit registers and the state of mbarrier.arrive, in a kernel of a few lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp4deploy_emulator.faults import Hazard
from fp4deploy_emulator.launch import parameters
from fp4deploy_emulator.machine import Launch, Statistics, execute
from fp4deploy_emulator.memory import GlobalMemory
from fp4deploy_emulator.ptx import parse

# Each block writes its number, and then those of the blocks whose work it takes over.
KERNEL = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
{
    .reg .pred %p<3>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 16 .b8 answer[16];
    .shared .align 8 .b8 barrier[8];
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ctaid.y;
    mov.u32 %r3, answer;
    mov.u32 %r4, barrier;
    mbarrier.init.shared::cta.b64 [%r4], 1;
LOOP:
    mad.lo.u32 %r5, %r2, 3, %r1;
    mul.wide.u32 %rd2, %r5, 4;
    add.u64 %rd2, %rd1, %rd2;
    st.global.b32 [%rd2], %r5;
    mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 16;
    clusterlaunchcontrol.try_cancel.async.shared::cta.mbarrier::complete_tx::bytes.b128 [%r3], [%r4];
WAIT:
    mbarrier.try_wait.shared.b64 %p1, [%r4], %rd3;
    @!%p1 bra WAIT;
    ld.shared.v2.b64 {%rd4, %rd5}, [%r3];
    {
    .reg .b128 %handle;
    mov.b128 %handle, {%rd4, %rd5};
    clusterlaunchcontrol.query_cancel.is_canceled.pred.b128 %p2, %handle;
    clusterlaunchcontrol.query_cancel.get_first_ctaid::x.b32.b128 %r1, %handle;
    clusterlaunchcontrol.query_cancel.get_first_ctaid.v4.b32.b128 {%r6, %r2, %r7, %r8}, %handle;
    }
    @%p2 bra LOOP;
    ret;
}
"""
LAUNCH = Launch((3, 5, 1), (1, 1, 1), 0, b"", capability=100)


def launched(ptx: str, resident: int) -> tuple[torch.Tensor, Statistics]:
    """The numbers that were written for each of 15 blocks, of which so many are launched at first."""
    out = torch.empty(15, dtype=torch.int32)
    memory, entry = GlobalMemory(), parse(ptx)
    memory.add(out, output=True)
    launch = replace(LAUNCH, parameters=parameters(entry, [out]), resident=resident)
    statistics = execute(entry, launch, memory)
    assert not memory.unwritten()
    return out, statistics


@pytest.mark.parametrize("resident", [1, 4, 0])
def test_running_blocks_take_over_the_work_of_those_that_wait(resident: int) -> None:
    out, statistics = launched(KERNEL, resident)
    assert out.tolist() == list(range(15))
    assert statistics.lines == len(parse(KERNEL).instructions)


def test_the_grid_is_not_launched_again_when_its_blocks_were_taken_over() -> None:
    _, alone = launched(KERNEL, 1)
    _, all_at_once = launched(KERNEL, 0)
    assert alone.warps < all_at_once.warps + 15 * 6  # the prologue ran once, not 15 times


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("    @!%p1 bra WAIT;\n", "", "unwaited copy"),
        ("[%r4], 16;", "[%r4], 32;", "deadlock"),
        ("mbarrier.arrive.expect_tx.shared.b64 %rd3, [%r4], 16;", "mov.b64 %rd3, 0;", "deadlock"),
        ("b128 [%r3], [%r4];", "b128 [%r3+8], [%r4];", "misaligned"),
        ("mov.b128 %handle, {%rd4, %rd5};", "", "uninitialised"),
    ],
    ids=["no wait", "too many bytes", "no arrival", "misaligned", "no handle"],
)
def test_a_fault_planted_into_the_request_is_found(old: str, new: str, kind: str) -> None:
    assert old in KERNEL
    with pytest.raises(Hazard) as found:
        launched(KERNEL.replace(old, new), 1)
    assert str(found.value).startswith(kind)


def test_a_cluster_that_was_refused_must_not_ask_again() -> None:
    again = KERNEL.replace("    st.global.b32 [%rd2], %r5;\n", "").replace("@%p2 bra LOOP", "bra LOOP")
    with pytest.raises(Hazard, match="barrier: a cluster asks for work after the answer"):
        launched(again, 1)


def test_indices_without_a_cancelled_launch_are_no_block() -> None:
    """A block that goes on with them writes outside of every tensor."""
    with pytest.raises(Hazard, match="out of bounds"):
        launched(
            KERNEL.replace("    clusterlaunchcontrol.query_cancel.is_canceled", "    //").replace("@%p2 bra", "bra"), 1
        )
