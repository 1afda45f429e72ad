"""Decoded activations of eight bits in elementary operators: the numbers of the formats."""

from __future__ import annotations

import math

import pytest
import torch

from fp4deploy.formats import fake_quantize_mxfp8, quantize_fp8, quantize_int8
from fp4deploy.fusion.eight_bits import codes, mxfp8_values

QUANTIZE = {"fp8": quantize_fp8, "int8": quantize_int8}
EVERY = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)  # every number of 16 bits
AMAX = [448.0, 1.0, 3.3, 127.0, 6.1e-5, 1e4, 0.0, 2047 / 1024, 1025 / 64, 1e-9]


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Zeros of either sign are equal, and every NaN."""
    return torch.equal(found.float().nan_to_num(9e9), expected.float().nan_to_num(9e9))


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("precision", QUANTIZE)
def test_codes_of_every_number_of_16_bits(precision: str, dtype: torch.dtype, amax: float) -> None:
    expected = QUANTIZE[precision](EVERY.view(dtype), amax=torch.tensor(amax))
    found = codes(EVERY.view(dtype), float(expected.scale), precision)
    assert found.dtype == torch.bfloat16
    assert same(found, expected.codes)


@pytest.mark.parametrize("amax", AMAX)
@pytest.mark.parametrize("precision", QUANTIZE)
def test_codes_of_float32(precision: str, amax: float) -> None:
    """Numbers around every midpoint between two codes."""
    scale = float(QUANTIZE[precision](torch.tensor([amax]), amax=torch.tensor(amax)).scale)
    ties = torch.arange(-2048, 2049) / 16 * scale
    ties = torch.cat([ties, 8 * ties])
    around = [ties, *(torch.nextafter(ties, torch.full_like(ties, end)) for end in (math.inf, -math.inf))]
    x = torch.cat([*around, torch.tensor([math.inf, -math.inf, math.nan, 1e-45])])
    assert same(codes(x, scale, precision), QUANTIZE[precision](x, amax=torch.tensor(amax)).codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("shape", "axis"), [((2, 40, 5, 6), 1), ((3, 64), -1), ((5, 7, 33), -1), ((1, 1), 0)])
def test_values_of_mxfp8(shape: tuple[int, ...], axis: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))
    x.view(-1)[::71], x.view(-1)[5::97] = math.inf, math.nan
    x[-1] = 0
    found = mxfp8_values(x.to(dtype), axis)
    assert (found.dtype, found.shape) == (torch.bfloat16, x.shape)
    assert same(found, fake_quantize_mxfp8(x.to(dtype).float(), axis))


def test_values_of_mxfp8_at_the_ends_of_a_scale() -> None:
    steps = 448 * torch.exp2(torch.arange(-90.0, 100.0))
    ends = torch.cat([steps, *(torch.nextafter(steps, steps * factor) for factor in (0.5, 2.0))])
    rows = torch.cat([ends[:, None], torch.randn(len(ends), 31) * ends[:, None] / 3], 1).clamp(
        -ends[:, None], ends[:, None]
    )
    assert same(mxfp8_values(rows, -1), fake_quantize_mxfp8(rows))
    halves = EVERY.view(torch.float16).reshape(-1, 32)
    assert same(mxfp8_values(halves, -1), fake_quantize_mxfp8(halves.float()))
