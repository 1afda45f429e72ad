"""Triton's kernels without a GPU, in Triton's interpreter: near float64, and between guards.

A process runs those of a module (`tests.plugins.interpreter`). `interpreted_gemms` runs the GEMM kernels themselves,
tile by tile; `interpreted_cases` runs them from `dispatch`, as a caller on a GPU does; `interpreted_training` has the
GEMMs of a training step, `interpreted_decoded` the convolutions with decoded weights, `interpreted_plugins` what
TensorRT runs.
`make test` goes through a sample of `dispatch` alone: it executes the same kernels as PTX in the emulator, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.plugins.gemm import interpreted_cases, interpreted_decoded, interpreted_gemms, interpreted_training
from tests.plugins.tensorrt import interpreted_plugins, plugin_cases
from tests.samples import sample

LIMIT, LIMIT_BFLOAT16 = 6e-4, 5e-3  # the interpreter truncates where a GPU rounds to bfloat16
LIMITS_TRAINING = {"fp16": LIMIT, "fp32": 1e-6}
Results = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Callable[[ModuleType], Results]:
    """What the cases of a module gave; each module is run once, of `interpreted_cases` those that are tested."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton's interpreter comes with Triton: pip install triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    root = Path(__file__).resolve().parents[2]
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment.get("PYTHONPATH", "")])
    environment.pop("FP4DEPLOY_KERNELS", None)
    tested = [each for each in request.session.items if isinstance(each, pytest.Function) and hasattr(each, "callspec")]
    names = [each.callspec.params["name"] for each in tested if each.function is test_dispatch_reaches_the_kernels]
    environment["INTERPRETED_CASES"] = json.dumps(names)

    @cache
    def run(module: ModuleType) -> Results:
        command = [sys.executable, "-m", "tests.plugins.interpreter", module.__name__]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
        assert done.returncode == 0, done.stderr
        found: Results = json.loads(done.stdout)[module.__name__]
        return found

    return run


@pytest.mark.emulate
@pytest.mark.parametrize("name", interpreted_gemms.names())
def test_gemms(results: Callable[[ModuleType], Results], name: str) -> None:
    found = results(interpreted_gemms)[name]
    assert found["error"] <= (LIMIT_BFLOAT16 if "bfloat16" in name else LIMIT)
    assert found["intact"], "written outside of the output"
    assert found["differing"] == 0, "bytes of the fused quantisation"


@pytest.mark.parametrize("name", sample(interpreted_cases.CASES, every=6))
def test_dispatch_reaches_the_kernels(results: Callable[[ModuleType], Results], name: str) -> None:
    found = results(interpreted_cases)[name]
    assert found["launches"] >= 1
    for what, value, limit in found["facts"]:
        assert value <= limit, f"{what}: {value} (NaN: shapes differ or a NaN was left)"


@pytest.mark.emulate
@pytest.mark.parametrize("name", interpreted_training.names())
def test_training(results: Callable[[ModuleType], Results], name: str) -> None:
    found = results(interpreted_training)[name]
    assert found["error"] <= LIMITS_TRAINING.get(name.rsplit(", ", 1)[-1], 1e-6)
    assert found["intact"], "written outside of the output"


@pytest.mark.emulate
@pytest.mark.parametrize("name", interpreted_decoded.CASES)
def test_decoded(results: Callable[[ModuleType], Results], name: str) -> None:
    found, case = results(interpreted_decoded)[name], interpreted_decoded.CASES[name]
    assert found["error"] <= LIMIT
    assert found["differing"] == 0, "bytes of the fused quantisation"
    assert found["moments"] <= 1e-5
    assert found["launches"] == (2 if case.splits > 1 else 1)


@pytest.mark.emulate
@pytest.mark.parametrize("name", interpreted_plugins.names())
def test_plugins(results: Callable[[ModuleType], Results], name: str) -> None:
    found = results(interpreted_plugins)[name]
    assert found["differing"] == 0
    assert found.get("error", 0.0) < plugin_cases.LIMIT


@pytest.mark.emulate
def test_codes_pass_from_plugin_to_plugin(results: Callable[[ModuleType], Results]) -> None:
    found = results(interpreted_plugins)[interpreted_plugins.CHAIN]
    assert found["differing"] < 0.01
    assert found["error"] < 0.02


@pytest.mark.emulate
@pytest.mark.parametrize("module", [interpreted_decoded, interpreted_gemms, interpreted_plugins, interpreted_training])
def test_nothing_was_left_out(results: Callable[[ModuleType], Results], module: ModuleType) -> None:
    names = [*module.names()] if hasattr(module, "names") else [*module.CASES]
    chain = [interpreted_plugins.CHAIN] if module is interpreted_plugins else []
    assert sorted(results(module)) == sorted([*names, *chain])
