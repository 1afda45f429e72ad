"""The GEMMs of a training step without a GPU, in Triton's interpreter, against float64."""

from __future__ import annotations

from typing import Any

import pytest

from tests.plugins.gemm import interpreted_training
from tests.plugins.gemm.test_interpreted_gemms import interpret

LIMITS = {"fp16": 6e-4, "fp32": 1e-6}


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return interpret(interpreted_training.__file__)


@pytest.mark.parametrize("name", interpreted_training.names())
def test_kernels(found: dict[str, Any], name: str) -> None:
    assert found[name]["error"] <= LIMITS.get(name.rsplit(", ", 1)[-1], 1e-6)
    assert found[name]["intact"], "written outside of the output"


def test_nothing_was_left_out(found: dict[str, Any]) -> None:
    assert sorted(found) == sorted(interpreted_training.names())
