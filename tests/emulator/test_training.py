"""The GEMMs of a training step as Blackwell would execute them, and what packs their operands: every byte."""

from __future__ import annotations

import pytest

from fp4deploy.emulator.cases.case import Case, Setting
from tests.emulator.training_cases import CASES

pytest.importorskip("triton")

FIRST = ("dgrad 3x3, stride 2", "wgrad, two splits", "packing unfolded, stochastic, RHT")  # in every run of the tests
ARCHES = ("sm_120", "sm_100", "sm_90")


def _marked(case: Case, arch: str) -> object:
    first = arch == "sm_120" and case.name in FIRST
    return pytest.param(case, arch, marks=() if first else pytest.mark.emulate, id=f"{case.name}, {arch}")


@pytest.mark.parametrize(("case", "arch"), [_marked(case, arch) for case in CASES for arch in ARCHES])
def test_bit_equal_to_the_reference(case: Case, arch: str) -> None:
    outcome = case.outcome(Setting(arch=arch))
    assert outcome.good, outcome
