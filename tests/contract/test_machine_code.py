"""A sample of the kernels has the machine code that was recorded; `machine_code.py --check` compares all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract import internals, machine_code

NVCC, TRITON = internals.nvcc(), internals.triton_version()
RECORDED = machine_code.recorded()


def unknown(before: list[str], now: list[str]) -> list[str]:
    """Compiled kernels whose digest was not recorded."""
    known = {line.partition(" ")[0] for line in before}
    return [line for line in now if line.partition(" ")[0] not in known]


@pytest.mark.skipif(NVCC is None, reason="no nvcc here")
@pytest.mark.parametrize("arch", [pytest.param("sm_90a", marks=pytest.mark.variants), "sm_120a"])
def test_a_kernel_of_nvcc(arch: str, tmp_path: Path) -> None:
    assert NVCC is not None
    version = internals.nvcc_version(NVCC)
    if version not in RECORDED["nvcc"]:
        pytest.skip(f"no machine code of nvcc {version} was recorded")
    with internals.empty_cache(tmp_path):
        now = machine_code.nvcc_digests({arch: [internals.smallest_cuda_variant(arch)]}, 1)[arch]
    assert now
    assert unknown(RECORDED["nvcc"][version][arch], now) == []


@pytest.mark.skipif(TRITON is None, reason="no Triton here")
def test_a_kernel_of_triton(tmp_path: Path) -> None:
    if TRITON not in RECORDED["triton"]:
        pytest.skip(f"no machine code of Triton {TRITON} was recorded")
    before = RECORDED["triton"][TRITON]
    first = machine_code.some_launches("sm_120", before["stride"])[:1]
    with internals.empty_cache(tmp_path):
        now = machine_code.triton_digests({"sm_120": first}, 1)["sm_120"]
    assert now
    assert unknown(before["digests"]["sm_120"], now) == []


def test_the_comparison_counts_equal_kernels() -> None:
    before = ["a first", "a second", "b third"]
    assert machine_code.gone(before, ["a x", "a y", "b z", "c new"]) == []
    assert machine_code.gone(before, ["a x", "b z"]) == ["a second"]
    assert machine_code.gone(before, []) == before
