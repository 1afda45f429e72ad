"""Straight-through gradients, layers, prepare, calibration and loading."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import quantize_nvfp4
from fp4deploy.models import ModelCard, build_unet, load_weights, save_checkpoint
from fp4deploy.qat import (
    QuantConv2d,
    QuantSpec,
    calibrate,
    deployed,
    find_recipe,
    layer_plan,
    load_model,
    prepare,
    quantized_layers,
)
from fp4deploy.qat.operators.ste import fake_quantize

CARD = ModelCard("nvfp4", 0.125, ("background", "a"), 32, 32, (0.5,) * 3, (0.2,) * 3, True, "nvfp4_qat")


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_dynamic_scale_passes_the_gradient_unchanged() -> None:
    x = torch.randn(3, 32, 2, 2, generator=generator(), requires_grad=True)
    upstream = torch.randn(3, 32, 2, 2, generator=generator(1))
    fake_quantize(x, QuantSpec(), (1,)).backward(upstream)
    assert torch.equal(x.grad, upstream)


def test_static_scale_clips_the_gradient_where_the_value_saturates() -> None:
    x = torch.full((1, 16), 0.5)
    x[0, 3], x[0, 7] = 100.0, -100.0
    x.requires_grad_()
    fake_quantize(x, QuantSpec(), (1,), torch.tensor(1.0)).sum().backward()
    expected = torch.ones(1, 16)
    expected[0, 3] = expected[0, 7] = 0
    assert torch.equal(x.grad, expected)


def test_clipped_path_agrees_with_finite_differences() -> None:
    """A saturated element can move and the output does not: the derivative is 0, which the identity would miss."""
    x, amax = torch.full((1, 16), 0.5), torch.tensor(1.0)
    x[0, 3] = 100.0
    moved = x.clone()
    moved[0, 3] += 10.0
    assert torch.equal(fake_quantize(x, QuantSpec(), (1,), amax), fake_quantize(moved, QuantSpec(), (1,), amax))


LAYERS = {
    "conv": (lambda: nn.Conv2d(32, 24, 3, padding=1), (2, 32, 6, 5)),
    "conv_strided_dilated": (lambda: nn.Conv2d(32, 8, 3, stride=2, dilation=2), (2, 32, 9, 9)),
    "conv_groups": (lambda: nn.Conv2d(64, 8, 1, groups=2), (2, 64, 3, 3)),
    "conv_ragged": (lambda: nn.Conv2d(17, 8, 3, bias=False), (2, 17, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(32, 12, 2, stride=2), (2, 32, 4, 3)),
    "linear": (lambda: nn.Linear(40, 10), (2, 7, 40)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_forward_and_backward_equal_the_product_of_dequantised_operands(name: str) -> None:
    torch.manual_seed(0)
    make, shape = LAYERS[name]
    layer = make()
    x = torch.randn(shape, generator=generator(2), requires_grad=True)
    weight = layer.weight.detach().clone()
    model = prepare(nn.Sequential(layer), include=["0"]).train()
    y = model(x)
    upstream = torch.randn(y.shape, generator=generator(3))
    y.backward(upstream)

    rows = -1 if name == "linear" else 1
    contraction = 0 if name == "transposed" else 1
    amax = layer.input_amax
    assert amax == x.abs().max()
    xq = (
        quantize_nvfp4(x.detach().movedim(rows, -1), amax=amax)
        .dequantize()
        .movedim(-1, rows)
        .contiguous()
        .requires_grad_()
    )
    wq = (
        quantize_nvfp4(weight.movedim(contraction, -1))
        .dequantize()
        .movedim(-1, contraction)
        .contiguous()
        .requires_grad_()
    )
    plain = make()
    if name == "transposed":
        expected = F.conv_transpose2d(xq, wq, layer.bias, plain.stride)
    elif name == "linear":
        expected = F.linear(xq, wq, layer.bias)
    else:
        expected = F.conv2d(xq, wq, layer.bias, plain.stride, plain.padding, plain.dilation, plain.groups)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    expected.backward(upstream)
    torch.testing.assert_close(layer.weight.grad, wq.grad, rtol=1e-5, atol=1e-5)
    _, inside = _fake(x.detach(), rows, amax)
    torch.testing.assert_close(x.grad, torch.where(inside, xq.grad, 0.0), rtol=1e-5, atol=1e-5)


def _fake(x: torch.Tensor, axis: int, amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    from fp4deploy.formats import fake_quantize_nvfp4

    return fake_quantize_nvfp4(x, (axis,), amax)


def test_unet_plan_keeps_first_output_and_norms_with_reasons() -> None:
    plans = {plan.name: plan for plan in layer_plan(build_unet(3, 0.25))}
    kept = [name for name, plan in plans.items() if plan.precision == "FP16" and "norm" not in name]
    assert kept == ["encoder.0.conv1", "head"]
    assert "3 input channels" in plans["encoder.0.conv1"].reason
    assert "logits" in plans["head"].reason
    assert all(plan.reason for plan in plans.values())
    assert sum(plan.precision == "FP4" for plan in plans.values()) == 11


def test_prepare_keeps_parameters_names_biases_and_hooks() -> None:
    model = build_unet(3, 0.125)
    before = dict(model.named_parameters())
    calls: list[str] = []
    model.encoder[1].conv1.register_forward_hook(lambda *_: calls.append("hook"))
    prepare(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    model(torch.randn(1, 3, 16, 16))
    assert calls == ["hook"]
    assert isinstance(model.encoder[0].conv1, nn.Conv2d)
    assert not isinstance(model.encoder[0].conv1, QuantConv2d)


def test_prepared_model_is_planned_as_it_is() -> None:
    model = prepare(build_unet(3, 0.125), exclude=["up.*"])
    plans = {plan.name: plan for plan in layer_plan(model)}
    assert plans["up.0"].precision == "FP16"
    assert plans["up.0"].reason.startswith("excluded")
    assert plans["encoder.0.conv2"].precision == "FP4"
    assert set(quantized_layers(model)) == {name for name, plan in plans.items() if plan.precision == "FP4"}


def test_selection_mistakes_are_named() -> None:
    with pytest.raises(InputError, match=r"No layer matches 'decodr"):
        prepare(build_unet(3, 0.125), exclude=["decodr.*"])
    with pytest.raises(InputError, match="no layer that FP4"):
        prepare(nn.Sequential(nn.ReLU()))
    with pytest.raises(InputError, match="Did you mean 'nvfp4_qat'"):
        find_recipe("nvpf4_qat")


def test_a_group_smaller_than_a_block_is_kept() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3, groups=4), nn.Conv2d(32, 4, 1))
    plans = layer_plan(model)
    assert plans[1].precision == "FP16"
    assert "cross groups" in plans[1].reason


def test_tracked_amax_follows_up_at_once_and_down_slowly() -> None:
    model = prepare(nn.Sequential(nn.Linear(16, 4)), include=["0"]).train()
    layer = model[0]
    model(torch.full((1, 16), 2.0))
    assert layer.input_amax == 2.0
    model(torch.full((1, 16), 1.0))
    assert layer.input_amax == pytest.approx(2.0 * layer.recipe.amax_decay)
    model(torch.full((1, 16), math.inf))
    assert torch.isfinite(layer.input_amax)
    model.eval()
    before = layer.input_amax.clone()
    model(torch.full((1, 16), 50.0))
    assert layer.input_amax == before


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "fp8_qat", "nvfp4_qat+learned", "nvfp4_qat_delayed"])
def test_an_uncalibrated_layer_is_an_error_with_its_name(recipe: str) -> None:
    model = prepare(nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 4))), recipe, include=["1.0"]).eval()
    with pytest.raises(InputError, match=r"The layer 1\.0 has no static scale of its input: it was never calibrated"):
        model(torch.ones(1, 16))
    calibrate(model, torch.ones(1, 16))
    assert model(torch.ones(1, 16)).isfinite().all()
    for number in (float("nan"), float("inf"), -1.0):
        model[1][0].input_amax.data.fill_(number)
        with pytest.raises(InputError, match=rf"The layer 1\.0 has no static scale .*: its input_amax is {number:g}"):
            model(torch.ones(1, 16))


def test_calibration_sees_what_the_unquantised_model_sees() -> None:
    torch.manual_seed(0)
    plain, model = build_unet(3, 0.125), build_unet(3, 0.125)
    model.load_state_dict(plain.state_dict())
    prepare(model)
    seen: dict[str, float] = {}
    for name in quantized_layers(model):
        plain.get_submodule(name).register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: max(seen.get(name, 0.0), args[0].abs().max().item())})
        )
    batches = [torch.randn(2, 3, 32, 32, generator=generator(seed)) for seed in range(2)]
    calibrate(model, batches)
    with torch.no_grad():
        for batch in batches:
            plain(batch)
    assert {name: layer.input_amax.item() for name, layer in quantized_layers(model).items()} == seen
    assert model.training


def test_fp16_checkpoint_loads_into_the_nvfp4_model_by_name(tmp_path: Path) -> None:
    model, path = build_unet(2, 0.125), tmp_path / "fp16.safetensors"
    save_checkpoint(path, model, CARD)
    quantised = prepare(build_unet(2, 0.125))
    load_weights(quantised, path)
    assert torch.equal(quantised.encoder[2].conv1.weight, model.encoder[2].conv1.weight)


def test_loading_rounds_what_stays_in_fp16_and_nothing_else(tmp_path: Path) -> None:
    model, path = prepare(build_unet(2, 0.125)), tmp_path / "nvfp4.safetensors"
    calibrate(model, [torch.randn(1, 3, 32, 32, generator=generator())])
    save_checkpoint(path, model, CARD)
    loaded, card = load_model(path)
    assert card == CARD
    assert not loaded.training
    assert torch.equal(loaded.head.weight, model.head.weight.half().float())
    assert not torch.equal(loaded.head.weight, model.head.weight)
    assert torch.equal(loaded.encoder[1].conv1.weight, model.encoder[1].conv1.weight)


def test_buffers_and_biases_are_rounded_as_parameters_are() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 1), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 4, 1)).eval()
    norm = model[1]
    with torch.no_grad():
        for value, tensor in zip((0.1, 0.7, 0.9, 0.3), (*norm.parameters(), *norm.buffers()), strict=False):
            tensor.fill_(value)
    norm.num_batches_tracked.fill_(12345)
    held = {"mask": [0.0, -torch.inf, 0.3], "tiny": 1e-9, "places": [2**30 + 1]}  # 1e-9: computed in FP32, `rest`
    for name, value in held.items():
        norm.register_buffer(name, torch.tensor(value))
    calibrate(prepare(model), torch.randn(2, 3, 8, 8, generator=generator()))
    found = deployed(model).state_dict()
    kept = {"1.num_batches_tracked", "1.tiny", "1.places", "2.weight", "2.input_amax"}
    for name, value in model.state_dict().items():
        assert name == "2.input_amax" or torch.equal(found[name], value if name in kept else value.half().float()), name
        assert name in kept or not torch.equal(found[name], value), name


@pytest.mark.parametrize("number", [1e6, torch.nan, -torch.inf])
def test_loading_refuses_what_cannot_be_deployed(tmp_path: Path, number: float) -> None:
    model, path = prepare(build_unet(2, 0.125)), tmp_path / "nvfp4.safetensors"
    save_checkpoint(path, model, CARD)
    with pytest.raises(InputError, match="never calibrated"):
        load_model(path)
    calibrate(model, [torch.randn(1, 3, 32, 32, generator=generator())])
    with torch.no_grad():
        model.head.weight[0, 0] = number
    save_checkpoint(path, model, CARD)
    for refused in (lambda: load_model(path), lambda: deployed(model)):
        with pytest.raises(InputError, match=r"head\.weight .*(FP16|NaN)|NaN or Inf in head\.weight"):
            refused()


def test_autocast_keeps_the_quantiser_in_fp32() -> None:
    layer = prepare(nn.Sequential(nn.Conv2d(32, 8, 1, bias=False)), include=["0"]).train()
    x = torch.randn(1, 32, 4, 4, generator=generator())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    xq = quantize_nvfp4(x.movedim(1, -1)).dequantize().movedim(-1, 1).bfloat16()
    wq = quantize_nvfp4(layer[0].weight.movedim(1, -1)).dequantize().movedim(-1, 1).bfloat16()
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, F.conv2d(xq, wq))


def test_calibration_takes_a_batch_or_an_iterable_of_batches() -> None:
    found = []
    batches = torch.randn(4, 3, 16, 16, generator=generator())
    for given in (batches, [batches], [(batches, torch.zeros(4))], iter([batches[:2], batches[2:]])):
        torch.manual_seed(0)
        model = prepare(
            nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1))
        )
        calibrate(model, given)
        found.append(float(model[2].input_amax))
    assert found[0] > 0
    assert found == [found[0]] * 4
