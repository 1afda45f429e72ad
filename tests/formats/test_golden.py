"""The golden bytes: every case in every configuration."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import FourOverSix, fake_quantize_nvfp4, quantize_nvfp4
from tests.formats.golden import golden_cases, golden_input

CONFIGURATIONS: dict[str, FourOverSix | None] = {"std": None} | {
    f"4o6_{metric.upper()}_{largest}_{'fast' if fast else 'strict'}": FourOverSix(metric, largest, fast)
    for metric in ("mae", "mse")
    for largest in (256, 448)
    for fast in (False, True)
}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_case_has_the_golden_bytes(configuration: str) -> None:
    for name, case in golden_cases().items():
        x, block = golden_input(case), "1d" if case["tile"] == [1, 16] else "2d"
        q = quantize_nvfp4(x, block, row_scaled=case["row_scaled"], four_over_six=CONFIGURATIONS[configuration])
        expected = case["expected"][configuration]
        assert q.codes.numpy().tobytes().hex() == "".join(expected["data_hex"]), name
        assert q.scales.view(torch.uint8).numpy().tobytes().hex() == "".join(expected["scale_hex"]), name
        assert q.amax.item() == case["amax"], name
        axes = (-1,) if block == "1d" else (-2, -1)
        fake, _ = fake_quantize_nvfp4(x, axes, four_over_six=CONFIGURATIONS[configuration])
        assert torch.equal(fake, q.dequantize()), name


def test_every_configuration_of_every_case_is_covered() -> None:
    assert all(set(case["expected"]) == set(CONFIGURATIONS) for case in golden_cases().values())
