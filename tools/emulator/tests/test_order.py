"""Hazards between lanes, proxies and the copies of a structure, each in a kernel of a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy_emulator.faults import Hazard
from fp4deploy_emulator.launch import run
from fp4deploy_emulator.ptx import parse

HEAD = """.version 8.7
.target sm_120a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
{
    .reg .b32 %r<9>;
    .reg .b64 %rd<9>;
    .shared .align 16 .b8 words[256];
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mul.lo.u32 %r2, %r1, 4;
    mov.u32 %r3, words;
    add.u32 %r4, %r3, %r2;
    xor.b32 %r5, %r2, 4;
    add.u32 %r6, %r3, %r5;
    cvt.u64.u32 %rd2, %r2;
    add.u64 %rd3, %rd1, %rd2;
"""
NEIGHBOUR = "    ld.shared.b32 %r7, [%r6];\n    st.global.b32 [%rd3], %r7;\n    ret;\n}\n"


def execute(body: str) -> torch.Tensor:
    """What 32 threads write."""
    out = torch.empty(32, dtype=torch.int32)
    run(parse(HEAD + body), (1, 1, 1), (32, 1, 1), 0, [out], [out], 120, "hardware")
    return out


def test_lanes_of_a_warp_see_each_other_after_a_barrier_of_the_warp() -> None:
    out = execute("    st.shared.b32 [%r4], %r1;\n    bar.warp.sync -1;\n" + NEIGHBOUR)
    assert np.array_equal(out.numpy(), np.arange(32) ^ 1)


@pytest.mark.parametrize("between", ["", "    shfl.sync.idx.b32 %r8, %r1, 0, 31, -1;\n"])
def test_without_a_barrier_lanes_of_a_warp_race(between: str) -> None:
    with pytest.raises(Hazard, match="race: shared memory is read"):
        execute("    st.shared.b32 [%r4], %r1;\n" + between + NEIGHBOUR)


def test_a_lane_that_overwrites_what_another_reads_is_a_race() -> None:
    with pytest.raises(Hazard, match="race: shared memory is overwritten"):
        execute(
            "    st.shared.b32 [%r4], %r1;\n    bar.warp.sync -1;\n    ld.shared.b32 %r7, [%r6];\n"
            "    st.shared.b32 [%r4], %r7;\n" + NEIGHBOUR
        )


OWN = "    st.shared.b32 [%r4], %r1;\n"
HALF = "    .reg .pred %p<2>;\n    setp.lt.u32 %p1, %r1, 16;\n"


def test_lanes_that_come_to_a_barrier_from_code_laid_out_behind_it() -> None:
    """As nvcc lays out what it takes for a rare path: the barrier waits for the lanes that are still there."""
    body = "    @%p1 bra $RARE;\n$BACK:\n    bar.sync 0;\n" + NEIGHBOUR.removesuffix("}\n")
    out = execute(HALF + OWN + body + "$RARE:\n    mov.u32 %r8, 1;\n    bra $BACK;\n}\n")
    assert np.array_equal(out.numpy(), np.arange(32) ^ 1)


def test_a_barrier_in_a_branch_that_half_a_warp_takes() -> None:
    with pytest.raises(Hazard, match="barrier: lanes wait for other lanes of their warp, which never come"):
        execute(HALF + "    @%p1 bra $OTHER;\n    bar.sync 0;\n$OTHER:\n    st.global.b32 [%rd3], %r1;\n    ret;\n}\n")


def test_a_lane_may_use_its_own_bytes_without_a_barrier() -> None:
    out = execute(
        "    st.shared.b32 [%r4], %r1;\n    ld.shared.b32 %r7, [%r4];\n    st.global.b32 [%rd3], %r7;\n    ret;\n}\n"
    )
    assert np.array_equal(out.numpy(), np.arange(32))
