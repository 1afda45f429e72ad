"""FP8 and INT8 layers: what they compute, which layers a recipe makes FP8, gradients, and one card up to export."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.formats import quantize_fp8, quantize_int8
from fp4deploy.models import ModelCard
from fp4deploy.qat import calibrate, layer_plan, prepare, quantized_layers
from fp4deploy.qat.load import prepare_as
from fp4deploy.qat.plan import eight_bits
from fp4deploy.qat.recipes import QuantSpec, Recipe, find_recipe
from tests.fuzz.predicted import CARD


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 16, 1),
        nn.ConvTranspose2d(16, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 3, stride=2), nn.Conv2d(8, 4, 1),
    ).eval()  # fmt: skip


@pytest.mark.parametrize(("recipe", "quantize"), [("fp8_qat", quantize_fp8), ("int8_qat", quantize_int8)])
@pytest.mark.parametrize("layer", [nn.Conv2d(16, 8, 3), nn.ConvTranspose2d(16, 8, 3), nn.Linear(16, 8)])
def test_a_layer_multiplies_quantised_operands(layer: nn.Module, recipe: str, quantize: Any) -> None:
    layer = copy.deepcopy(layer)
    x = torch.randn(2, 16) if isinstance(layer, nn.Linear) else torch.randn(2, 16, 6, 6)
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    weight = quantize(layer.weight.detach(), axis).dequantize()  # type: ignore[operator, union-attr]
    expected = torch.func.functional_call(layer, {"weight": weight}, (quantize(x).dequantize(),))
    prepared = prepare(nn.Sequential(layer), recipe, include="*").eval()
    calibrate(prepared, x)
    assert torch.equal(prepared(x), expected)


def test_a_recipe_says_which_layers_are_fp8() -> None:
    plans = {plan.name: plan.precision for plan in layer_plan(network(), "nvfp4_fp8_qat")}
    assert plans == {"0": "FP16", "1": "FP8", "2": "FP4", "3": "FP4", "4": "FP8", "5": "FP16"}
    assert {plan.precision for plan in layer_plan(network(), "fp8_qat", include="*")} == {"FP8"}
    chosen = {plan.name: plan.precision for plan in layer_plan(network(), "nvfp4_qat", include="*", fp8=["2", "5"])}
    assert [name for name, precision in chosen.items() if precision == "FP8"] == ["2", "5"]
    model = prepare(network(), "nvfp4_fp8_qat")
    assert [plan.precision for plan in layer_plan(model)] == list(plans.values())
    assert {name for name, layer in quantized_layers(model).items() if eight_bits(layer.recipe)} == {"1", "4"}


def test_a_card_keeps_which_layers_are_fp8() -> None:
    card = replace(CARD, precision="nvfp4", recipe="nvfp4_4o6_weight_qat", include=("1", "2"), formats={"fp8": ("1",)})
    assert ModelCard.from_json(card.to_json()) == card
    assert "int8" not in card.to_json()
    assert "fp8" not in replace(card, formats={}).to_json()
    model = prepare_as(network(), replace(card, include=("1", "2", "3"), formats={"fp8": ("1",), "int8": ("3",)}))
    found = {name: eight_bits(layer.recipe) for name, layer in quantized_layers(model).items()}
    assert found == {"1": "FP8", "2": "", "3": "INT8"}
    with pytest.raises(InputError, match="1 is among the layers of both fp8 and int8"):
        prepare_as(network(), replace(card, formats={"fp8": ("1",), "int8": ("1",)}))


def test_gradients_pass_straight_through_where_nothing_is_clipped() -> None:
    model = prepare(nn.Sequential(nn.Linear(16, 4)), "fp8_qat", include="*").eval()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    calibrate(model, 0.5 * x.detach())
    model(x).sum().backward()
    layer = quantized_layers(model)["0"]
    inside = x.detach().abs() <= 0.5 * x.detach().abs().max() * 464 / 448
    expected = layer.quantized_weight().detach().sum(0).expand(8, -1) * inside
    assert torch.allclose(x.grad, expected)  # type: ignore[arg-type]
    assert not inside.all()


def test_a_training_step_tracks_the_amax_in_both_timings() -> None:
    for recipe in ("fp8_qat", "fp8_qat+delayed"):
        model = prepare(nn.Sequential(nn.Linear(16, 4)), recipe, include="*").train()
        for factor in (1.0, 2.0):
            model(factor * torch.ones(2, 16)).sum().backward()
        assert float(quantized_layers(model)["0"].input_amax) == 2.0  # type: ignore[arg-type]


def test_what_fp8_does_not_go_with() -> None:
    with pytest.raises(InputError, match="fp8 has no blocks"):
        QuantSpec("fp8", block="2d")
    with pytest.raises(InputError, match="fp8 and int8 go with gradients that pass straight through"):
        find_recipe("fp8_qat+learned")
    with pytest.raises(InputError, match="fp8 and int8 go with"):
        prepare(network(), "nvfp4_train", fp8="1")
    with pytest.raises(InputError, match="fp8 'all' is not one of"):
        Recipe("x", fp8="all")
    assert "NVFP4, FP8" in str(find_recipe("nvfp4_fp8_qat"))
