"""The golden bytes: every case in every configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fp4deploy.formats import FourOverSix, fake_quantize_nvfp4, quantize_nvfp4

CONFIGURATIONS: dict[str, FourOverSix | None] = {"std": None} | {
    f"4o6_{metric.upper()}_{largest}_{'fast' if fast else 'strict'}": FourOverSix(metric, largest, fast)
    for metric in ("mae", "mse")
    for largest in (256, 448)
    for fast in (False, True)
}


def golden_cases(shared: Path) -> dict[str, Any]:
    cases: dict[str, Any] = json.loads((shared / "vectors" / "nvfp4_golden.json").read_text())["cases"]
    assert len(cases) == 10
    return cases


def golden_input(case: dict[str, Any]) -> torch.Tensor:
    raw = bytes.fromhex("".join(case["x_f32_hex"]))
    return torch.from_numpy(np.frombuffer(raw, "<f4").copy()).reshape(case["shape"])


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_every_case_has_the_golden_bytes(shared: Path, configuration: str) -> None:
    for name, case in golden_cases(shared).items():
        x, block = golden_input(case), "1d" if case["tile"] == [1, 16] else "2d"
        q = quantize_nvfp4(x, block, row_scaled=case["row_scaled"], four_over_six=CONFIGURATIONS[configuration])
        expected = case["expected"][configuration]
        assert q.codes.numpy().tobytes().hex() == "".join(expected["data_hex"]), name
        assert q.scales.view(torch.uint8).numpy().tobytes().hex() == "".join(expected["scale_hex"]), name
        assert q.amax.item() == case["amax"], name
        axes = (-1,) if block == "1d" else (-2, -1)
        fake, _ = fake_quantize_nvfp4(x, axes, four_over_six=CONFIGURATIONS[configuration])
        assert torch.equal(fake, q.dequantize()), name


def test_every_configuration_of_every_case_is_covered(shared: Path) -> None:
    assert all(set(case["expected"]) == set(CONFIGURATIONS) for case in golden_cases(shared).values())
