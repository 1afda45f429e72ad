"""Faults planted into instructions with UE8M0 scales: MXFP4 of training GEMMs, half a register or word of scales each;
MXFP8 of W4A8 and the 1 of FP8, a byte.
"""

from __future__ import annotations

import pytest

from fp4deploy_emulator.cases import cases
from fp4deploy_emulator.cases.case import Setting
from tools.emulator.tests import planted

pytest.importorskip("triton")

REGISTERS = r"(mma\.sync[^;]*\}, %r\d+, )\{ 0, 0 \}(, %r\d+, )\{ 0, 0 \};"
SCALES = r"(tcgen05\.mma[^;]*\[ )(%r\d+)( \+ 0 \], \[ )(%r\d+)( \+ 0 \], %p)"
FAULTS = {
    ("sm_120", "dgrad 3x3, MXFP4"): {
        "the scales of A and B change places": planted.swapped_scales(0),
        "the scales of A are the upper half": planted.replaced(REGISTERS, r"\1{ 2, 0 }\2{ 0, 0 };", 0),
        "registers of a fragment are swapped": planted.swapped_operands(0),
        "the scales of B are the upper half": planted.replaced(REGISTERS, r"\1{ 0, 0 }\2{ 2, 0 };", 0),
        "barriers are missing in the loop": planted.without_first_barriers(),
    },
    ("sm_120", "W4A8 conv 3x3, stride 2"): {
        "the scales of A and B change places": planted.swapped_scales(0),
        "the scales of A are the next byte": planted.replaced(REGISTERS, r"\1{ 1, 0 }\2{ 0, 0 };", 0),
        "registers of a fragment are swapped": planted.swapped_operands(0),
        "1/2 is a subnormal number of E4M3": planted.replaced("0x3C383000", "0x3C380400", 0),
        "codes have the byte of their neighbour": planted.replaced("0x4420", "0x4402", 0),
        "no code has a sign": planted.replaced("0x80808080", "0", 0),
        "barriers are missing in the loop": planted.without_first_barriers(),
    },
    ("sm_120", "FP8 conv 3x3, stride 2"): {
        "a block scale is 2": planted.replaced(r"(mov\.b32\s+%r\d+, 12)7;", r"\g<1>8;", 0),
        "the scales of A are the next byte": planted.replaced(REGISTERS, r"\1{ 1, 0 }\2{ 0, 0 };", 0),
        "registers of a fragment are swapped": planted.swapped_operands(0),
        "the weight's scales are those of other channels": planted.other_offset(r"ld\.global\.b32", 4, 1),
        "copies are not waited for": planted.late_wait(),
        "barriers are missing in the loop": planted.without_first_barriers(),
    },
    ("sm_100", "W4A8 conv 3x3, stride 2"): {
        "the scales of A are those of B": planted.replaced(SCALES, r"\1\4\3\4\5", 0),
        "the second half has the scales of the first": planted.replaced(r"681574416;", "144703488;", 0),
        "halves of a register go to one column": planted.replaced(r"\.unpack::16b", "", 0),
        "stores of scales are not waited for": planted.replaced(r"tcgen05\.wait::st\.sync\.aligned;", "", None),
    },
    ("sm_100", "FP8 conv 3x3, stride 2"): {
        "a block scale is 2": planted.replaced(r"2139062143;", "2139062144;", 0),
        "scales that nobody has stored": planted.replaced(r"681574416;", "1218445312;", 0),
        "A and B change places": planted.replaced(
            r"(tcgen05\.mma[^;]*\[ %r\d+ \+ 0 \], )(%rd\d+), (%rd\d+)", r"\1\3, \2", 0
        ),
        "the product is not waited for": planted.replaced(r"^\s*@%p\d+ tcgen05\.commit[^;]*;", "", 0),
        "stores to shared memory are not seen by the tensor core": planted.replaced(
            r"^\s*fence\.proxy\.async[^;]*;", "", 0
        ),
    },
    ("sm_100", "wgrad, MXFP4"): {
        "the scales of A are those of B": planted.replaced(SCALES, r"\1\4\3\2\5", 0),
        "the second half has the scales of the first": planted.replaced(r"1218446496;", "144704640;", 0),
        "the first half has the scales of the second": planted.replaced(r"144704640;", "1218446496;", 0),
        "the scales of A are read from other columns": planted.replaced(
            r"(tcgen05\.mma[^;]*\[ %r\d+ \+ )0( \], \[ %r\d+ \+ 0 \], %p)", r"\g<1>8\2", 0
        ),
        "stores of scales are not waited for": planted.replaced(r"tcgen05\.wait::st\.sync\.aligned;", "", None),
    },
}


@pytest.mark.emulate
@pytest.mark.parametrize(
    ("arch", "name", "fault"), [(*key, fault) for key, faults in FAULTS.items() for fault in faults]
)
def test_a_planted_fault_is_found(arch: str, name: str, fault: str) -> None:
    (case,) = cases([name])
    outcome = case.outcome(Setting(arch=arch, edit=FAULTS[arch, name][fault]))
    assert not outcome.good
    assert outcome.wrong or outcome.fault
