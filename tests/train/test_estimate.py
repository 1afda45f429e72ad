"""The estimate's arithmetic, its measurement on tiny data, and what it says it assumes."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.experiments.sweep.spec import load_sweep
from fp4deploy.runs import MODELS, Run
from fp4deploy.train import Config, with_settings
from fp4deploy.train.estimate import Speed, as_json, assumptions, estimate, measure
from fp4deploy.train.schedule import epochs_of, training_job

ROOT = Path(__file__).parents[2]
SPEEDS = [Speed("fp16", 300.0, 310.0, 600.0, 900.0, None), Speed("nvfp4", 100.0, 280.0, 500.0, 110.0, None)]


def test_the_time_is_that_of_all_images_at_the_measured_speed() -> None:
    config = with_settings(Config(), ["train.epochs=60", "train.finetune_epochs=6", "train.evaluate_every=4"])
    fp16, nvfp4 = estimate(config, SPEEDS, images=118287, val_images=5000, gpus=8, efficiency=0.9)
    assert fp16.images_per_s == pytest.approx(300 * 8 * 0.9)
    assert fp16.training_hours == pytest.approx(60 * 118287 / (300 * 8 * 0.9) / 3600)
    assert fp16.validation_hours == pytest.approx(15 * 5000 / (600 * 8) / 3600)
    assert fp16.hours == fp16.training_hours + fp16.validation_hours
    assert (fp16.limit, nvfp4.limit) == ("steps", "loader")
    assert nvfp4.epochs == 6
    assert nvfp4.validation_hours == pytest.approx(2 * 5000 / (500 * 8) / 3600)
    alone = estimate(config, SPEEDS, 118287, 5000)[0]
    assert alone.images_per_s == 300  # one GPU: nothing is assumed about scaling
    scratch = estimate(with_settings(config, ["train.from_scratch=true"]), SPEEDS, 100, 0)[1]
    assert (scratch.epochs, scratch.validation_hours) == (60, 0)


@pytest.mark.parametrize("scratch", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_training_estimate_and_sweep_agree_on_the_epochs_of_a_model(tmp_path: Path, model: str, scratch: bool) -> None:
    """`train.from_scratch` is for nvfp4 alone: fp16_control is always fine-tuned."""
    settings = ["train.epochs=14", "train.finetune_epochs=4", f"train.from_scratch={scratch}"]
    expected = {"fp16": 14, "nvfp4": 14 if scratch else 4, "fp16_control": 4, "nvfp4_ptq": 0}[model]
    config = with_settings(Config(), settings)
    assert epochs_of(config, model) == expected
    assert training_job(config, Run(tmp_path), model).epochs == expected
    (found,) = estimate(config, [Speed(model, 100.0, 100.0, 100.0, 100.0, None)], 100, 100)
    assert found.epochs == expected
    file = tmp_path / "sweep.yaml"
    common = ", ".join(text.replace("=", ": ") for text in settings)
    file.write_text(f"set: {{{common}}}\nvariants: {{a: {{model: {model}}}}}\n")
    sweep = load_sweep(file)
    variant = sweep.variant("a")
    job = training_job(sweep.config(variant, 0), Run(tmp_path), variant.model)
    assert job.epochs == expected
    assert (variant.base is None) == (model == "fp16" or (model == "nvfp4" and scratch))


@pytest.mark.parametrize("wrong", [{"images": 0}, {"gpus": 0}, {"efficiency": 0.0}, {"efficiency": 1.5}])
def test_numbers_out_of_range(wrong: dict) -> None:
    with pytest.raises(InputError, match="at least one image and one GPU"):
        estimate(Config(), SPEEDS, **{"images": 10, "val_images": 1, **wrong})


def test_the_assumptions_say_what_was_not_measured() -> None:
    assert any("assumed, not measured here" in text for text in assumptions(8, 0.9))
    assert not any("assumed" in text for text in assumptions(1, 0.9))


def test_measuring_leaves_nothing_behind_and_gives_speeds(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    speeds = measure(with_settings(tiny, ["train.accumulate=2"]), ("fp16", "nvfp4"), steps=3)
    assert [speed.model for speed in speeds] == ["fp16", "nvfp4"]
    for speed in speeds:
        assert min(speed.training, speed.resident, speed.evaluation, speed.loader) > 0
        assert speed.loader > speed.training
    assert not list(tmp_path.iterdir())
    facts = as_json(tiny, speeds, estimate(tiny, speeds, 8, 4), 8, 4, 1, 0.9)
    assert json.loads(json.dumps(facts))["estimated"][0]["epochs"] == 2
    with pytest.raises(InputError, match="At least one step"):
        measure(tiny, ("fp16",), steps=0)


def test_the_loading_benchmark_compares_with_what_a_step_takes(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("data: {height: 32, width: 32}\ntrain: {batch_size: 4}\n")
    script = str(ROOT / "benchmarks" / "data_loading.py")
    arguments = ["--config", str(config), "--data", str(tiny_data), "--workers", "0", "--batches", "3"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, "--step-ms", "1e9", "--json", str(tmp_path / "out.json")])
    runpy.run_path(script, run_name="__main__")
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["images_per_s"] > 0
    assert row["enough_for"] == {"a step of 1e+09 ms": True}


def test_measuring_ends_with_its_time(tiny: Config) -> None:
    seen: list[tuple[int, int]] = []
    (speed,) = measure(tiny, ("fp16",), steps=10**4, seconds=1e-3, advance=lambda done, of: seen.append((done, of)))
    assert min(speed.training, speed.resident, speed.evaluation, speed.loader) > 0
    assert seen == [(done, 5) for done in range(5)]
