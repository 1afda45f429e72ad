"""The packing normalisation on a GPU: bitwise the reference for the kernel's own statistics."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins import KernelError, available
from fp4deploy.plugins.quantize import norm_pack
from fp4deploy.plugins.quantize.norm_pack import OutputForm, affine, apply_kernels, apply_reference, norm_relu_pack
from fp4deploy.plugins.quantize.statistics import Moments, chunk_moments, combine
from fp4deploy.plugins.runtime.fallback import Fallback

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not available(), reason="no NVIDIA GPU that kernels run on"),
]

SHAPES = [(3, 14, 18, 64), (1, 2, 2, 16), (2, 6, 4, 48), (2, 4, 6, 1024), (1, 64, 80, 128), (1, 2, 4, 2048)]
GROUPS, EPS = 8, 1e-5


def vector(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))


def feature_map(shape: tuple[int, ...], dtype: torch.dtype = torch.float16) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    return (torch.randn(shape, device="cuda", generator=generator) * 3 + 1).to(dtype)


def poison() -> None:
    torch.full((1 << 22,), float("nan"), device="cuda")


def same(got: norm_pack.FeatureMap, expected: norm_pack.FeatureMap) -> None:
    if isinstance(got, Nvfp4Tensor):
        assert isinstance(expected, Nvfp4Tensor)
        assert (got.shape, got.e4m3_max) == (expected.shape, expected.e4m3_max)
        assert torch.equal(got.codes, expected.codes)
        assert torch.equal(got.scales.view(torch.uint8), expected.scales.view(torch.uint8))
    else:
        assert isinstance(expected, torch.Tensor)
        assert torch.equal(got.nan_to_num(77), expected.nan_to_num(77))


def amax(value: float) -> torch.Tensor:
    return torch.tensor(value, device="cuda")


FORMS = {
    "packed": lambda: [OutputForm(amax(3.0))],
    "plain": lambda: [OutputForm()],
    "skip and pooled": lambda: [OutputForm(amax(3.0)), OutputForm(amax(2.0), pooled=True)],
    "all": lambda: [
        OutputForm(),
        OutputForm(amax(3.0)),
        OutputForm(pooled=True),
        OutputForm(amax(2.0), pooled=True),
        OutputForm(amax(9.0)),
    ],
    "pooled alone": lambda: [OutputForm(pooled=True)],
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_bytes_of_the_reference(shape: tuple[int, ...], dtype: torch.dtype, form: str) -> None:
    x, forms = feature_map(shape, dtype), FORMS[form]()
    bias, weight, beta = (vector(shape[-1], seed) for seed in (1, 2, 3))
    ab = combine(chunk_moments(x), x.shape, bias, weight, beta, GROUPS, EPS)
    poison()
    got = apply_kernels(x, ab, forms)
    for each, reference in zip(got, apply_reference(x, ab, forms), strict=True):
        same(each, reference)
    whole = norm_relu_pack(x, bias, weight, beta, GROUPS, EPS, forms)
    for each, again in zip(got, whole, strict=True):
        same(each, again)


@pytest.mark.parametrize("shape", [(1, 3, 5, 32), (2, 1, 1, 64), (1, 7, 9, 16)])
def test_odd_sizes_without_pooling(shape: tuple[int, ...]) -> None:
    x, forms = feature_map(shape), [OutputForm(amax(3.0)), OutputForm()]
    ab = affine(x, None, vector(shape[-1], 2), vector(shape[-1], 3), GROUPS, EPS)
    for each, reference in zip(apply_kernels(x, ab, forms), apply_reference(x, ab, forms), strict=True):
        same(each, reference)


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics(shape: tuple[int, ...]) -> None:
    x, bias = feature_map(shape), vector(shape[-1], 1)
    weight, beta = vector(shape[-1], 2), vector(shape[-1], 3)
    (y,) = norm_relu_pack(x, bias, weight, beta, GROUPS, EPS, [OutputForm()])
    assert isinstance(y, torch.Tensor)
    biased = (x.double() + bias.double()).permute(0, 3, 1, 2)
    exact = F.group_norm(biased, GROUPS, weight.double(), beta.double(), EPS).relu().permute(0, 2, 3, 1)
    assert float((y.double() - exact).norm() / exact.norm()) < 1e-3


def tiles_of(x: torch.Tensor, rows: int) -> Moments:
    """Moments of runs of `rows` pixels of the whole batch, as a convolution's tiles have them."""
    n, h, w, c = x.shape
    flat, item = x.double().reshape(-1, c), torch.arange(n * h * w, device=x.device) // (h * w)
    parts = torch.full((-(-len(flat) // rows), 2, 2, c), float("nan"), dtype=torch.float64, device=x.device)
    for tile, first in enumerate(range(0, len(flat), rows)):
        part, items = flat[first : first + rows], item[first : first + rows]
        for index, one in enumerate(items.unique()):
            pixels = part[items == one]
            parts[tile, index] = torch.stack([pixels.mean(0), (pixels - pixels.mean(0)).square().sum(0)])
    return Moments(parts.float(), rows)


@pytest.mark.parametrize("rows", [16, 100, 252])
@pytest.mark.parametrize("mean", [0.0, 1000.0])
def test_moments_of_tiles_that_touch_two_items(rows: int, mean: float) -> None:
    x = feature_map((3, 14, 18, 64), torch.bfloat16 if mean else torch.float16) + mean
    bias, weight, beta = (vector(64, seed) for seed in (1, 2, 3))
    one = combine(tiles_of(x, rows), x.shape, bias, weight, beta, GROUPS, EPS)
    exact = affine(x.double(), bias.double(), weight.double(), beta.double(), GROUPS, EPS)
    assert float((one - exact).norm() / exact.norm()) < 1e-4
    other = combine(chunk_moments(x), x.shape, bias, weight, beta, GROUPS, EPS)
    assert float((other - exact).norm() / exact.norm()) < 1e-4


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 65504.0, 6e-8])
def test_hard_values(value: float) -> None:
    x = feature_map((1, 4, 4, 32))
    x[0, 1, 2, 5] = value
    ab = torch.stack([torch.ones(1, 32, device="cuda"), torch.zeros(1, 32, device="cuda")], dim=1)
    forms = [OutputForm(amax(3.0)), OutputForm(), OutputForm(amax(3.0), pooled=True), OutputForm(pooled=True)]
    for each, reference in zip(apply_kernels(x, ab, forms), apply_reference(x, ab, forms), strict=True):
        same(each, reference)


@pytest.mark.parametrize("value", [0.0, 1e-30, 1e30])
def test_hard_scales(value: float) -> None:
    x = feature_map((2, 4, 4, 32))
    ab = torch.stack([torch.ones(2, 32, device="cuda"), torch.zeros(2, 32, device="cuda")], dim=1)
    forms = [OutputForm(amax(value)), OutputForm(amax(value), pooled=True)]
    for each, reference in zip(apply_kernels(x, ab, forms), apply_reference(x, ab, forms), strict=True):
        same(each, reference)


def test_channels_that_are_no_multiple_of_16_take_the_reference() -> None:
    x, weight, beta = feature_map((1, 4, 4, 24)), vector(24, 2), vector(24, 3)
    (got,) = norm_relu_pack(x, None, weight, beta, GROUPS, EPS, [OutputForm(amax(3.0))])
    (reference,) = apply_reference(x, affine(x, None, weight, beta, GROUPS, EPS), [OutputForm(amax(3.0))])
    same(got, reference)


def test_a_kernel_that_fails_says_so_and_falls_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise KernelError("no such instruction")

    monkeypatch.setattr(norm_pack, "apply_kernels", refuse)
    monkeypatch.setattr(norm_pack, "fallback", Fallback("GroupNorm layers of packed networks", "torch"))
    x, weight, beta = feature_map((1, 4, 4, 16)), vector(16, 2), vector(16, 3)
    with pytest.warns(UserWarning, match="fall back .* no such instruction"):
        (got,) = norm_relu_pack(x, None, weight, beta, GROUPS, EPS, [OutputForm()])
    assert isinstance(got, torch.Tensor)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (again,) = norm_relu_pack(x, None, weight, beta, GROUPS, EPS, [OutputForm()])
    same(got, again)
