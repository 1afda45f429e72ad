"""Recipes and specs: they say what the contract's table says, print it, and refuse what no format has."""

from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix
from fp4deploy.qat import RECIPES, QuantSpec, Recipe, find_recipe

# NUMERICS section 7: recipe, format, X, W^T, G, W, G^T, X (dW), double quant.
TABLE = """
mx_baseline               | MXFP4 floor | RN | RN    | RN | RN    | RN     | RN     | no
nvidia_round_to_infinity  | MXFP4 ceil  | RN | RN    | RN | RN    | RN     | RN     | no
tetrajet                  | MXFP4 ceil  | RN | RN    | SR | SR    | SR     | SR     | yes
fp4_all_the_way           | NVFP4       | RN | RN    | SR | RN    | SR     | SR     | no
nvfp4_qat                 | NVFP4       | RN static | RN | - | - | -      | -      | straight-through
nvfp4_qat_delayed         | NVFP4       | RN static delayed | RN | - | - | - | - | straight-through
nvfp4_train               | NVFP4       | RN | RN 2D | SR | RN 2D | SR RHT | RN RHT | no
w4a8_qat                  | MXFP4 floor, MXFP8 ceil | RN | RN | - | - | - | - | straight-through
tetrajet_v2               | NVFP4       | RN | RN    | SR RHT | SR RHT | SR RHT | SR RHT | yes
quartet_2 | NVFP4 | RN 4/6 MSE/256 strict | RN 4/6 MSE/256 strict | EDEN | EDEN | EDEN | EDEN | yes
"""
ROWS = {row.split("|")[0].strip(): [cell.strip() for cell in row.split("|")] for row in TABLE.strip().splitlines()}
HEADINGS = ["recipe", "format", "X", "W^T", "G", "W", "G^T", "X (dW)", "double quant"]


def cells(line: str, header: str) -> list[str]:
    """A printed line cut where the headings start."""
    starts = [header.index(f"  {heading}") + 2 if i else 0 for i, heading in enumerate(HEADINGS)]
    for i, heading in enumerate(HEADINGS[:-1]):
        starts[i + 1] = header.index(f"  {HEADINGS[i + 1]}", starts[i] + len(heading)) + 2
    return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]


@pytest.mark.parametrize("name", ROWS)
def test_a_recipe_prints_like_its_row_of_the_table(name: str) -> None:
    header, rule, line, *rest = str(RECIPES[name]).splitlines()
    assert not rest
    assert cells(header, header) == HEADINGS
    assert set(rule) == {"-", " "}
    assert cells(line, header) == ROWS[name]


def test_the_seven_recipes_are_there_by_their_names() -> None:
    assert set(ROWS) | {"nvfp4_4o6_qat"} <= set(RECIPES)
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    assert find_recipe("tetrajet") is RECIPES["tetrajet"]


def test_the_operands_say_what_the_table_says() -> None:
    tetrajet, train, qat = RECIPES["tetrajet"], RECIPES["nvfp4_train"], RECIPES["nvfp4_qat"]
    assert {(s.format, s.scale_rule) for s in tetrajet.operands().values() if s} == {("mxfp4", "ceil")}
    assert [s.rounding for s in tetrajet.operands().values() if s] == ["nearest"] * 2 + ["stochastic"] * 4
    assert [s.hadamard for s in train.operands().values() if s] == [False] * 4 + [True] * 2
    assert [s.block for s in train.operands().values() if s] == ["1d", "2d", "1d", "2d", "1d", "1d"]
    assert qat.straight_through
    assert qat.activation == QuantSpec(scale="static")
    four = RECIPES["nvfp4_4o6_qat"]
    assert four.activation == replace(QuantSpec(scale="static"), four_over_six=FourOverSix())
    assert four.weight == QuantSpec(four_over_six=FourOverSix("mae", 256, False))
    assert {s.scale_rule for s in RECIPES["mx_baseline"].operands().values() if s} == {"floor"}
    assert [s.rounding for s in RECIPES["fp4_all_the_way"].operands().values() if s] == [
        *["nearest"] * 2,
        "stochastic",
        "nearest",
        *["stochastic"] * 2,
    ]


def test_a_recipe_of_ones_own_takes_a_few_lines() -> None:
    mine = replace(RECIPES["fp4_all_the_way"], name="mine", dgrad_gradient=QuantSpec())
    assert str(mine).splitlines()[2].split() == ["mine", "NVFP4", "RN", "RN", "RN", "RN", "SR", "SR", "no"]
    mixed = Recipe("mixed", QuantSpec("mxfp4"), QuantSpec(four_over_six=FourOverSix("mse", 448, True)))
    assert "MXFP4 floor, NVFP4" in str(mixed)
    assert "4/6 MSE/448 fast" in str(mixed)
    assert "rows" in str(Recipe("rows", QuantSpec(row_scaled=True)))


def test_recipes_are_values() -> None:
    recipe = RECIPES["nvfp4_train"]
    for target, name in ((recipe, "name"), (recipe.activation, "block"), (FourOverSix(), "metric")):
        with pytest.raises(FrozenInstanceError):
            setattr(target, name, "2d")
    assert replace(recipe) == recipe
    assert hash(replace(recipe)) == hash(recipe)
    assert pickle.loads(pickle.dumps(recipe)) == recipe
    assert len({*RECIPES.values()}) == len(RECIPES)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"format": "fp4"}, ["nvfp4, mxfp4"]),
        ({"block": "3d", "rounding": "up", "scale": "x"}, ["1d, 2d", "nearest, stochastic", "dynamic, static"]),
        ({"scale_rule": "round"}, ["floor, ceil"]),
        ({"format": "mxfp4", "block": "2d"}, ["mxfp4"]),
        ({"format": "mxfp4", "scale": "static"}, ["mxfp4"]),
        ({"format": "mxfp4", "four_over_six": FourOverSix()}, ["mxfp4"]),
        ({"format": "mxfp4", "row_scaled": True}, ["mxfp4"]),
        ({"format": "mxfp8", "scale": "static", "hadamard": True}, ["mxfp8 has 1-D blocks", "rounded to nearest"]),
        ({"block": "2d", "row_scaled": True, "scale": "static"}, ["2d blocks", "static scale"]),
        ({"block": "2d", "hadamard": True}, ["2d blocks"]),
        ({"four_over_six": FourOverSix(), "rounding": "stochastic"}, ["4/6"]),
        ({"rounding": "ms_eden", "hadamard": True}, ["ms_eden has its own rotation"]),
        ({"scale": "static", "hadamard": True}, ["Hadamard"]),
        (
            {"scale": "static", "hadamard": True, "four_over_six": FourOverSix(), "rounding": "stochastic"},
            ["Hadamard", "4/6"],
        ),
    ],
)
def test_a_spec_that_no_format_has_is_refused_with_every_reason(options: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        QuantSpec(**options)
    assert all(reason in str(refused.value) for reason in reasons)


@pytest.mark.parametrize(
    ("options", "reasons"),
    [
        ({"weight": QuantSpec(scale="static")}, ["weight: only the activation"]),
        ({"activation": QuantSpec(block="2d")}, ["activation: 2d blocks are for weights"]),
        (
            {"dgrad_gradient": QuantSpec(block="2d"), "wgrad_activation": QuantSpec(scale="static")},
            ["dgrad_gradient: 2d", "wgrad_activation: only"],
        ),
        ({"wgrad_gradient": QuantSpec(hadamard=True)}, ["wgrad_gradient and wgrad_activation"]),
        ({"dgrad_weight": QuantSpec(hadamard=True)}, ["dgrad_gradient and dgrad_weight"]),
        ({"activation": QuantSpec(hadamard=True), "weight": QuantSpec(hadamard=True)}, ["reuse"]),
        (
            {field: QuantSpec(hadamard=True) for field in ("activation", "weight")}
            | {"dgrad_weight": QuantSpec(), "wgrad_activation": QuantSpec(), "double_quantization": True},
            ["reuse"],
        ),
        (
            {"dgrad_gradient": QuantSpec(), "double_quantization": True, "original_operands": True},
            ["double_quantization and original_operands"],
        ),
        ({"double_quantization": True, "original_operands": True}, ["no backward operand", "one or the other"]),
        ({"activation": QuantSpec(scale="static"), "amax_timing": "later"}, ["'later'", "current, delayed"]),
        ({"activation": QuantSpec(), "amax_timing": "delayed"}, ["'delayed'", "static scale"]),
        ({"weight": QuantSpec(), "amax_timing": "delayed"}, ["'delayed'", "static scale"]),
    ],
)
def test_a_recipe_that_no_product_has_is_refused_with_every_reason(options: dict[str, Any], reasons: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        Recipe("wrong", **options)
    assert all(reason in str(refused.value) for reason in ["'wrong'", *reasons])


def test_original_operands_leave_the_forward_free_to_be_transformed() -> None:
    turned = QuantSpec(hadamard=True)
    recipe = Recipe("mine", turned, turned, original_operands=True)
    assert not (recipe.reuses_activation)
    assert not (recipe.reuses_weight)
    assert not (recipe.straight_through)
    assert str(recipe).endswith("original X, W")
    assert recipe.quantizers().endswith("original X, W")


def test_an_unknown_recipe_is_answered_with_the_nearest_and_all_names() -> None:
    with pytest.raises(InputError, match=r"Did you mean 'tetrajet'\?.*mx_baseline"):
        find_recipe("tetrajett")


def test_the_six_operands_are_fields_in_the_order_of_the_table() -> None:
    names = [field.name for field in fields(Recipe)]
    assert list(RECIPES["tetrajet"].operands()) == names[1:7]
