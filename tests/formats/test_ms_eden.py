"""MS-EDEN against its formula, written out in float64; unbiased, and with half the error of stochastic rounding."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import decode_e2m1, quantize_ms_eden, quantize_nvfp4, rotate, unpack_codes
from fp4deploy.formats.philox import random_bytes

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
R = 17 / 16 * 0.93


def sylvester(size: int) -> torch.Tensor:
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    return h


def nearest(values: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
    return grid[(values.unsqueeze(-1) - grid).abs().argmin(-1)]


def squared_error(found: torch.Tensor, x: torch.Tensor) -> float:
    return (((found - x) ** 2).sum() / (x**2).sum()).item()


def test_the_rotation_is_hadamards_with_signs() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    signs = 1 - 2 * (random_bytes(torch.Size((128,)), 0, 9, 1) & 1).double()
    expected = (x.double().unflatten(1, (2, 128)) * signs) @ sylvester(128) / math.sqrt(128)
    assert torch.allclose(rotate(x, 9).double(), expected.flatten(1), atol=1e-6)
    assert 40 < (signs > 0).sum() < 88
    assert torch.allclose(rotate(rotate(x, 9), 9, inverse=True), x, atol=1e-6)
    a, b = x[:, :100], torch.randn(5, 100)
    assert torch.allclose(rotate(a, 4) @ rotate(b, 4).T, a @ b.T, atol=1e-4)


def test_codes_and_scales_follow_the_formula() -> None:
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)) * torch.logspace(-1, 1, 6).unsqueeze(1)
    found = quantize_ms_eden(x, rotation=3, seed=8)
    y = rotate(x, 3).double()
    blocks = y.unflatten(1, (2, 8, 16))
    largest = y.abs().max()
    d8 = nearest(blocks.abs().amax(-1) * 256 / largest, E4M3)
    step = d8 * largest * R / (6 * 256)
    q = nearest((blocks / step.unsqueeze(-1)).abs().nan_to_num(0), E2M1) * blocks.sign()
    values = decode_e2m1(unpack_codes(found.codes)).double().view(blocks.shape)
    assert (values != q).double().mean() < 1e-3  # ties and their neighbours
    assert q.abs().max() == 6
    c = (blocks**2).sum((2, 3)) / (blocks * values * step.unsqueeze(-1)).sum((2, 3))
    corrected = d8 * c.unsqueeze(-1)
    scales = found.scales.double().view(d8.shape)
    place = torch.bucketize(corrected, E4M3, right=True)
    below, above = E4M3[place - 1], E4M3[place.clamp(max=126)]
    assert ((scales == below) | (scales == above)).all()
    up = random_bytes(y.shape, -1, 8)[..., ::16].view(d8.shape).double() / 256 < (corrected - below) / (above - below)
    assert ((scales == above) == up).double().mean() > 0.98
    assert found.amax.item() == pytest.approx(largest.item() * R)
    assert (scales <= 448).all()


def test_unbiased_with_half_the_error_of_stochastic_rounding() -> None:
    x = torch.randn(32, 256, generator=torch.Generator().manual_seed(2))
    draws = [rotate(quantize_ms_eden(x, 2 * i, 7 * i + 1).dequantize(), 2 * i, inverse=True) for i in range(60)]
    single = sum(squared_error(draw, x) for draw in draws) / len(draws)
    mean = squared_error(torch.stack(draws).mean(0), x)
    assert mean < 1.3 * single / len(draws)  # independent errors with mean zero
    stochastic = squared_error(quantize_nvfp4(x, rounding="stochastic", seed=1).dequantize(), x)
    assert single < 0.55 * stochastic


def test_what_is_not_a_number_shows_and_zeros_stay() -> None:
    zeros = quantize_ms_eden(torch.zeros(2, 130), 1, 2)
    assert not zeros.dequantize().any()
    assert not zeros.amax.signbit()
    assert not zeros.dequantize().signbit().any()
    x = torch.randn(2, 256)
    x[0, 5] = torch.inf
    values = quantize_ms_eden(x, 1, 2).dequantize()
    assert values[0, :128].isnan().all()
    assert values[1].isfinite().all()
    assert quantize_ms_eden(x.T, 1, 2, axis=0).shape == (2, 256)
    with pytest.raises(InputError, match="floating-point"):
        quantize_ms_eden(torch.ones(4, dtype=torch.int32), 1, 2)
