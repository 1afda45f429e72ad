"""Seeded faults are of today's code: `make mutants` runs them, this test only finds their places."""

from __future__ import annotations

import pytest

from tests.mutation.copies import ROOT
from tests.mutation.seeded import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_place_and_its_tests_exist(name: str) -> None:
    trial = FAULTS[name].trial()
    for argument in (each for each in trial.tests if each.startswith("tests/")):
        file, _, test = argument.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")
