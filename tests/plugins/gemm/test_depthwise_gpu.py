"""Depthwise convolutions on a GPU: bit-equal to the reference where sums are exact, on awkward shapes."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins.gemm.convolution import depthwise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
SHAPES = [  # N, H, W, C; taps; stride, padding, dilation
    ((1, 1, 1, 2), (3, 3), (1, 1), (1, 1), (1, 1)),
    ((2, 37, 61, 96), (7, 7), (1, 1), (3, 3), (1, 1)),
    ((8, 128, 128, 96), (7, 7), (1, 1), (3, 3), (1, 1)),
    ((3, 16, 15, 768), (7, 7), (1, 1), (3, 3), (1, 1)),
    ((2, 65, 33, 134), (5, 5), (2, 2), (2, 2), (1, 1)),
    ((1, 33, 31, 320), (3, 3), (1, 1), (6, 6), (6, 6)),
    ((2, 9, 30, 34), (1, 9), (1, 1), (0, 4), (1, 1)),
    ((1, 40, 12, 50), (9, 1), (3, 1), (0, 0), (1, 2)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bit_equal_to_the_reference(shape: tuple, dtype: torch.dtype) -> None:
    image, taps, *places = shape
    torch.manual_seed(sum(image))
    x = torch.randint(-8, 9, image, device="cuda").mul(0.25).to(dtype)
    weight = torch.randint(-8, 9, (image[-1], 1, *taps), device="cuda").mul(0.125).to(dtype)
    bias = torch.randint(-8, 9, image[-1:], device="cuda") * 0.5
    assert depthwise.supports(weight, *places, image[-1])
    for piece in depthwise.PIECES:
        if piece[0] > 1 and places[2][0] > 1:
            continue
        torch.full((1 << 26,), float("nan"), device="cuda")  # memory that the next outputs get
        y = depthwise.conv2d(x, weight, bias, *places, True, piece)
        assert torch.equal(y, depthwise.conv2d_reference(x, weight, bias, *places, True)), piece


def test_the_operator_takes_it_and_torch_what_it_does_not_take() -> None:
    for channels in (48, 7):
        x, weight = torch.randn(2, 9, 9, channels, device="cuda").half(), torch.randn(channels, 1, 5, 5, device="cuda")
        how = ([1, 1], [2, 2], [1, 1], [0, 0], channels, False, False)
        y = torch.ops.fp4deploy.convolution(x.transpose(1, 2), weight.half(), None, *how)
        wanted = depthwise.conv2d_reference(x.transpose(1, 2), weight.half(), None, (1, 1), (2, 2))
        torch.testing.assert_close(y, wanted, rtol=2e-3, atol=2e-2)
