"""A learned amax: values as of a static one, gradients, what the optimiser moves; recipes by modifier; percentiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import fake_quantize_nvfp4
from fp4deploy.models import ModelCard, build_unet, load_weights, save_checkpoint
from fp4deploy.qat import (
    RECIPES,
    QuantSpec,
    Recipe,
    calibrate,
    calibrate_percentile,
    find_recipe,
    load_model,
    prepare,
    quantized_layers,
    restore,
    round_to_deployed,
)
from fp4deploy.qat.operators.learned import fake_quantize_learned, keep_positive

STATIC = QuantSpec(scale="static")


def operand(channels: int = 48) -> torch.Tensor:
    x = torch.randn(2, channels, 3, 4, generator=torch.Generator().manual_seed(0))
    x[0, 3, 1, 1] = 9.0
    x[1, channels - 1, 2, 2] = -7.0
    return x


@pytest.mark.parametrize("channels", [48, 40])
def test_the_values_are_those_of_a_static_amax(channels: int) -> None:
    x, amax = operand(channels), torch.tensor(2.0)
    expected, inside = fake_quantize_nvfp4(x, (1,), amax)
    learned = fake_quantize_learned(x, STATIC, 1, amax.clone().requires_grad_())
    assert torch.equal(learned, expected)
    x.requires_grad_()
    fake_quantize_learned(x, STATIC, 1, amax.clone().requires_grad_()).sum().backward()
    assert torch.equal(x.grad, inside.to(x.dtype))


@pytest.mark.parametrize(("channels", "groups"), [(48, 1), (40, 1), (40, 2)])
def test_the_gradient_of_the_amax_is_that_of_clipped_blocks(channels: int, groups: int) -> None:
    """Element by element from the definition; blocks of one group do not reach into the next."""
    x, upstream = operand(channels), torch.randn(2, channels, 3, 4, generator=torch.Generator().manual_seed(1))
    amax = torch.tensor(1.5, requires_grad=True)
    quantized = fake_quantize_learned(x, STATIC, 1, amax, groups)
    quantized.backward(upstream)
    total, width = 0.0, channels // groups
    for n, c, h, w in torch.cartesian_prod(*(torch.arange(size) for size in x.shape)).tolist():
        start = c // width * width + c % width // 16 * 16
        block = x[n, start : min(start + 16, (c // width + 1) * width), h, w]
        if block.abs().max() <= 1.5:
            continue
        value, q = x[n, c, h, w].item(), quantized[n, c, h, w].item()
        slope = q / 1.5 if abs(value) > 1.5 else (q - value) / 1.5
        assert abs(value) <= 1.5 or abs(slope) == pytest.approx(1, rel=1e-6)
        total += slope * upstream[n, c, h, w].item()
    assert amax.grad.item() == pytest.approx(total / x.numel() ** 0.5, rel=1e-4)


def test_the_gradient_agrees_with_what_the_clipped_elements_do() -> None:
    """Where everything is clipped, the output is +-A, and a finite difference sees the derivative."""
    x = torch.full((1, 16, 1, 1), 5.0)
    amax = torch.tensor(2.0, requires_grad=True)
    fake_quantize_learned(x, STATIC, 1, amax).sum().backward()
    with torch.no_grad():
        up, down = (fake_quantize_learned(x, STATIC, 1, torch.tensor(a)).sum() for a in (2.25, 1.75))
    assert amax.grad.item() * 16**0.5 == pytest.approx(((up - down) / 0.5).item(), rel=1e-3)


def test_nothing_beyond_the_amax_means_no_gradient() -> None:
    amax = torch.tensor(20.0, requires_grad=True)
    fake_quantize_learned(operand(), STATIC, 1, amax).sum().backward()
    assert amax.grad.item() == 0


def test_a_layer_learns_its_amax_and_nothing_else_moves_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 2, 1))
    prepare(model, "nvfp4_qat+learned")
    images = torch.randn(2, 3, 8, 8)
    calibrate_percentile(model, [images], 90.0)
    (layer,) = quantized_layers(model).values()
    assert isinstance(layer.input_amax, nn.Parameter)
    assert set(dict(model.named_parameters())) == {
        *(f"{n}.{p}" for n in "012" for p in ("weight", "bias")),
        "1.input_amax",
    }
    before = layer.input_amax.item()
    model.train()(images).square().sum().backward()
    assert layer.input_amax.item() == before
    assert layer.input_amax.grad.item() != 0
    torch.optim.SGD([layer.input_amax], lr=1e9).step()
    keep_positive([layer.input_amax])
    assert layer.input_amax.item() > 0
    model.eval()(images)
    restore(model)
    assert not any(name.endswith("input_amax") for name in model.state_dict())


def test_a_learned_checkpoint_deploys_as_a_static_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    card = ModelCard("nvfp4", 0.125, ("a", "b"), 32, 32, (0.0,) * 3, (1.0,) * 3, False, "nvfp4_qat+learned")
    model, images = prepare(build_unet(2, 0.125), "nvfp4_qat+learned"), torch.randn(1, 3, 32, 32)
    calibrate_percentile(model, [images], 99.0)
    save_checkpoint(tmp_path / "learned.safetensors", model, card)
    loaded, _ = load_model(tmp_path / "learned.safetensors")
    static = prepare(build_unet(2, 0.125), "nvfp4_qat").eval()
    load_weights(static, tmp_path / "learned.safetensors")
    round_to_deployed(static)
    for layer, other in zip(quantized_layers(loaded).values(), quantized_layers(static).values(), strict=True):
        assert not layer.input_amax.requires_grad
        assert layer.input_amax.item() == pytest.approx(other.input_amax.item(), rel=1e-6)
    with torch.no_grad():
        assert torch.equal(loaded(images), static(images))


@pytest.mark.parametrize("percentile", [50.0, 99.0, 100.0])
def test_a_percentile_is_what_so_many_magnitudes_do_not_exceed(percentile: float) -> None:
    model = nn.Sequential(nn.Identity(), nn.Linear(64, 64))
    prepare(model, "nvfp4_qat", include=["1"])
    batches = [torch.randn(50, 64, generator=torch.Generator().manual_seed(n)) * (n + 1) for n in range(3)]
    calibrate_percentile(model, batches, percentile)
    expected = max(batch.abs().flatten().quantile(percentile / 100).item() for batch in batches)
    (layer,) = quantized_layers(model).values()
    assert layer.input_amax.item() == pytest.approx(expected, rel=1e-5)
    assert not layer._forward_pre_hooks


def test_a_percentile_of_zeros_keeps_the_largest_magnitude() -> None:
    model = prepare(nn.Sequential(nn.Linear(64, 64)), "nvfp4_qat", include=["0"])
    batch = torch.zeros(10, 64)
    batch[0, 0] = 3.0
    calibrate_percentile(model, [batch], 90.0)
    assert next(iter(quantized_layers(model).values())).input_amax == 3.0
    with pytest.raises(InputError, match="valid values lie above 0, up to 100"):
        calibrate_percentile(model, [batch], 0.0)


def test_modifiers_change_the_activation_scale_alone() -> None:
    plain, dynamic = find_recipe("nvfp4_4o6_qat"), find_recipe("nvfp4_4o6_qat+dynamic")
    assert dynamic.name == "nvfp4_4o6_qat+dynamic"
    assert dynamic.weight == plain.weight
    assert (dynamic.activation.scale, dynamic.activation.four_over_six) == ("dynamic", plain.activation.four_over_six)
    assert find_recipe("nvfp4_qat+delayed").amax_timing == "delayed"
    assert find_recipe("nvfp4_qat_delayed+static").amax_timing == "current"
    assert find_recipe("nvfp4_qat_2d+learned").amax_learned
    assert "learned" in str(find_recipe("nvfp4_qat+learned"))
    assert "+" not in "".join(RECIPES)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nvfp4_qat+dynamc", r"Did you mean 'dynamic'\? A name may end in: \+static"),
        ("nvfp4_qta+dynamic", "Did you mean 'nvfp4_qat'"),
        ("fp4_all_the_way+learned", "straight through"),
        ("mx_baseline+static", "mxfp4"),
    ],
)
def test_wrong_modifiers(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        find_recipe(name)


def test_a_learned_amax_needs_a_static_scale() -> None:
    with pytest.raises(InputError, match="amax_learned is of an activation with a static scale"):
        Recipe("mine", QuantSpec(), QuantSpec(), amax_learned=True)


def test_all_layers_quantised_survive_a_checkpoint(tmp_path: Path) -> None:
    """The card says which layers were chosen; without it the first and the last would be loaded as FP16."""
    torch.manual_seed(0)
    images = torch.randn(1, 3, 32, 32)
    model = prepare(build_unet(2, 0.125), "nvfp4_qat", include=["*"])
    calibrate(model, [images])
    card = ModelCard("nvfp4", 0.125, ("a", "b"), 32, 32, (0.0,) * 3, (1.0,) * 3, False, "nvfp4_qat", include=("*",))
    assert ModelCard.from_json(card.to_json()) == card
    save_checkpoint(tmp_path / "all.safetensors", model, card)
    loaded, read = load_model(tmp_path / "all.safetensors")
    assert read.include == ("*",)
    assert list(quantized_layers(loaded)) == list(quantized_layers(model))
    assert {"encoder.0.conv1", "head"} <= quantized_layers(loaded).keys()


def test_a_percentile_is_of_the_batch_that_has_the_largest() -> None:
    model = prepare(nn.Sequential(nn.Linear(64, 32)), "nvfp4_qat", include="0")
    small, large = torch.linspace(0, 1, 640).view(10, 64), torch.linspace(0, 5, 640).view(10, 64)
    for batches in ([small, large], [large, small]):
        calibrate_percentile(model, batches, 50)
        torch.testing.assert_close(model[0].input_amax, torch.tensor(2.5))
