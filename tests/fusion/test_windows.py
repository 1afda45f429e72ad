"""Depthwise convolutions and maximum pooling by shifted operands against torch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.fusion.windows import depthwise_conv2d, max_pool2d

PLACES = [
    ((3, 3), (1, 1), (1, 1), (1, 1)),
    ((7, 7), (1, 1), (3, 3), (1, 1)),
    ((3, 3), (2, 2), (1, 1), (1, 1)),
    ((5, 1), (1, 2), (2, 0), (1, 1)),
    ((3, 3), (1, 1), (2, 2), (2, 2)),
    ((2, 2), (2, 2), (0, 0), (1, 1)),
    ((1, 1), (1, 1), (0, 0), (1, 1)),
]
Pair = tuple[int, int]


@pytest.mark.parametrize(("taps", "stride", "padding", "dilation"), PLACES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_depthwise(taps: Pair, stride: Pair, padding: Pair, dilation: Pair, layout: torch.memory_format) -> None:
    x, weight = torch.randn(2, 5, 9, 11).contiguous(memory_format=layout), torch.randn(5, 1, *taps)
    expected = F.conv2d(x, weight, None, stride, padding, dilation, groups=5)
    y = depthwise_conv2d(x, weight, stride, padding, dilation)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


def test_depthwise_of_float16_is_summed_in_float32() -> None:
    x, weight = torch.randn(1, 4, 6, 6).half(), torch.randn(4, 1, 3, 3).half()
    y = depthwise_conv2d(x, weight, (1, 1), (1, 1), (1, 1))
    expected = F.conv2d(x.double(), weight.double(), None, 1, 1, groups=4)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("taps", "stride", "padding", "dilation"), [each for each in PLACES if 2 * each[2][0] <= each[0][0]]
)
def test_max_pool(taps: Pair, stride: Pair, padding: Pair, dilation: Pair) -> None:
    x = torch.randn(2, 5, 9, 11)
    x[0, 1, 4, 4], x[1, 2, 0, 0] = float("nan"), -float("inf")
    expected = F.max_pool2d(x, taps, stride, padding, dilation)
    assert torch.equal(max_pool2d(x, taps, stride, padding, dilation).nan_to_num(9e9), expected.nan_to_num(9e9))
