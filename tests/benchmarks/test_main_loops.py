"""The model of a sub-core, by loops of which the cycles are known."""

from __future__ import annotations

import pytest

from benchmarks.main_loops import ARRIVE, BAR, LDSM, MMA_CYCLES, OMMA, Layer, Warp, cycles, executed, moved
from fp4deploy.plugins.aot.compile import triton_version
from fp4deploy.plugins.runtime.nvcc import find_nvcc
from fp4deploy_emulator.cases import block_scaled, gemms

NONE = 7 << 110 | 7 << 113  # sets no scoreboard
OTHER = 0x210


def word(operation: int, stall: int = 1, sets: int = 7, waits: int = 0) -> int:
    """An instruction, with the scoreboard that it sets and those that it waits for."""
    return operation | stall << 105 | sets << 110 | 7 << 113 | waits << 116 | (2 << 72 if operation == LDSM else 0)


MMA = word(OMMA)
LOADS = [word(LDSM, sets=0), word(OMMA, waits=1)]


@pytest.mark.parametrize(
    ("loops", "expected"),
    [
        ([[MMA, MMA]], 2 * MMA_CYCLES),
        ([[MMA, MMA], [MMA, MMA]], 4 * MMA_CYCLES),  # they share a tensor core
        ([[word(OMMA, 15), word(OTHER, 15)]], 30),
        ([[word(OMMA, 15), MMA]], 2 * MMA_CYCLES),
        ([[word(OTHER, 3), word(OTHER, 5)]], 8),
        ([[word(OTHER)] * 25] * 2, 50),  # one instruction a cycle
        ([LOADS], 1 + 15 + 30),  # 512 bytes, which take 16 cycles, and their latency; not the multiplication
        ([LOADS, LOADS], 1 + 15 + 30),  # in the time of the other one
    ],
    ids=["one warp", "two", "stalls", "both", "no multiplication", "issue", "a load", "two loads"],
)
def test_cycles_of_a_step(loops: list[list[int]], expected: int) -> None:
    assert cycles([Warp(body, block) for block, body in enumerate(loops)], 30, 20) == pytest.approx(expected, abs=2)


def test_warps_of_a_block_wait_for_each_other() -> None:
    body = [MMA, word(BAR)]
    alone = cycles([Warp(body, 0)], 30, 20)
    assert alone == pytest.approx(1 + 20, abs=2)
    assert cycles([Warp(body, 0), Warp(body, 0)], 30, 20) == pytest.approx(MMA_CYCLES + 1 + 20, abs=2)
    assert cycles([Warp(body, 0), Warp(body, 1)], 30, 20) == pytest.approx(2 * MMA_CYCLES, abs=2)


def test_a_slow_producer_is_the_limit() -> None:
    copies = [word(OTHER, 15)] * 8 + [word(ARRIVE)]
    assert cycles([Warp([MMA], 0), Warp(copies, 0, True, 4)], 30, 20) == pytest.approx(121, abs=2)
    assert cycles([Warp([MMA] * 20, 0), Warp(copies, 0, True, 4)], 30, 20) == pytest.approx(20 * MMA_CYCLES, abs=2)


def test_bytes_of_an_instruction() -> None:
    assert (moved(LOADS[0]), moved(MMA)) == (512, 0)


@pytest.mark.skipif(find_nvcc() is None or triton_version() is None, reason="there is no nvcc, or no Triton")
@pytest.mark.parametrize("kernel", ["block_scaled", "triton"])
def test_values_that_are_not_the_references_are_counted(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Layer("1x1, 64 to 64", (64,), 64, size=1)
    assert executed(layer, kernel) == {"compared": 9 * 17 * 64, "different": 0}
    for module in (block_scaled, gemms):
        right = module.conv2d_reference
        monkeypatch.setattr(module, "conv2d_reference", lambda *args, right=right, **rest: right(*args, **rest) + 1)
    assert executed(layer, kernel)["different"] > 9 * 17 * 32
