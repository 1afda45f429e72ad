"""FP16 convolutions in one order of the sum, against torch; `fp4deploy_emulator.cases.plain` has the kernels."""

from __future__ import annotations

import pytest
import torch

from fp4deploy.plugins.gemm.convolution import plain

PLACES = {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("places", [{}, PLACES], ids=["plain", "stride, padding, dilation"])
def test_reference(places: dict[str, tuple[int, int]]) -> None:
    x, weight, bias = draw(2, 7, 9, 3).half(), draw(5, 3, 2, 3, seed=1).half(), draw(5, seed=2)
    y = plain.conv2d_reference(x, weight, bias, **places, relu=True)
    wanted = torch.nn.functional.conv2d(
        x.double().permute(0, 3, 1, 2), weight.double().permute(0, 3, 1, 2), bias.double(), **places
    )
    torch.testing.assert_close(y.double(), wanted.relu().permute(0, 2, 3, 1), rtol=1e-3, atol=1e-5)
