"""How a small-M GEMM is divided: every part of the weight once, within the limits of the kernel and of the GPU."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import quantize_nvfp4
from fp4deploy.plugins.gemm import gemv
from fp4deploy.plugins.gemm.gemv import Variant, variant

GPUS = {
    "H200": (132, 232_448, 90),
    "B200": (148, 232_448, 100),
    "SM110": (20, 232_448, 110),
    "SM120": (188, 101_376, 120),
    "SM121": (48, 101_376, 121),
}
SIZES = [(1, 256), (40, 256), (200, 1280), (1024, 1024), (4096, 4096), (8192, 8192), (8200, 8960), (128_256, 4096)]
SIZES += [(8192, 28672), (28672, 8192)]
ROWS = [1, 2, 8, 9, 16]


def divided(rows: int, outputs: int, k: int, gpu: str) -> Variant:
    return variant(rows, outputs, k, *GPUS[gpu])


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "k"), SIZES)
def test_a_variant_fits_the_kernel_and_the_gpu(rows: int, outputs: int, k: int, gpu: str) -> None:
    """What gemv_tma.cu asserts; each consumer group has a stage that is filled while it reads another."""
    num_sms, shared, capability = GPUS[gpu]
    found = divided(rows, outputs, k, gpu)
    macros = found.macros
    held, share, stages, cluster = (macros[name] for name in ("ROWS", "OUTPUTS", "STAGES", "CLUSTER"))
    consumers = macros["CONSUMERS"]
    assert rows <= held
    assert found.outputs == share
    assert share in (16, 32, 64)
    assert stages >= 2 * consumers > 0
    assert stages % consumers == 0
    assert found.threads == 32 * (4 * consumers + 1)
    slot = -(-(288 * share + 1040 * held) // 1024) * 1024
    assert found.shared == stages * (slot + 16) <= shared
    grid = found.grid(outputs)
    assert grid % cluster == 0
    assert (grid // cluster - 1) * cluster * share < outputs <= grid * share
    if cluster > 1:
        assert held > 1
        assert capability < 120
        assert 2 * grid >= num_sms
        assert grid * share < outputs + 2 * share


@pytest.mark.parametrize(
    ("capability", "driver", "rows", "k", "expected"),
    [
        (90, True, 16, 1024, True),
        (121, True, 1, 256, True),
        (90, True, 17, 1024, False),
        (90, True, 16, 1152, False),  # 72 bytes of scales a row, not a multiple of TMA's 16
        (89, True, 16, 1024, False),
        (80, True, 1, 1024, False),
        (90, False, 16, 1024, False),  # a driver before CUDA 12.0 encodes no tensor maps
    ],
)
def test_which_gemms_it_takes(
    capability: int, driver: bool, rows: int, k: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything else runs the Triton kernel."""
    monkeypatch.setattr(gemv, "_resources", lambda _: (132, 232_448, capability))
    monkeypatch.setattr(gemv, "library", lambda: object() if driver else None)
    monkeypatch.setattr(gemv.cuda_launch, "available", lambda _: True)
    gemv._has_tma.cache_clear()
    weight = quantize_nvfp4(torch.zeros(8, k))
    assert gemv.supports(torch.zeros(rows, k, dtype=torch.float16), weight) == expected
    assert not gemv.supports(torch.zeros(rows, 2 * k, dtype=torch.float16)[:, ::2], weight)
    gemv._has_tma.cache_clear()


def test_what_was_measured_is_what_an_h200_runs() -> None:
    for rows, stages, cluster in ((1, 9, 1), (8, 6, 2), (16, 6, 2)):
        macros = divided(rows, 8192, 8192, "H200").macros
        assert macros == {"ROWS": rows, "OUTPUTS": 64, "CONSUMERS": 3, "STAGES": stages, "CLUSTER": cluster}


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_a_square_weight_keeps_an_h200_busy_in_one_wave(rows: int) -> None:
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
        assert lean.macros["CONSUMERS"] < wide.macros["CONSUMERS"]
