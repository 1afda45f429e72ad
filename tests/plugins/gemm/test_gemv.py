"""How products of a few rows are divided: every part of the weight once, within what the kernel and a GPU take."""

from __future__ import annotations

import pytest

from fp4deploy.plugins.gemm.gemv import PIECE, Variant, variant

OLDER = {"A100": (108, 166_912, 80), "L40": (142, 101_376, 89)}
NEWER = {
    "H200": (132, 232_448, 90),
    "B200": (148, 232_448, 100),
    "SM110": (20, 232_448, 110),
    "SM120": (188, 101_376, 120),
    "SM121": (48, 101_376, 121),
}
SIZES = [(1, 128), (40, 128), (200, 1152), (1024, 1024), (4096, 4096), (8192, 8192), (8200, 8832), (128_256, 4096)]
SIZES += [(8192, 28672), (28672, 8192)]
ROWS = [1, 2, 8, 9, 16]


def divided(rows: int, outputs: int, k: int, gpu: str) -> Variant:
    return variant(rows, outputs, k, *(OLDER | NEWER)[gpu])


@pytest.mark.parametrize("gpu", OLDER)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "k"), SIZES)
def test_weight_only_takes_it(rows: int, outputs: int, k: int, gpu: str) -> None:
    _, shared, _ = OLDER[gpu]
    found = divided(rows, outputs, k, gpu)
    macros = found.macros
    assert found.name == "weight_only"
    assert rows <= macros["ROWS"]
    assert found.threads == 32 * macros["WARPS"]
    assert found.outputs == 16 * macros["BANDS"] * macros["WARPS"] // macros["SPLIT"]
    assert macros["WARPS"] % macros["SPLIT"] == 0
    assert found.threads % (16 * macros["ROWS"]) == 0
    assert k % (PIECE * macros["DEPTH"]) == 0
    assert found.room is not None
    assert found.room >= macros["SPLIT"]
    assert found.room % macros["SPLIT"] == 0
    ring = macros["STAGES"] * macros["WARPS"] * 1152 * macros["BANDS"] * macros["DEPTH"]
    assert found.shared == ring + found.room * macros["DEPTH"] * 256 * macros["ROWS"] <= shared
    assert (found.grid(outputs) - 1) * found.outputs < outputs <= found.grid(outputs) * found.outputs


@pytest.mark.parametrize("gpu", NEWER)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "k"), [size for size in SIZES if size[1] % 256 == 0])
def test_gemv_tma_takes_it(rows: int, outputs: int, k: int, gpu: str) -> None:
    """What gemv_tma.cu asserts and asks for; each team has a stage that is filled while it reads another."""
    processors, shared, capability = NEWER[gpu]
    found = divided(rows, outputs, k, gpu)
    macros = found.macros
    held, share, teams, stages, cluster = (macros[name] for name in ("ROWS", "OUTPUTS", "TEAMS", "STAGES", "CLUSTER"))
    assert found.name == "gemv_tma"
    assert found.room is None
    assert rows <= held
    assert found.outputs == share
    assert share in (16, 32, 64)
    assert stages >= 2 * teams > 0
    assert stages % teams == 0
    assert found.threads == 32 * (4 * teams + 1)
    slot = -(-(288 * share + 1040 * held) // 1024) * 1024
    assert found.shared == stages * (slot + 16) <= shared
    grid = found.grid(outputs)
    assert grid % cluster == 0
    assert (grid // cluster - 1) * cluster * share < outputs <= grid * share
    if cluster > 1:
        assert held > 1
        assert capability < 120
        assert 2 * grid >= processors
        assert grid * share < outputs + 2 * share


@pytest.mark.parametrize("gpu", NEWER)
@pytest.mark.parametrize("rows", ROWS)
def test_rows_of_scales_that_are_not_aligned(rows: int, gpu: str) -> None:
    for outputs, k in SIZES:
        assert divided(rows, outputs, k, gpu).name == ("weight_only" if k % 256 else "gemv_tma")


def test_what_was_measured_is_what_an_h200_runs() -> None:
    for rows, stages, cluster in ((1, 9, 1), (8, 6, 2), (16, 6, 2)):
        macros = divided(rows, 8192, 8192, "H200").macros
        assert macros == {"ROWS": rows, "OUTPUTS": 64, "TEAMS": 3, "STAGES": stages, "CLUSTER": cluster}


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_square_weight_keeps_an_h200_busy_in_one_turn(rows: int) -> None:
    for size in (4096, 8192):
        assert 120 <= divided(rows, size, size, "H200").grid(size) <= 132


def test_a_small_weight_is_divided_into_small_blocks() -> None:
    for rows in ROWS:
        assert divided(rows, 1024, 1024, "H200").grid(1024) == 64
        assert divided(rows, 40, 4096, "H200").macros["CLUSTER"] == 1


def test_less_shared_memory_means_fewer_stages() -> None:
    for rows in ROWS:
        wide, lean = (divided(rows, 8192, 8192, gpu) for gpu in ("B200", "SM120"))
        assert lean.shared <= 101_376 < wide.shared
        assert lean.macros["STAGES"] < wide.macros["STAGES"]
        assert lean.macros["TEAMS"] < wide.macros["TEAMS"]


def test_activations_that_do_not_fit_are_read_in_parts() -> None:
    room = divided(16, 8192, 28672, "A100").room
    assert room is not None
    assert room * PIECE < 28672
