"""Weight gradients of few channels on a GPU: bit-equal to the reference where sums are exact, on awkward shapes."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.graph.sizes import output_size
from fp4deploy.plugins.gemm.convolution import narrow_wgrad

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
]
SHAPES = [  # N, H, W, C; O, KH, KW; stride, padding
    ((3, 37, 61, 3), (16, 3, 3), 1, (1, 1)),
    ((2, 65, 129, 3), (64, 7, 7), 2, (3, 3)),
    ((2, 33, 70, 16), (16, 3, 3), 1, (1, 1)),
    ((2, 33, 70, 24), (21, 2, 3), 1, (0, 1)),
    ((4, 40, 50, 64), (12, 1, 1), 1, (0, 0)),
    ((1, 40, 50, 64), (32, 3, 3), 1, (1, 1)),
    ((2, 30, 44, 32), (64, 2, 2), 2, (0, 0)),
    ((16, 7, 9, 8), (100, 1, 3), 1, (0, 1)),
]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("image", "filters", "stride", "padding"), SHAPES)
def test_bits(
    image: tuple[int, ...], filters: tuple[int, ...], stride: int, padding: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    (n, h, w, channels), (outputs, kh, kw) = image, filters
    strides = (stride, stride)
    size = [output_size(*axis) for axis in zip((h, w), (kh, kw), strides, padding, (1, 1), strict=True)]
    x = (torch.randint(-4, 5, image, device="cuda") * 0.25).to(dtype)
    g = (torch.randint(-4, 5, (n, *size, outputs), device="cuda") * 0.25).to(dtype)
    torch.full((1 << 24,), float("nan"), device="cuda")  # memory that the next outputs get
    assert narrow_wgrad.supports(channels, outputs, (kh, kw), strides)
    how = ((kh, kw), strides, padding)
    dw = narrow_wgrad.wgrad(g, x, *how)
    assert torch.equal(dw, narrow_wgrad.wgrad_reference(g, x, *how))
    assert torch.equal(dw, narrow_wgrad.wgrad(g, x, *how))  # one order of sums
