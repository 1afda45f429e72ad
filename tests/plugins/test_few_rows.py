"""How products of a few rows are divided: every part of the weight once, within what the kernel and a GPU take."""

from __future__ import annotations

import pytest

from fp4deploy.plugins.few_rows import PIECE, Variant, variant

GPUS = {"A100": (108, 166_912, 80), "L40": (142, 101_376, 89), "H200": (132, 232_448, 90), "B200": (148, 232_448, 100)}
SIZES = [(1, 128), (40, 128), (1024, 1024), (4096, 4096), (8192, 8192), (8192, 28672), (28672, 8192), (128_256, 4096)]


def divided(rows: int, outputs: int, k: int, gpu: str) -> Variant:
    processors, shared, capability = GPUS[gpu]
    return variant(rows, outputs, k, processors, shared, capability)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("rows", [1, 2, 8, 9, 16])
@pytest.mark.parametrize(("outputs", "k"), SIZES)
def test_the_kernel_takes_it(rows: int, outputs: int, k: int, gpu: str) -> None:
    _, shared, capability = GPUS[gpu]
    found = divided(rows, outputs, k, gpu)
    macros = found.macros
    assert rows <= macros["ROWS"]
    assert capability >= 90 or macros["CLUSTER"] == 1
    assert found.outputs == 16 * macros["BANDS"] * macros["WARPS"] // macros["SPLIT"]
    assert macros["WARPS"] % macros["SPLIT"] == 0
    assert found.outputs % macros["CLUSTER"] == 0
    assert 32 * macros["WARPS"] % (16 * macros["ROWS"]) == 0
    assert k % (PIECE * macros["DEPTH"]) == 0
    assert found.room >= macros["SPLIT"]
    assert found.room % macros["SPLIT"] == 0
    ring = macros["STAGES"] * macros["WARPS"] * 1152 * macros["BANDS"] * macros["DEPTH"]
    assert found.shared == ring + found.room * macros["DEPTH"] * 256 * macros["ROWS"] <= shared
    grid = found.grid(outputs)
    assert grid % macros["CLUSTER"] == 0
    assert (grid // macros["CLUSTER"] - 1) * found.outputs < outputs <= grid // macros["CLUSTER"] * found.outputs


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_square_weight_keeps_an_h200_busy_in_one_turn(rows: int) -> None:
    for size in (4096, 8192):
        assert 120 <= divided(rows, size, size, "H200").grid(size) <= 132


def test_more_rows_share_a_block_of_more_outputs() -> None:
    outputs = [divided(rows, 8192, 8192, "H200").outputs for rows in (1, 8, 16)]
    assert outputs == sorted(outputs)
    assert outputs[0] < outputs[-1]


def test_activations_that_do_not_fit_are_read_in_parts() -> None:
    assert divided(16, 8192, 28672, "A100").room * PIECE < 28672
    assert divided(8, 8192, 8192, "H200").room * PIECE * 2 >= 8192
