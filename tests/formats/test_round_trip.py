"""What a CPU multiplies is what codes and scales decode to, bit for bit."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.formats import finite_amax, quantize_nvfp4
from fp4deploy.formats.round_trip import round_trip_nvfp4
from tests.formats.hard_cases import TIES, e4m3_ties, generator, with_amax

AMAXES = (3.0, 448.0, 2688.0, 0.0, 1e-30, 1e-44, 1e30, 3e38)


def bits(x: torch.Tensor) -> torch.Tensor:
    """With the sign of zeros; all NaN are one."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def assert_same(x: torch.Tensor, amax: float) -> None:
    given = torch.tensor(amax)
    kept = x.clone().nan_to_num(7.0)
    expected, found = quantize_nvfp4(x, amax=given).dequantize(), round_trip_nvfp4(x, given)
    assert found.shape == expected.shape
    assert torch.equal(bits(found), bits(expected))
    if not (x < 0).any():
        assert torch.equal(bits(round_trip_nvfp4(x, given, rectified=True)), bits(expected))
    assert torch.equal(x.nan_to_num(7.0), kept)


def damaged(x: torch.Tensor, value: float) -> torch.Tensor:
    return torch.where(torch.rand(x.shape, generator=generator(3)) < 0.02, value, x)


@pytest.mark.parametrize("shape", [(1,), (16,), (3, 33), (2, 5, 7, 48), (0, 16), (4, 0), (40, 70, 16), (2049, 16)])
@pytest.mark.parametrize(
    "values", ["normal", "rectified", "ties", "tiny", "negative zeros", "zeros of both signs", "inf", "nan"]
)
def test_equal_to_codes_and_scales(shape: tuple[int, ...], values: str) -> None:
    x = torch.randn(shape, generator=generator())
    ties = torch.tensor(TIES)[torch.randint(len(TIES), shape, generator=generator(1))]
    cases = {"normal": x, "rectified": x.relu(), "ties": ties, "tiny": x * 1e-40, "negative zeros": -x.relu()}
    cases |= {"zeros of both signs": torch.where(x > 0.5, x, 0.0 * x)}
    cases |= {"inf": damaged(x.relu(), torch.inf), "nan": damaged(x, torch.nan)}
    for amax in (*AMAXES, finite_amax(x).item()):
        assert_same(cases[values], amax)


@pytest.mark.parametrize("sign", [1, -1])
def test_ties_of_block_scales(sign: int) -> None:
    assert_same(sign * with_amax(e4m3_ties()), 2688.0)
    assert_same(with_amax(e4m3_ties()).abs(), 2688.0)


def test_any_strides_and_dtypes() -> None:
    x = torch.randn(2, 48, 9, 7, generator=generator())
    assert_same(x.movedim(1, -1), 2.0)
    assert_same(x.half().movedim(1, -1), 2.0)
    assert_same(x.double(), 2.0)


def test_several_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fp4deploy.formats.round_trip.PIECE", 5)
    x = torch.randn(7, 32, generator=generator())
    x[6] = x[6].abs()
    assert_same(x, 2.0)
