"""GroupNorm + ReLU of float32 on a CPU: near float64, wherever the mean is."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.plugins.quantize import norm_float32
from fp4deploy.plugins.quantize.norm_float32 import norm_relu

GROUPS, EPS = 4, 1e-5


def exact(x: torch.Tensor, bias: torch.Tensor, weight: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    biased = (x.double() + bias).permute(0, 3, 1, 2)
    return F.group_norm(biased, GROUPS, weight.double(), beta.double(), EPS).relu().permute(0, 2, 3, 1)


@pytest.mark.parametrize("mean", [0.0, 1.0, 2.9, 8.0, 1000.0])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (1, 6, 6, 64), (2, 24, 24, 16), (1, 96, 96, 16), (1, 176, 240, 8)])
def test_off_by_a_few_roundings(shape: tuple[int, ...], mean: float) -> None:
    """Some roundings of the deviations, plus what the rounding of x itself leaves of them."""
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(shape) + mean
        bias, weight, beta = (torch.randn(shape[-1]) for _ in range(3))
        (y,) = norm_relu(x, bias, weight, beta, GROUPS, EPS)
        expected = exact(x, bias, weight, beta)
        largest = expected.max().item()
        assert (y - expected).abs().max().item() <= (2e-6 + 4e-7 * mean) * max(1.0, largest)


def test_pieces_of_any_size_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, beta, bias = torch.randn(2, 8, 10, 16), torch.randn(16), torch.randn(16), torch.randn(16)
    whole = norm_relu(x, bias, weight, beta, GROUPS, EPS, [False, True])
    monkeypatch.setattr(norm_float32, "PIECE", 500)
    for one, other in zip(norm_relu(x, bias, weight, beta, GROUPS, EPS, [False, True]), whole, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
        assert one.is_contiguous()
        assert other.is_contiguous()


def test_pooled_is_the_maximum_of_what_is_not() -> None:
    x, weight, beta = torch.randn(2, 6, 8, 16), torch.randn(16), torch.randn(16)
    y, pooled, again = norm_relu(x, None, weight, beta, GROUPS, EPS, [False, True, False])
    assert torch.equal(pooled.permute(0, 3, 1, 2), F.max_pool2d(y.permute(0, 3, 1, 2), 2))
    assert torch.equal(again, y)


@pytest.mark.parametrize("pixels", [4, 200])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_in_its_group(pixels: int, bad: float) -> None:
    x, weight, beta = torch.randn(2, pixels, pixels, 16), torch.ones(16), torch.zeros(16)
    x[0, 1, 2, 5] = bad
    (y,) = norm_relu(x, None, weight, beta, GROUPS, EPS)
    damaged = y.isnan().flatten(1, 2).unflatten(-1, (GROUPS, -1)).any(1).any(-1)
    assert damaged.tolist() == [[False, True, False, False], [False] * GROUPS]


@pytest.mark.parametrize("shape", [(0, 4, 4, 16), (1, 0, 4, 16)])
def test_nothing_to_normalise(shape: tuple[int, ...]) -> None:
    (y,) = norm_relu(torch.zeros(shape), None, torch.ones(16), torch.zeros(16), GROUPS, EPS)
    assert y.shape == shape
