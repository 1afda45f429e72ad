"""Seeded faults are of today's code: `make mutants` runs them, this test only finds their places."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutation.copies import ROOT, copy_to
from tests.mutation.seeded import FAULTS


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_one_place_and_its_tests_exist(name: str) -> None:
    trial = FAULTS[name].trial()
    for argument in (each for each in trial.tests if each.startswith("tests/")):
        file, _, test = argument.partition("::")
        assert f"def {test}" in (ROOT / file).read_text(encoding="utf-8")


def test_a_copy_of_the_checkout_is_imported_in_its_place(tmp_path: Path) -> None:
    folder = copy_to(tmp_path / "copy")
    code = "import fp4deploy.cli.main; print(fp4deploy.cli.main.__file__)"
    own = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", code]  # which looks in the working directory first
    done = subprocess.run(command, env=own, cwd=folder, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()).resolve() == folder / "cli" / "main.py"
