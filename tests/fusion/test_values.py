"""Decoded values in elementary operators against codes and scales of `formats`: equal, but for the sign of a zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.formats.constants import nvfp4_range
from fp4deploy.fusion.values import EXPONENTS, scale_of, values

AMAXES = (0.0, 2.0**-100, 1e-6, 0.013, 1.0, 3.7, 448.0, 65504.0)


def in_units(q: Nvfp4Tensor, exponent: int) -> torch.Tensor:
    """What codes and scales stand for where the global scale is 2^exponent."""
    return replace(q, amax=torch.tensor(nvfp4_range() * 2.0**exponent)).dequantize()


def all_float16() -> torch.Tensor:
    """Every finite FP16 number, in blocks of neighbours and in shuffled ones."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = x[x.isfinite()]
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(3))]
    return torch.cat([x, shuffled]).view(-1, 32)


@pytest.mark.parametrize("amax", AMAXES)
def test_every_float16_number(amax: float) -> None:
    x, a = all_float16(), torch.tensor(amax)
    q = quantize_nvfp4(x, amax=a)
    assert torch.equal(values(x, scale_of(a), -1, torch.float32), q.dequantize())
    for exponent in (*EXPONENTS, -9):
        y = values(x, scale_of(a, exponent), -1, torch.float16)
        assert torch.equal(y.float(), in_units(q, exponent)), exponent


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("channels", [1, 3, 15, 16, 17, 72])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 300.0])
def test_axes_and_sizes(dtype: torch.dtype, channels: int, magnitude: float) -> None:
    x = (torch.randn(2, channels, 5, 3) * magnitude).to(dtype)
    x[0, :, 0, 0] = 0
    for layout in (torch.contiguous_format, torch.channels_last):
        for a in (x.abs().max().float(), x.abs().max().float() * 0.3):
            y = values(x.contiguous(memory_format=layout), scale_of(a), 1, torch.float32)
            assert torch.equal(y.movedim(1, -1), quantize_nvfp4(x.movedim(1, -1), amax=a).dequantize())


def test_empty() -> None:
    assert values(torch.zeros(0, 32), scale_of(torch.tensor(1.0)), -1, torch.float16).shape == (0, 32)


def test_a_damaged_block_is_nan_and_no_other() -> None:
    x = torch.randn(4, 48)
    x[0, 3], x[1, 20], x[2, 47] = float("nan"), float("inf"), -float("inf")
    y = values(x, scale_of(torch.tensor(3.0)), -1, torch.float16)
    damaged = torch.zeros(4, 3, dtype=torch.bool)
    damaged[0, 0] = damaged[1, 1] = damaged[2, 2] = True
    assert torch.equal(y.isnan(), damaged.repeat_interleave(16, 1))
