"""What the benchmark of the published claim trains next, and the gaps of what it has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claim import (
    CONTROL,
    SWEEP,
    Cell,
    _styles,
    cells,
    curve_of,
    gaps,
    growth,
    longest,
    main,
    merged,
    missing,
)
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.qat import find_recipe

PROTOCOL = SWEEP.with_name("sweep_protocol.yaml")
CONVERGENCE = SWEEP.with_name("sweep_convergence.yaml")
ASKED = {f"unet_025_{recipe}": Cell("unet_025", recipe) for recipe in ("fp16", "nvfp4_train", "tetrajet")}


def row(recipe: str, seed: int, best: float, network: str = "unet_025", seconds: float = 60.0) -> dict[str, Any]:
    return {
        "data": "d", "network": network, "recipe": recipe, "seed": seed, "best": best, "last": best, "seconds": seconds,
    }  # fmt: skip


@pytest.mark.parametrize("path", [SWEEP, PROTOCOL, CONVERGENCE], ids=lambda path: path.stem)
def test_a_sweep_has_every_network_in_every_precision(path: Path) -> None:
    sweep = load_sweep(path)
    found = cells(sweep)
    networks, recipes = ({cell[place] for cell in found.values()} for place in (0, 1))
    assert set(found) == {f"{network}_{recipe}" for network in networks for recipe in recipes}
    assert {each.against for each in sweep.variants} == {None, *(f"{network}_{CONTROL}" for network in networks)}
    assert {each.base for each in sweep.variants} == {None}  # from random weights


def test_the_protocol_trains_the_published_recipes_and_settings() -> None:
    sweep = load_sweep(PROTOCOL)
    found = cells(sweep)
    for variant in sweep.variants:
        config, cell = sweep.config(variant, 0), found[variant.name]
        assert (config.train.tversky, config.train.cross_entropy, config.train.batch_size) == ((0.3, 0.7), 0, 32)
        transformer = cell.network.startswith("swin")
        assert (config.train.optimizer, config.train.lr) == (("adamw", 1e-4) if transformer else ("adamax", 5e-4))
        assert config.quant.exclude == (["decoder.*"] if transformer else ["bottleneck"])
        recipe = find_recipe(config.recipe)
        gradients = recipe.dgrad_gradient, recipe.wgrad_gradient
        if cell.recipe in ("forward", "forward_rht", "chain_rule"):
            assert gradients == (None, None)
            assert recipe.reuses_activation == recipe.reuses_weight == (cell.recipe == "chain_rule")
        elif cell.recipe != CONTROL:
            stochastic = [spec.rounding == "stochastic" for spec in gradients if spec]
            assert stochastic == [cell.recipe in ("sr", "2d_rht_sr")] * 2
            assert (recipe.weight and recipe.weight.block == "2d") == cell.recipe.startswith("2d")


def test_convergence_is_of_every_recipe_that_quantises_gradients() -> None:
    from fp4deploy.qat import RECIPES

    quantising = {name for name, recipe in RECIPES.items() if recipe.dgrad_gradient or recipe.wgrad_gradient}
    assert {cell.recipe for cell in cells(load_sweep(CONVERGENCE)).values()} == {"fp16", "bf16", *quantising}


def test_what_has_a_row_is_not_trained_again() -> None:
    everything = tuple(ASKED)
    assert missing([], "d", ASKED, [0, 1, 2]) == [(everything, (0, 1, 2))]
    rows = [row(cell.recipe, 0, 0.5) for cell in ASKED.values()] + [row(CONTROL, 1, 0.5), row("tetrajet", 1, 0.4)]
    assert missing(rows, "d", ASKED, [0, 1, 2]) == [(("unet_025_nvfp4_train",), (1,)), (everything, (2,))]
    assert missing(rows, "e", ASKED, [0]) == [(everything, (0,))]
    assert longest(rows, "d", list(ASKED.values())) == 1.0
    assert longest(rows, "d", [Cell("segformer", CONTROL)]) == 0.0


def test_gaps_are_paired_with_the_fp16_training_of_the_same_network_and_seed() -> None:
    rows = [row(CONTROL, 0, 0.50), row(CONTROL, 1, 0.60), row("tetrajet", 1, 0.57), row("tetrajet", 0, 0.49)]
    rows += [row("tetrajet", 2, 0.9), row("tetrajet", 0, 0.2, "segformer")]  # without FP16
    rows += [{**row(CONTROL, 3, 0.5), "auprc": 0.5}, {**row("tetrajet", 3, 0.5), "error": "diverged"}]
    (gap,) = gaps(rows)
    assert (gap["network"], gap["recipe"]) == ("unet_025", "tetrajet")
    assert gap["by_seed"] == pytest.approx({"0": -1.0, "1": -3.0})
    assert gap["mean"] == pytest.approx(-2.0)
    assert gap["low"] < gap["mean"] < gap["high"]
    assert gaps(rows, "auprc") == []


def test_growth_is_the_difference_of_two_gaps_of_a_seed() -> None:
    scores = {"unet_025": ((0.50, 0.49), (0.60, 0.57)), "unet_1": ((0.80, 0.76), (0.70, 0.68), (0.5, 0.5))}
    scores["segformer"] = ((0.5, 0.5),)
    rows = [
        row(recipe, seed, best, network)
        for network, seeds in scores.items()
        for seed, pair in enumerate(seeds)
        for recipe, best in zip((CONTROL, "tetrajet"), pair, strict=True)
    ]
    (found,) = growth(rows)
    assert (found["network"], found["than"], found["recipe"]) == ("unet_1", "unet_025", "tetrajet")
    assert found["by_seed"] == pytest.approx({"0": -3.0, "1": 1.0})  # -4 against -1, -2 against -3
    assert found["mean"] == pytest.approx(-1.0)


def test_a_merge_keeps_where_the_pieces_come_from(tmp_path: Path) -> None:
    for name, recipe in (("a", "fp16"), ("b", "sr")):
        piece = {"commit": name, "date": "2026-01-02", "machine": {"gpu": name}, "rows": [row(recipe, 0, 0.5)]}
        (tmp_path / f"{name}.json").write_text(json.dumps(piece))
    merge = ["--merge", str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    main(["--sweep", str(PROTOCOL), "--json", str(tmp_path / "all.json"), *merge])
    found = json.loads((tmp_path / "all.json").read_text())
    assert (found["commit"], found["date"], found["machine"]) == ("a", "2026-01-02", {"gpu": "a"})
    assert [each["recipe"] for each in found["rows"]] == ["fp16", "sr"]
    assert found["gaps"][0]["mean"] == 0
    before = (tmp_path / "all.json").read_bytes()
    main(["--sweep", str(PROTOCOL), "--json", str(tmp_path / "all.json")])  # as for a picture
    assert (tmp_path / "all.json").read_bytes() == before


def test_pieces_become_one_file_and_a_curve_has_an_interval(tmp_path: Path) -> None:
    for name, rows in (("a", [row("fp16", 0, 0.5)]), ("b", [row("fp16", 0, 0.9), row("fp16", 1, 0.7)])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": rows}))
    found = merged([tmp_path / "none.json", tmp_path / "a.json", tmp_path / "b.json"])
    assert [(each["seed"], each["best"]) for each in found] == [(0, 0.5), (1, 0.7)]
    curves = [[{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5}], [{"epoch": 1, "loss": 3.0}]]
    first, second = curve_of(curves, "loss")
    assert first["mean"] == 2.0
    assert first["low"] < 2.0 < first["high"]
    assert second == {"epoch": 2, "mean": 0.5, "low": 0.5, "high": 0.5}


@pytest.mark.variants
def test_the_protocol_runs_on_a_cpu(shapes: Path, tmp_path: Path) -> None:
    """Its smallest CNN, tiny images: every score and interval, and the picture."""
    path = tmp_path / "found.json"
    tiny = ("epochs=1", "evaluate_every=1", "batch_size=4")
    sets = [*(f"train.{each}" for each in tiny), "data.height=32", "data.width=32", "data.workers=0"]
    options = ["--networks", "cnn_500k", "--seeds", "0", "1", *(f"--set={each}" for each in sets)]
    options += ["--sweep", str(PROTOCOL), "--data", f"shapes={shapes}", "--json", str(path)]
    main([*options, "--recipes", "fp16"])  # one piece, and another
    main([*options, "--recipes", "fp16", "forward_rht", "--curves", str(tmp_path / "curves.png")])
    found = json.loads(path.read_text())
    assert len(found["rows"]) == 4
    assert found["commit"]
    for key in ("gaps", "gaps_auprc", "gaps_dice"):
        (gap,) = found[key]
        assert gap["recipe"] == "forward_rht"
        assert gap["low"] is not None
    assert all(0 < each["auprc"] < 1 and each["curve"][0]["loss"] > 0 for each in found["rows"])
    assert (tmp_path / "curves.png").is_file()


def test_every_recipe_has_a_line_of_its_own() -> None:
    from fp4deploy.qat import RECIPES

    styles = _styles((CONTROL, "bf16", *RECIPES))
    assert len(set(styles.values())) == len(styles) == 2 + len(RECIPES)
