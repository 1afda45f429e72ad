"""What the benchmark of the published claim trains next, and the gaps of what it has."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.claim import CONTROL, NETWORKS, RECIPES, SWEEP, gaps, growth, longest, missing
from fp4deploy.experiments.sweep.spec import load_sweep


def row(recipe: str, seed: int, best: float, network: str = "unet_025", seconds: float = 60.0) -> dict[str, Any]:
    return {
        "data": "d", "network": network, "recipe": recipe, "seed": seed, "best": best, "last": best, "seconds": seconds,
    }  # fmt: skip


def test_the_sweep_has_every_network_in_every_precision() -> None:
    sweep = load_sweep(SWEEP)
    assert {each.name for each in sweep.variants} == {f"{n}_{r}" for n in NETWORKS for r in (CONTROL, *RECIPES)}
    assert {each.against for each in sweep.variants} == {None, *(f"{network}_{CONTROL}" for network in NETWORKS)}
    assert {each.base for each in sweep.variants} == {None}  # from random weights
    for each in sweep.variants:
        config = sweep.config(each, 0)
        assert each.model == "fp16" or each.name.endswith(f"_{config.recipe}")


def test_what_has_a_row_is_not_trained_again() -> None:
    everything = (CONTROL, *RECIPES)
    assert missing([], "d", "unet_025", [0, 1, 2]) == [(everything, (0, 1, 2))]
    rows = [row(recipe, 0, 0.5) for recipe in everything] + [row(CONTROL, 1, 0.5), row("tetrajet", 1, 0.4)]
    assert missing(rows, "d", "unet_025", [0, 1, 2]) == [
        (("nvfp4_qat", "nvfp4_train", "fp4_all_the_way"), (1,)),
        (everything, (2,)),
    ]
    assert missing(rows, "d", "segformer", [0]) == [(everything, (0,))]
    assert longest(rows, "d", "unet_025") == 1.0
    assert longest(rows, "e", "unet_025") == 0.0


def test_gaps_are_paired_with_the_fp16_training_of_the_same_network_and_seed() -> None:
    rows = [row(CONTROL, 0, 0.50), row(CONTROL, 1, 0.60), row("tetrajet", 1, 0.57), row("tetrajet", 0, 0.49)]
    rows += [row("tetrajet", 2, 0.9), row("tetrajet", 0, 0.2, "segformer")]  # without FP16
    (gap,) = gaps(rows)
    assert (gap["network"], gap["recipe"]) == ("unet_025", "tetrajet")
    assert gap["by_seed"] == pytest.approx({"0": -1.0, "1": -3.0})
    assert gap["mean"] == pytest.approx(-2.0)
    assert gap["low"] < gap["mean"] < gap["high"]


def test_growth_is_the_difference_of_two_gaps_of_a_seed() -> None:
    scores = {"unet_025": ((0.50, 0.49), (0.60, 0.57)), "unet_1": ((0.80, 0.76), (0.70, 0.68), (0.5, 0.5))}
    rows = [
        row(recipe, seed, best, network)
        for network, seeds in scores.items()
        for seed, pair in enumerate(seeds)
        for recipe, best in zip((CONTROL, "tetrajet"), pair, strict=True)
    ]
    (found,) = growth(rows)
    assert (found["network"], found["recipe"]) == ("unet_1", "tetrajet")
    assert found["by_seed"] == pytest.approx({"0": -3.0, "1": 1.0})  # -4 against -1, -2 against -3
    assert found["mean"] == pytest.approx(-1.0)
