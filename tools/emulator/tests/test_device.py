"""The emulator and the GPU at hand: the same PTX, the same bytes."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.architecture import Architecture
from fp4deploy_emulator.cases import cases
from fp4deploy_emulator.cases.case import Setting

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU"),
]
EXACT = ("linear", "conv 3x3, packed output", "W4A16, K = 36", "plugin, quantiser", "pack rows", "GroupNorm and pack")
EXACT += ("decoded weights, 3x3", "split-K, two sources, moments", "statistics of GroupNorm")


def setting(**options: object) -> Setting:
    return Setting(arch=Architecture.of_device().triton_name, gpu=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*EXACT, "GEMV, 1 row"])
def test_every_byte_is_the_gpus(name: str) -> None:
    common = setting()
    case = next((case for case in cases(capability=common.capability) if case.name == name), None)
    if case is None:
        pytest.skip("this GPU has no TMA")
    outcome = case.outcome(common)
    assert outcome.good, outcome
    assert outcome.statistics.device_bytes


@pytest.mark.parametrize("name", ["linear", "W4A16, 100 rows", "split-K"])
def test_the_accumulator_is_the_gpus(name: str) -> None:
    (case,) = cases([name], setting().capability)[:1]
    hardware, exact = (case.outcome(setting(inexact=True, model=model)).statistics for model in ("hardware", "exact"))
    assert hardware.device_bytes
    assert not hardware.device_wrong
    assert exact.device_wrong
