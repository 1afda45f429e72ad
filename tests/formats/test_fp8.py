"""FP8 and INT8: elements, ties and scales one by one, and the static scale's mask."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp4deploy.formats import fake_quantize_fp8, fake_quantize_int8, fp8_scale, quantize_fp8, quantize_int8
from fp4deploy.formats.fp8 import SMALLEST_SCALE


def test_ties_go_to_the_even_mantissa() -> None:
    x = torch.tensor([17.0, 19.0, 21.0, -17.0, 1.0625, 1.1875, 2.0**-10, 3 * 2.0**-10, 448.0])
    found = quantize_fp8(x, amax=torch.tensor(448.0))
    assert found.dequantize().tolist() == [16.0, 20.0, 20.0, -16.0, 1.0, 1.25, 0.0, 2.0**-8, 448.0]


def test_every_code_is_a_fixed_point() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    finite = codes[codes.float().isfinite()]
    again = quantize_fp8(finite.float(), amax=torch.tensor(448.0)).codes
    assert torch.equal(again.view(torch.uint8), finite.view(torch.uint8))


@pytest.mark.parametrize("amax", [1e-30, 1e-3, 0.0274, 1.0, 5.5, 1e4, 2.9e7])
def test_scales_are_normal_fp16_numbers(amax: float) -> None:
    scale = float(fp8_scale(torch.tensor(amax)))
    assert scale == max(float(np.float16(np.float32(amax) / np.float32(448))), SMALLEST_SCALE)
    assert scale == float(np.float16(scale))


def test_a_scale_for_each_channel() -> None:
    weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [1.0, 10, 100, 0.1]
    ).view(-1, 1, 1, 1)
    found = quantize_fp8(weight, 0)
    assert found.scale.shape == (4, 1, 1, 1)
    for channel in range(4):
        alone = quantize_fp8(weight[channel])
        assert torch.equal(found.dequantize()[channel], alone.dequantize())
    error = (found.dequantize() - weight).abs().amax((1, 2, 3)) / weight.abs().amax((1, 2, 3))
    assert error.max() < 2**-4


def test_a_static_scale_clips_and_says_where() -> None:
    x = torch.tensor([0.5, -2.0, 3.0, float("inf")])
    values, in_range = fake_quantize_fp8(x, amax=torch.tensor(2.0))
    assert in_range is not None
    assert in_range.tolist() == [True, True, False, False]
    top = 448 * float(fp8_scale(torch.tensor(2.0)))
    assert values.tolist() == [pytest.approx(0.5, rel=0.04), -top, top, top]
    assert fake_quantize_fp8(x[:3])[1] is None


def test_what_is_not_a_number_stays_none() -> None:
    assert math.isnan(float(quantize_fp8(torch.tensor([1.0, float("nan")])).dequantize()[1]))
    assert fake_quantize_fp8(torch.ones(2), amax=torch.tensor(float("nan")))[0].isnan().all()
    assert quantize_fp8(torch.zeros(3)).dequantize().tolist() == [0.0, 0.0, 0.0]


def test_int8_codes_are_those_of_onnx_one_by_one() -> None:
    """Ties go to even, both ends saturate, and a static amax clips beyond what rounds to the last code."""
    x = torch.tensor([0.5, 1.5, -2.5, 127.4, 127.6, -128.4, -128.6, 1e9, float("nan")])
    values, in_range = fake_quantize_int8(x, amax=torch.tensor(127.0))
    assert quantize_int8(x, amax=torch.tensor(127.0)).codes.tolist() == [0, 2, -2, 127, 127, -128, -128, 127, 0]
    assert values[:-1].tolist() == [0, 2, -2, 127, 127, -128, -128, 127]
    assert values[-1].isnan()
    assert in_range is not None
    assert in_range.tolist() == [True, True, True, True, False, True, False, False, False]
    weight = torch.tensor([[1.0, -2.0], [30.0, 40.0]])
    scales = quantize_int8(weight, 0).scale.flatten().tolist()
    assert scales == [float(np.float16(2 / 127)), float(np.float16(40 / 127))]
