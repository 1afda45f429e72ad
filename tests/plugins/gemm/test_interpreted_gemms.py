"""The Triton GEMM kernels without a GPU, in Triton's interpreter, against float64.

`interpreted_gemms` runs the kernels themselves, tile by tile and between guards; `interpreted_cases` runs them from
`dispatch`, as a caller on a GPU does. Each is one process: TRITON_INTERPRET counts when Triton is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.gemm import interpreted_cases, interpreted_gemms

LIMIT, LIMIT_BFLOAT16 = 6e-4, 5e-3  # the interpreter truncates where a GPU rounds to bfloat16


def interpret(script: str | None) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton's interpreter comes with Triton: pip install triton")
    assert script is not None
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[3]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    environment.pop("FP4DEPLOY_KERNELS", None)
    command = [sys.executable, "-m", "tests.plugins.interpreter", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    results: dict[str, Any] = json.loads(done.stdout)
    return results


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    return interpret(interpreted_gemms.__file__)


@pytest.fixture(scope="module")
def public() -> dict[str, Any]:
    return interpret(interpreted_cases.__file__)


@pytest.mark.parametrize("name", interpreted_gemms.names())
def test_kernels(kernels: dict[str, Any], name: str) -> None:
    found = kernels[name]
    assert found["error"] <= (LIMIT_BFLOAT16 if "bfloat16" in name else LIMIT)
    assert found["intact"], "written outside of the output"
    assert found["differing"] == 0, "bytes of the fused quantisation"


@pytest.mark.parametrize("name", interpreted_cases.CASES)
def test_dispatch_reaches_the_kernels(public: dict[str, Any], name: str) -> None:
    assert public[name]["launches"] >= 1
    for what, value, limit in public[name]["facts"]:
        assert value <= limit, f"{what}: {value} (NaN: shapes differ or a NaN was left)"


def test_nothing_was_left_out(kernels: dict[str, Any], public: dict[str, Any]) -> None:
    assert sorted(kernels) == sorted(interpreted_gemms.names())
    assert sorted(public) == sorted(interpreted_cases.CASES)
