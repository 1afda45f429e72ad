"""The list of cases: every kernel is in it, and the recorded run had all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.plugins.aot import store
from fp4deploy.plugins.gemm.convolution.block_scaled import ARCHITECTURES
from fp4deploy.plugins.runtime import nvcc
from fp4deploy_emulator.cases import cases
from fp4deploy_emulator.cases.decoded import before_blackwell

FILES = ("emulated_h200", "emulated_cpu")  # with a GPU beside the emulator, which is of SM90, and without
CAPABILITIES = (90, 100, 120)
BEFORE_BLACKWELL = {"decoded_conv_kernel", "split_sum_kernel", "direct_conv", "warpgroup_conv"}
CUDA_ENTRY = re.compile(r"__global__ void\s+(?:__\w+__\((?:[^()]|\([^()]*\))*\)\s*)*(\w+)\(")
TRITON_ENTRY = re.compile(r"^def (\w+_(?:kernel|entry))\(", re.MULTILINE)


def entries() -> set[str]:
    """Names of all kernels in the sources."""
    triton = Path(store.__file__).parents[1] / "gemm" / "triton"
    found = {name for file in nvcc.sources() for name in CUDA_ENTRY.findall(file.read_text(encoding="utf-8"))}
    return found | {
        name for file in triton.glob("*.py") for name in TRITON_ENTRY.findall(file.read_text(encoding="utf-8"))
    }


def recorded(capability: int) -> list[dict[str, Any]]:
    """The cases of an architecture in the results that the documentation shows."""
    contents = (Path(f"benchmarks/results/{name}.json").read_text(encoding="utf-8") for name in FILES)
    return [row for text in contents for row in json.loads(text)["cases"] if row["for"] == f"sm_{capability}"]


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_was_executed(capability: int) -> None:
    ran = {name for row in recorded(capability) for name in row["entries"]}
    lacking = set[str]() if before_blackwell(capability) else BEFORE_BLACKWELL
    lacking = lacking if capability in ARCHITECTURES else lacking | {"block_scaled_conv"}
    assert entries() - ran == lacking, "python benchmarks/emulated.py NAME --add --json FILE executes a new case"


@pytest.mark.parametrize("capability", [100, 120])
def test_every_case_was_executed_and_bit_equal(capability: int) -> None:
    rows = recorded(capability)
    assert {case.name for case in cases(capability=capability)} == {row["kernel"] for row in rows}
    for row in rows:
        assert row["compared"], row["kernel"]
        assert (row["different"], row["hazard"], row["unavailable"]) == (0, "", ""), row["kernel"]
