"""Resizing by tables against `F.interpolate`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.fusion.resize import interpolate_linear, interpolate_nearest

CASES = [
    ((7, 9), (13, 5), None),
    ((8, 8), (16, 32), None),
    ((5, 6), None, (2.0, 2.0)),
    ((5, 7), None, (1.7, 0.6)),
    ((1, 1), (4, 4), None),
    ((6, 6), (1, 1), None),
    ((12, 10), None, (0.5, 0.25)),
    ((8, 6), None, (1.1, 1.1)),  # sizes that stay are copied
    ((8, 6), None, (1.1, 2.0)),
    ((3, 2), (123, 82), None),  # torch's step of 41 is one pixel off
]


@pytest.mark.parametrize(("source", "size", "scale"), CASES)
@pytest.mark.parametrize("corners", [False, True])
def test_bilinear(
    source: tuple[int, int], size: tuple[int, int] | None, scale: tuple[float, float] | None, corners: bool
) -> None:
    x = torch.randn(2, 3, *source)
    expected = F.interpolate(x, size, scale, "bilinear", corners)
    torch.testing.assert_close(interpolate_linear(x, size, scale, corners), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("mode", "axes"), [("linear", 1), ("trilinear", 3)])
def test_other_numbers_of_axes(mode: str, axes: int) -> None:
    x, size = torch.randn(2, 3, *(5, 4, 6)[:axes]), (7, 9, 3)[:axes]
    torch.testing.assert_close(interpolate_linear(x, size, None, False), F.interpolate(x, size, mode=mode))


@pytest.mark.parametrize(("source", "size", "scale"), CASES)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
def test_nearest(
    source: tuple[int, int], size: tuple[int, int] | None, scale: tuple[float, float] | None, mode: str
) -> None:
    x = torch.randn(2, 3, *source)
    y = interpolate_nearest(x, size, scale, mode == "nearest-exact")
    assert torch.equal(y, F.interpolate(x, size, scale, mode))


def test_float16_is_summed_in_float32() -> None:
    x = torch.randn(1, 8, 6, 6).half()
    expected = F.interpolate(x.float(), (11, 7), mode="bilinear").half()
    off = (interpolate_linear(x, (11, 7), None, False).view(torch.int16) - expected.view(torch.int16)).abs()
    assert off.max() <= 1  # the last bit of the FP32 sum
    assert off.float().mean() < 0.01
