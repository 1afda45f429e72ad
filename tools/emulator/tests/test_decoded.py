"""Convolutions with decoded weights, split-K, and moments: the PTX for SM90, executed; planted faults are found."""

from __future__ import annotations

import pytest

from fp4deploy_emulator.cases import cases, decoded
from fp4deploy_emulator.cases.case import Setting
from tools.emulator.tests import planted

pytest.importorskip("triton")

LOAD, STORE = r"ld\.global\.b32", r"st\.global\.b\d+"


def of_sum(edit: planted.Edit) -> planted.Edit:
    """An edit of the kernel that adds the parts."""
    return lambda ptx: edit(ptx) if "split_sum_kernel" in ptx else ptx


def of_parts(edit: planted.Edit) -> planted.Edit:
    """An edit of the kernel that writes them."""
    return lambda ptx: ptx if "split_sum_kernel" in ptx else edit(ptx)


FAULTS: dict[str, dict[str, tuple[planted.Edit, str]]] = {
    "decoded weights, 3x3": {
        "barriers are missing in the loop": (planted.without_first_barriers(), "race"),
        "copies are waited for too late": (planted.late_wait(0, 12), "unwaited copy"),
        "a copy of the weight is missing": (planted.without_copy(-1), "uninitialised"),
        "wgmma is not waited for": (planted.replaced(r"wgmma\.wait_group\.sync\.aligned 0;", "", None), ""),
        "registers are not fenced": (planted.replaced(r"wgmma\.fence\.sync\.aligned;", "", None), "race"),
        "the descriptor of the weight is shifted": (
            planted.replaced(
                r"(wgmma\.mma_async[^;]*\}, )(%rd\d+)(, %p[^;]*;)", r"{ .reg .b64 x; add.s64 x, \2, 1; \1x\3 }", 0
            ),
            "",
        ),
        "the mask of the stores is inverted": (planted.inverted_mask(STORE, 0), ""),
        "two registers of decoded elements change places": (
            planted.replaced(r"(wgmma\.mma_async[^;]*\}, \{)(%r\d+),(%r\d+)", r"\1\3,\2", 0),
            "",
        ),
    },
    "split-K": {
        "a part is left out": (
            of_sum(planted.replaced(r"add\.rn\.f32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;", 0)),
            "",
        ),
        "a part is read from another row": (of_sum(planted.replaced(rf"({LOAD}[^;]*\+) 0 \]", r"\1 4 ]", 17)), ""),
        "parts are read beyond the last": (
            of_sum(planted.replaced(rf"({LOAD}[^;]*\+) 0 \]", r"\1 131072 ]", None)),
            "out of bounds",
        ),
        "the mask of the loads is inverted": (of_sum(planted.inverted_mask(LOAD, 3)), ""),
        "a part has another row": (of_parts(planted.replaced(rf"({STORE} \[ %rd\d+ \+) 0 \]", r"\1 4 ]", 0)), ""),
        "a value of a part is not stored": (
            of_parts(planted.replaced(rf"^\s*@%p\d+ {STORE}[^;]*;", "", 0)),
            "decoded_conv_kernel left",
        ),
        "one split has the steps of another": (of_parts(planted.replaced(r"rem\.s32|div\.s32", "min.s32", -1)), ""),
    },
    "split-K, two sources, moments": {
        "the sources are scaled alike": (
            of_parts(planted.replaced(r"mul\.rn\.f32(\s+%r\d+), (%r\d+), %r\d+;", r"mov.b32\1, \2;", 0)),
            "",
        ),
        "a deviation is not squared": (
            of_sum(planted.replaced(r"mul\.rn\.f32(\s+%r\d+), (%r\d+), \2;", r"mov.b32\1, \2;", 0)),
            "",
        ),
        "a shuffle reads another lane": (
            of_sum(planted.replaced(r"(shfl\.sync\.bfly\.b32\s+\S+\s+\S+\s+)16,", r"\g<1>8,", 0)),
            "",
        ),
        "a barrier is missing": (of_sum(planted.without_barrier(0)), "race"),
    },
}


SM89 = ("decoded weights, 3x3", "decoded weights, dilation 2, bfloat16", "split-K, two sources, moments")


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("arch", "case"),
    [pytest.param("sm_80", case, id=f"sm_80-{case.name}") for case in decoded.CASES]
    + [pytest.param("sm_89", case, id=f"sm_89-{case.name}") for case in decoded.CASES if case.name in SM89],
)
def test_other_architectures_before_blackwell_are_bit_equal_to_the_reference(arch: str, case: decoded.Case) -> None:
    """The code for SM89 has the same kinds of instructions as that for SM80."""
    outcome = case.outcome(Setting(arch=arch))
    assert outcome.good, outcome


@pytest.mark.emulate
@pytest.mark.parametrize(("name", "fault"), [(name, fault) for name, faults in FAULTS.items() for fault in faults])
def test_a_planted_fault_is_found(name: str, fault: str) -> None:
    (case,) = cases([name], 90)[:1]
    edit, kind = FAULTS[name][fault]
    changed = []

    def apply(ptx: str) -> str:
        edited = edit(ptx)
        changed.append(edited != ptx)
        return edited

    outcome = case.outcome(Setting(arch="sm_90", edit=apply))
    assert any(changed)
    assert not outcome.good
    assert outcome.fault.startswith(kind)
