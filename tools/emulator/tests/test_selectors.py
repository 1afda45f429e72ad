"""Selectors of block scales from registers, mma.sync with kind::mxf4nvf4 (SM120), in a kernel of a few lines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.launch import run
from fp4deploy_emulator.ptx import parse

# All elements are 1, so that D is 16 times the sums of products of scales: each lane holds scales of its own.
KERNEL = """.version 8.7
.target sm_120a
.address_size 64
.visible .entry kernel(.param .u64 kernel_param_0)
{
    .reg .b16 %rs<4>;
    .reg .b32 %r<14>;
    .reg .b64 %rd<4>;
    ld.param.u64 %rd1, [kernel_param_0];
    mov.u32 %r1, %tid.x;
    mov.b32 %r2, 0x22222222;
    mov.b32 %r3, 0;
    and.b32 %r4, %r1, 7;
    shl.b32 %r4, %r4, 3;
    add.u32 %r4, %r4, 0x38383838;
    mov.b32 %r5, 0x38383838;
    mov.b16 %rs1, 0;
    mov.b16 %rs2, 1;
    mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3
        {%r6, %r7, %r8, %r9}, {%r2, %r2, %r2, %r2}, {%r2, %r2}, {%r3, %r3, %r3, %r3}, %r4, {%rs1, %rs2}, %r5, {%rs1, 0};
    mul.wide.u32 %rd2, %r1, 16;
    add.u64 %rd2, %rd1, %rd2;
    st.global.v4.b32 [%rd2], {%r6, %r7, %r8, %r9};
    ret;
}
""".replace("ue4m3\n        ", "ue4m3 ")


def multiplied(ptx: str) -> np.ndarray:
    """The fragments of a warp, float32 [32, 4]."""
    out = torch.empty(32, 4)
    run(parse(ptx), (1, 1, 1), (32, 1, 1), 0, [out], [out], 120, "hardware")
    return out.numpy()


def test_a_selector_in_a_register_is_the_constant() -> None:
    constants = KERNEL.replace("{%rs1, %rs2}", "{0, 1}").replace("{%rs1, 0}", "{0, 0}")
    assert np.array_equal(multiplied(KERNEL), multiplied(constants))
    other = KERNEL.replace("mov.b16 %rs2, 1;", "mov.b16 %rs2, 0;")
    assert np.array_equal(multiplied(other), multiplied(constants.replace("{0, 1}", "{0, 0}")))
    assert not np.array_equal(multiplied(other), multiplied(KERNEL))


@pytest.mark.parametrize(
    ("new", "kind", "error"),
    [
        ("mov.b16 %rs2, 2;", "barrier: the byte id is 0", Hazard),
        ("cvt.u16.u32 %rs2, %r1;", "barrier: the threads of a warp select different scales", Hazard),
        ("", "uninitialised", Hazard),
    ],
    ids=["a third pair of lanes", "each lane another", "no selector"],
)
def test_a_fault_planted_into_a_selector_is_found(new: str, kind: str, error: type[Exception]) -> None:
    with pytest.raises(error) as found:
        multiplied(KERNEL.replace("mov.b16 %rs2, 1;", new))
    assert str(found.value).startswith(kind)


def test_a_constant_that_is_none_is_named_before_anything_runs() -> None:
    with pytest.raises(UnknownInstruction, match="the byte id is 0"):
        multiplied(KERNEL.replace("{%rs1, %rs2}", "{0, 2}"))
