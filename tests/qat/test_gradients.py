"""Gradients are zero where a value is clipped, do not vanish, are not biased, and are quantised as the recipe says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.formats import quantize_nvfp4, random_hadamard
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, prepare, set_products
from fp4deploy.qat.operators.quantizers import quantize_operand
from fp4deploy.qat.operators.ste import fake_quantize
from tests.qat.layer_cases import LAYERS, generator, make, quantized
from tests.samples import sample

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

TRAINING = [name for name, recipe in RECIPES.items() if not recipe.straight_through]
STATIC = [name for name, recipe in RECIPES.items() if recipe.activation and recipe.activation.scale == "static"]


def prepared(layer: nn.Module, recipe: str | Recipe) -> nn.Module:
    return quantized(layer, recipe)


def gradients(
    layer: nn.Module, recipe: str | Recipe, x: torch.Tensor, upstream: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.detach().requires_grad_()
    layer.zero_grad()
    prepared(layer, recipe)(x).backward(upstream)
    assert x.grad is not None
    assert isinstance(layer.weight.grad, torch.Tensor)
    return x.grad, layer.weight.grad.clone()


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()


def test_finite_differences_of_the_clipped_path() -> None:
    """The staircase rises like the identity over the whole range that a static amax leaves, and is flat beyond it."""
    layer = nn.Linear(16, 4, bias=False)
    model = prepared(layer, Recipe("static", QuantSpec(scale="static"))).double().eval()
    layer.input_amax.fill_(6.0)
    upstream = torch.randn(1, 4, generator=generator()).double()
    x = torch.tensor([[6.0, 0, 1.1, -1, 1.5, 2.7, -3, 4, 9, -100, 0.01, -0.5, 5.9, -6, 6.01, -7]]).double()

    def loss(i: int, value: float) -> torch.Tensor:
        moved = x.clone()
        moved[0, i] = value
        return (model(moved) * upstream).sum()

    x.requires_grad_()
    found = torch.autograd.grad((model(x) * upstream).sum(), x)[0][0]
    x = x.detach()
    for i, value in enumerate(x[0].tolist()):
        if abs(value) <= 6:
            slope = (loss(i, 6.0) - loss(i, -6.0)) / 12
        else:
            slope = (loss(i, value + 0.005) - loss(i, value - 0.005)) / 0.01
            assert slope == found[i] == 0
        torch.testing.assert_close(found[i], slope, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ["linear", "conv ragged groups", "conv reflect", "transposed"])
@pytest.mark.parametrize("recipe", STATIC)
def test_a_static_scale_clips_the_gradient_of_the_input_and_of_nothing_else(recipe: str, name: str) -> None:
    layer, x = make(name)
    model = prepared(layer, recipe).eval()
    layer.input_amax.fill_(0.5)
    y = model(x)
    y.backward(torch.randn(y.shape, generator=generator(1)))
    assert x.grad is not None
    far, near = x.detach().abs() > 1, x.detach().abs() < 0.4  # 4/6 leaves 448 / 256 of headroom above the amax
    assert (x.grad[far] == 0).all()
    assert (x.grad[near] != 0).float().mean() > 0.9
    assert (layer.weight.grad != 0).all()
    assert (layer.bias.grad != 0).all()


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize("name", sample(LAYERS, every=3))
def test_small_gradients_do_not_vanish(name: str) -> None:
    """Without a global scale everything below 6 * 2^-9 would."""
    layer, x = make(name)
    y = layer(x)
    upstream = torch.randn(y.shape, generator=generator(6))
    for recipe in TRAINING:
        for exponent in (-20, -60):  # about 1e-6 and 1e-18
            large = gradients(layer, recipe, x, upstream)
            small = gradients(layer, recipe, x, upstream * 2.0**exponent)
            for one, other in zip(large, small, strict=True):
                assert relative(other * 2.0**-exponent, one) < 1e-6, recipe
                assert one.abs().sum() > 0


@pytest.mark.parametrize("recipe", ["fp4_all_the_way", "nvfp4_train"])
def test_gradients_of_a_millionth_are_as_exact_as_others(recipe: str) -> None:
    layer, x = nn.Linear(64, 64), torch.randn(256, 64, generator=generator(1))
    upstream = torch.randn(256, 64, generator=generator(2)) * 1e-6
    dx, dw = gradients(layer, recipe, x, upstream)
    assert relative(dx, upstream @ layer.weight.detach()) < 0.25
    assert relative(dw, upstream.T @ x) < 0.25


def test_stochastic_gradients_are_right_on_average() -> None:
    """The two operands of a product draw bits of their own: shared ones would show where their elements meet."""
    torch.manual_seed(7)
    recipe = Recipe("sr", None, None, *[QuantSpec(rounding="stochastic")] * 4)
    layer, x = nn.Linear(16, 16, bias=False), torch.rand(32, 16, generator=generator(3)) * 2 - 1
    upstream = torch.rand(32, 16, generator=generator(4)) * 2 - 1
    with torch.no_grad():
        layer.weight.uniform_(-1, 1)
        for operand in (x, upstream, layer.weight):  # an amax of 1 in every block: no scale is rounded, nothing clipped
            operand[::16], operand[:, 0] = 1.0, 1.0
    runs = [gradients(layer, recipe, x, upstream) for _ in range(400)]
    for index, exact in enumerate((upstream @ layer.weight.detach(), upstream.T @ x)):
        mean = torch.stack([run[index] for run in runs]).mean(0)
        assert relative(mean, exact) < relative(runs[0][index], exact) / 8
        assert relative(mean.diag(), exact.diag()) < 0.02


def test_every_step_draws_new_bits_and_a_seed_repeats_them() -> None:
    layer, x = nn.Linear(32, 32), torch.randn(64, 32, generator=generator(5))
    upstream = torch.randn(64, 32, generator=generator(6))
    for recipe in ("tetrajet", "fp4_all_the_way", "nvfp4_train"):
        torch.manual_seed(8)
        first, second = (gradients(layer, recipe, x, upstream) for _ in range(2))
        torch.manual_seed(8)
        again = gradients(layer, recipe, x, upstream)
        for one, other, repeated in zip(first, second, again, strict=True):
            assert not torch.equal(one, other)
            assert torch.equal(one, repeated)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize("name", ["linear", "conv", "transposed"])
def test_double_quantisation_requantises_what_the_forward_quantised(name: str) -> None:
    layer, x = make(name)
    with torch.no_grad():  # blocks of unequal scale, or quantising again along another axis would find the same grid
        x *= 2.0 ** torch.randint(-3, 3, x.shape, generator=generator(1))
        layer.weight *= 2.0 ** torch.randint(-3, 3, layer.weight.shape, generator=generator(2))
    upstream = torch.randn(layer(x).shape, generator=generator(9))
    tetrajet = RECIPES["tetrajet"]
    double = gradients(layer, tetrajet, x, upstream)
    single = gradients(layer, replace(tetrajet, double_quantization=False), x, upstream)
    reused = gradients(layer, replace(tetrajet, dgrad_weight=None, wgrad_activation=None), x, upstream)
    for one, other, third in zip(double, single, reused, strict=True):
        assert not torch.equal(one, other)
        assert not torch.equal(one, third)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize("products", ["emulated", "fp4"])
def test_nvfp4_train_is_nvidias_recipe(products: str) -> None:
    """Written out for a linear layer: 1-D blocks, 16 x 16 for W, SR for G, RHT on both operands of dW, each once."""
    layer = nn.Linear(32, 48, bias=False).double()
    x, upstream = torch.randn(64, 32, generator=generator(1)), torch.randn(64, 48, generator=generator(2))
    x[:, 5] *= 30  # blocks of unequal scale, so that quantising twice or along another axis is seen
    upstream[7] *= 30
    model = set_products(prepare(nn.Sequential(layer), "nvfp4_train", include=["0"]).train(), products)
    source = x.double().requires_grad_()
    y = model(source)
    dx, dw = torch.autograd.grad(y, [source, layer.weight], upstream.double())
    weight = layer.weight.detach().float()

    def once(t: torch.Tensor, **how: Any) -> torch.Tensor:
        return quantize_nvfp4(t.contiguous(), **how).dequantize().double()

    tiles = once(weight, block="2d")
    assert torch.equal(tiles, once(weight.T, block="2d").T)  # forward and dgrad multiply with the same weights
    torch.testing.assert_close(y, once(x) @ tiles.T, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dx, once(upstream, rounding="stochastic", seed=0) @ tiles, rtol=1e-12, atol=1e-12)
    rows = once(random_hadamard(upstream.T.contiguous()), rounding="stochastic", seed=0)
    torch.testing.assert_close(dw, rows @ once(random_hadamard(x.T.contiguous())).T, rtol=1e-12, atol=1e-12)


def test_blocks_follow_the_contraction_of_each_product() -> None:
    """A column of outliers: harmless in a product that contracts along rows of its own, ruinous across."""
    torch.manual_seed(0)
    layer = nn.Linear(32, 32, bias=False)
    x = torch.ones(64, 32)
    upstream = torch.full((64, 32), 2.0**-12)
    upstream[:, 3] = 1.0
    recipe = Recipe("gradients", None, None, QuantSpec(), None, QuantSpec())
    dx, dw = gradients(layer, recipe, x, upstream)
    torch.testing.assert_close(dw, upstream.T @ x)  # blocks along tokens: the outlier's rows are its own
    assert relative(dx, upstream @ layer.weight.detach()) < 0.01
    only_small = upstream.clone()
    only_small[:, 3] = 0
    assert not torch.allclose(dx - upstream[:, 3:4] @ layer.weight.detach()[3:4], only_small @ layer.weight.detach())


def test_a_dynamic_scale_is_that_of_the_whole_operand() -> None:
    x = torch.randn(4, 32, generator=generator(10))
    x[2, 5] = 50.0
    values = fake_quantize(x, QuantSpec(), (1,))
    assert torch.equal(values, quantize_nvfp4(x).dequantize())
    assert not torch.equal(values, quantize_nvfp4(x, row_scaled=True).dequantize())
    rows = fake_quantize(x, QuantSpec(row_scaled=True), (1,))
    assert torch.equal(rows, quantize_nvfp4(x, row_scaled=True).dequantize())


@pytest.mark.parametrize(("recipe", "name"), sample(RECIPES, ["linear", "conv groups", "transposed"], every=3))
def test_gradients_of_any_layout(recipe: str, name: str) -> None:
    layer, x = make(name)
    shape = layer(x).shape
    torch.manual_seed(1)
    whole = gradients(layer, recipe, x, torch.full(shape, 0.75))
    torch.manual_seed(1)
    expanded = gradients(layer, recipe, x, torch.tensor(0.75).expand(shape))
    torch.manual_seed(1)
    turned = gradients(layer, recipe, x, torch.full(shape[::-1], 0.75).permute(*reversed(range(len(shape)))))
    for one, *others in zip(whole, expanded, turned, strict=True):
        for other in others:
            assert relative(other, one) < 1e-6


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_train", "tetrajet"])
def test_only_what_wants_a_gradient_gets_one(recipe: str) -> None:
    layer, x = make("conv")
    layer.weight.requires_grad_(False)
    prepared(layer, recipe)(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    layer, x = make("conv")
    prepared(layer, recipe)(x.detach()).sum().backward()
    assert layer.weight.grad is not None
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_a_non_finite_gradient_is_seen() -> None:
    layer, x = make("linear")
    upstream = torch.ones(37, 32)
    upstream[5, 7] = torch.inf
    for recipe in TRAINING:
        dx, dw = gradients(layer, recipe, x, upstream)
        assert not dx.isfinite().all(), recipe
        assert not dw.isfinite().all(), recipe


@pytest.mark.parametrize("recipe", ["nvfp4_train", "quartet_2", "tetrajet", "nvfp4_forward_rht"])
def test_an_amax_that_was_found_before_changes_no_number(recipe: str) -> None:
    """Nor does it clip gradients; another amax does, where the format has a global scale of the values."""
    spec, x = RECIPES[recipe].activation, torch.randn(4, 48, generator=generator())
    assert spec is not None
    expected, _ = quantize_operand(x, spec, (-1,))
    values, mask = quantize_operand(x, spec, (-1,), own=x.abs().max())
    assert mask is None
    assert torch.equal(values, expected)
    other, _ = quantize_operand(x, spec, (-1,), own=3 * x.abs().max())
    assert torch.equal(other, expected) == (recipe in ("tetrajet", "nvfp4_forward_rht"))
