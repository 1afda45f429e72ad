"""Convolutions by block-scaled mma on SM120 and SM121: against the reference, in the same bits every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.plugins.gemm.reference import conv2d_reference
from fp4deploy.plugins.quantize.dispatch import quantize_nvfp4

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not block_scaled.is_available(DEVICE), reason="no GPU of SM120 or SM121"),
]
SHAPES: list[tuple[tuple[int, int, int], tuple[int, ...], int, int, int]] = [
    ((1, 1, 1), (16,), 5, 3, 1),
    ((3, 17, 33), (64,), 72, 3, 1),
    ((2, 40, 31), (32, 80), 48, 3, 1),
    ((1, 200, 160), (128, 64), 130, 3, 1),
    ((2, 65, 64), (96,), 64, 3, 2),
    ((5, 9, 70), (256,), 200, 1, 1),
    ((1, 256, 256), (256,), 256, 3, 1),
]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_convolutions(shape: Any, packed: bool) -> None:
    image, channels, outputs, k, stride = shape
    torch.manual_seed(0)
    sources = tuple(quantize_nvfp4(torch.randn(*image, count, device=DEVICE)) for count in channels)
    weight = quantize_nvfp4(torch.randn(outputs, k, k, sum(channels), device=DEVICE))
    bias = torch.randn(outputs, device=DEVICE)
    place = (stride, (k // 2, k // 2), 1, True, torch.float16)
    y = block_scaled.conv2d(sources, weight, bias, *place)
    assert isinstance(y, torch.Tensor)
    expected = conv2d_reference(sources, weight, bias, *place[:-1], torch.float32)
    assert isinstance(expected, torch.Tensor)
    assert float((y.float() - expected).norm() / expected.norm()) < 1e-3
    again = [block_scaled.conv2d(sources, weight, bias, *place) for _ in range(3)]
    assert all(isinstance(each, torch.Tensor) and torch.equal(y, each) for each in again)
    if packed:
        amax = y.abs().max().float() * 0.75
        found, quantised = block_scaled.conv2d(sources, weight, bias, *place, amax), quantize_nvfp4(y, amax=amax)
        assert isinstance(found, Nvfp4Tensor)
        assert torch.equal(found.codes, quantised.codes)
        assert torch.equal(found.scales.view(torch.uint8), quantised.scales.view(torch.uint8))
