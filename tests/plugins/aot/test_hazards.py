"""Data hazards in sm_120 machine code, where basalt-sass is installed: none in a kernel, found where one is planted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.plugins.aot import build as aot_build
from fp4deploy.plugins.aot import compile as aot_compile
from fp4deploy.plugins.runtime import cubin as cubin_reader
from tests.plugins.aot.aot_cases import product

pytestmark = [
    pytest.mark.skipif(aot_compile.triton_version() is None, reason="Triton is missing: pip install triton"),
    pytest.mark.skipif(importlib.util.find_spec("basalt") is None, reason="pip install basalt-sass"),
]
BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
STALL = 105  # first of the four bits of an instruction that say how long the next one waits
SIZE = 16  # bytes of an instruction


@pytest.fixture
def hazards(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    spec = importlib.util.spec_from_file_location("hazards", BENCHMARKS / "hazards.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    yield found.hazards
    sys.modules.pop("tiles", None)


def hurried(cubin: bytes) -> bytes:
    """The cubin with every stall of more than two cycles shortened to two."""
    code = cubin_reader._section(cubin, b".text.matmul_kernel")
    words = [int.from_bytes(code[at : at + SIZE], "little") for at in range(0, len(code), SIZE)]
    short = [word & ~(0xF << STALL) | 2 << STALL if word >> STALL & 0xF > 2 else word for word in words]
    return cubin.replace(code, b"".join(word.to_bytes(SIZE, "little") for word in short))


def test_hazards(hazards: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP4DEPLOY_CACHE", str(tmp_path))
    ((_, each),) = aot_build.build([(product(True, bm=64), "sm_120")], jobs=1)
    assert each.compiled is not None, each.failure
    found = hazards(each.compiled.cubin)
    assert found["instructions"] > 300
    assert (found["errors"], found["warnings"]) == (0, 0)
    assert hazards(hurried(each.compiled.cubin))["errors"] > 0
