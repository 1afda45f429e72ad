"""Forward, dX, dW and db of every recipe and every layer against float64 GEMMs of operands quantised here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from fp4deploy.formats import FourOverSix
from fp4deploy.qat import RECIPES, QuantSpec, Recipe
from tests.qat.layer_cases import LAYERS, make, quantized
from tests.qat.reference_gemms import Gradients, check, one_step, reference
from tests.samples import sample

PLAIN = QuantSpec()
TURNED = QuantSpec(hadamard=True)
MORE_RECIPES = {
    "static input, quantised gradients": replace(
        RECIPES["nvfp4_train"], name="a", activation=QuantSpec(scale="static")
    ),
    "double with a static input": replace(
        RECIPES["fp4_all_the_way"], name="b", activation=QuantSpec(scale="static"), double_quantization=True
    ),
    "weights only": Recipe("c", None, PLAIN),
    "activations only": Recipe("d", PLAIN, None),
    "gradient of the input only": Recipe("e", PLAIN, PLAIN, PLAIN),
    "weights of the input gradient only": Recipe("f", PLAIN, PLAIN, None, PLAIN),
    "gradient of the weight only": Recipe("g", PLAIN, PLAIN, None, None, PLAIN),
    "activations of the weight gradient only": Recipe("h", None, None, None, None, None, PLAIN),
    "4/6 everywhere": Recipe("i", *[QuantSpec(four_over_six=FourOverSix("mse", 448))] * 6),
    "transformed everywhere": Recipe("j", *[TURNED] * 6),
    "mixed formats": Recipe(
        "k", QuantSpec("mxfp4"), PLAIN, QuantSpec("mxfp4", scale_rule="ceil"), PLAIN, PLAIN, QuantSpec("mxfp4")
    ),
}


def run(layer: nn.Module, recipe: Recipe, x: torch.Tensor) -> tuple[Gradients, torch.Tensor]:
    return one_step(quantized(layer, recipe).train(), x)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize(("recipe", "name"), sample(RECIPES, LAYERS, every=6))
def test_every_recipe_in_every_layer(recipe: str, name: str) -> None:
    """The layer in float64, so that nothing but a wrong operand can differ."""
    layer, x = make(name)
    x = x.detach().double().requires_grad_()
    found, upstream = run(layer.double(), RECIPES[recipe], x)
    check(found, reference(layer, RECIPES[recipe], x, upstream), 1e-12)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize(
    "name", ["linear ragged, 3-D", "conv ragged groups", "conv reflect", "transposed groups, dilation"]
)
@pytest.mark.parametrize("recipe", MORE_RECIPES)
def test_recipes_of_ones_own(recipe: str, name: str) -> None:
    layer, x = make(name)
    x = x.detach().double().requires_grad_()
    found, upstream = run(layer.double(), MORE_RECIPES[recipe], x)
    check(found, reference(layer, MORE_RECIPES[recipe], x, upstream), 1e-12)


@pytest.mark.usefixtures("one_byte")
@pytest.mark.parametrize("name", LAYERS)
def test_in_float32(name: str) -> None:
    layer, x = make(name)
    found, upstream = run(layer, RECIPES["nvfp4_train"], x)
    check(found, reference(layer, RECIPES["nvfp4_train"], x, upstream), 1e-6)
