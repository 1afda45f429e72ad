"""GroupNorm + ReLU in packed forms: the reference against torch, and what is asked of the kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.quantize import norm_pack
from fp4deploy.plugins.quantize.norm_pack import (
    OutputForm,
    affine,
    apply_reference,
    coefficients,
    group_moments,
    norm_relu_pack,
)
from fp4deploy.plugins.quantize.statistics import Moments

GROUPS, EPS = 8, 1e-5
EPSILON = torch.finfo(torch.float32).eps


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = (torch.randn(shape) * 3 + 1).to(dtype)
    return x, *(torch.randn(shape[-1]) for _ in range(3))


def expected(x: torch.Tensor, bias: torch.Tensor | None, weight: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    biased = x.double() if bias is None else x.double() + bias
    return F.group_norm(biased.permute(0, 3, 1, 2), GROUPS, weight.double(), beta.double(), EPS).relu()


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float16, 1e-3)])
def test_plain_forms_are_torch(with_bias: bool, dtype: torch.dtype, tolerance: float) -> None:
    x, bias, weight, beta = inputs((2, 6, 10, 24), dtype)
    shift = bias if with_bias else None
    y, pooled = norm_relu_pack(x, shift, weight, beta, GROUPS, EPS, [OutputForm(), OutputForm(pooled=True)])
    assert isinstance(y, torch.Tensor)
    assert isinstance(pooled, torch.Tensor)
    exact = expected(x, shift, weight, beta)
    assert y.dtype == pooled.dtype == dtype
    torch.testing.assert_close(y.double().permute(0, 3, 1, 2), exact, rtol=tolerance, atol=tolerance)
    assert torch.equal(pooled.permute(0, 3, 1, 2), F.max_pool2d(y.permute(0, 3, 1, 2), 2))


@pytest.mark.parametrize("channels", [16, 24])
def test_packed_forms_quantise_the_rounded_values(channels: int) -> None:
    x, bias, weight, beta = inputs((2, 4, 6, channels), torch.float16)
    one, two = torch.tensor(2.5), torch.tensor(4.0)
    outputs = [OutputForm(one), OutputForm(), OutputForm(two, pooled=True), OutputForm(pooled=True), OutputForm(two)]
    packed, y, small, pooled, again = norm_relu_pack(x, bias, weight, beta, GROUPS, EPS, outputs)
    for got, source, amax in ((packed, y, one), (small, pooled, two), (again, y, two)):
        assert isinstance(got, Nvfp4Tensor)
        reference = quantize_nvfp4(source, amax=amax)
        assert torch.equal(got.codes, reference.codes)
        assert torch.equal(got.scales.view(torch.uint8), reference.scales.view(torch.uint8))
        assert (got.shape, got.amax) == (source.shape, amax)


def test_statistics_survive_a_mean_far_from_zero() -> None:
    x, _, weight, beta = inputs((1, 31, 33, 16))
    x = x + 1000
    ab = affine(x, None, weight, beta, GROUPS, EPS)
    (y,) = apply_reference(x, ab, [OutputForm()])
    assert isinstance(y, torch.Tensor)
    torch.testing.assert_close(y.double().permute(0, 3, 1, 2), expected(x, None, weight, beta), rtol=2e-3, atol=2e-3)


def test_the_affine_map_rounds_once() -> None:
    """1 + 2^-12 times itself minus 1: the product alone would lose its last bit."""
    x = torch.full((1, 1, 1, 16), 1 + 2.0**-12)
    ab = torch.stack([torch.full((1, 16), 1 + 2.0**-12), torch.full((1, 16), -1.0)], dim=1)
    (y,) = apply_reference(x, ab, [OutputForm()])
    assert isinstance(y, torch.Tensor)
    assert y.flatten()[0].item() == 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("given", [False, True])
def test_coefficients_of_given_moments_do_not_read_the_feature_map(
    given: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _, weight, beta = inputs((2, 5, 7, 16), torch.float16)
    own, moments = Moments(torch.zeros(1), 1), Moments(torch.ones(1), 2)
    combined: list[tuple[Moments, torch.Size, int]] = []

    def combine(
        taken: Moments, shape: torch.Size, bias: object, weight: object, beta: object, groups: int, eps: float
    ) -> torch.Tensor:
        combined.append((taken, shape, groups))
        return x

    monkeypatch.setattr(norm_pack.fallback, "runs", lambda _: True)
    monkeypatch.setattr(norm_pack, "combine", combine)
    monkeypatch.setattr(norm_pack, "chunk_moments", lambda _: own)
    assert coefficients(x, None, weight, beta, 16, EPS, moments if given else None) is x
    assert combined == [(moments if given else own, x.shape, 16)]
    monkeypatch.setattr(norm_pack.fallback, "runs", lambda _: False)
    assert torch.equal(coefficients(x, None, weight, beta, 16, EPS, moments), affine(x, None, weight, beta, 16, EPS))


@pytest.mark.parametrize(("shape", "groups"), [((1, 64, 64, 16), 4), ((3, 20, 50, 24), 3), ((1, 1, 1, 8), 2)])
@pytest.mark.parametrize(("mean", "deviation"), [(0.0, 1.0), (0.01, 1.0), (1000.0, 1.0), (0.1, 0.0), (0.0, 1e-20)])
def test_moments_are_those_of_float64(shape: tuple[int, ...], groups: int, mean: float, deviation: float) -> None:
    """To a few roundings of float32: of the mean's own size, and of what it leaves of the squares."""
    for seed in range(4):
        torch.manual_seed(seed)
        x, shift = torch.randn(shape) * deviation + mean, torch.randn(shape[-1]) * deviation
        exact = (x.double() + shift.double()).flatten(1, 2).unflatten(-1, (groups, -1))
        variance, middle = torch.var_mean(exact, dim=(1, 3), correction=0)
        got = [each.double().squeeze(-1) for each in group_moments(x.flatten(1, 2), shift, groups)]
        largest = exact.abs().amax((1, 3))
        assert ((got[0] - middle).abs() <= 4 * EPSILON * largest).all()
        assert ((got[1] - variance).abs() <= 4 * EPSILON * (variance + largest * variance.sqrt()) + 1e-12).all()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_moments_of_what_is_not_finite_are_not(bad: float) -> None:
    x = torch.randn(2, 5000, 8)
    x[0, 70, 2] = bad
    mean, variance = group_moments(x, torch.zeros(8), 2)
    assert mean.isfinite().squeeze(-1).tolist() == [[False, True], [True, True]]
    assert variance.isnan().squeeze(-1).tolist() == [[True, False], [False, False]]


def test_pieces_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    x, ab = torch.randn(2, 6, 8, 16), torch.randn(2, 2, 16)
    whole = apply_reference(x, ab, [OutputForm(), OutputForm(pooled=True)])
    monkeypatch.setattr("fp4deploy.plugins.quantize.norm_pack.PIECE", 64)
    for one, other in zip(apply_reference(x, ab, [OutputForm(), OutputForm(pooled=True)]), whole, strict=True):
        assert torch.equal(one, other)


def test_a_nan_reaches_every_form() -> None:
    x, bias, weight, beta = inputs((1, 4, 4, 16))
    x[0, 1, 1, 3] = float("nan")
    outputs = [OutputForm(), OutputForm(pooled=True), OutputForm(torch.tensor(1.0))]
    for form in norm_relu_pack(x, bias, weight, beta, GROUPS, EPS, outputs):
        values = form.dequantize() if isinstance(form, Nvfp4Tensor) else form
        assert values.isnan().any()
