"""Layers chosen by their errors: which, how many, and what a training makes of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.sweep_result import macs_in_fp4
from fp4deploy.errors import InputError
from fp4deploy.models import read_card
from fp4deploy.qat import calibrate, load_model, prepare, quantized_layers
from fp4deploy.qat.plan import eight_bits, is_single_gemm
from fp4deploy.qat.sensitive import sensitive_layers
from fp4deploy.runs import create_run
from fp4deploy.train import Config, load_config, save_config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from fp4deploy.train.models import SENSITIVE


def network() -> nn.Sequential:
    """Four layers of 16 channels, at 8 x 8 pixels and at 4 x 4; one has weights that blocks hold badly."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Conv2d(16, 16, 1, stride=1 + (number == 2)) for number in range(4)))
    with torch.no_grad():
        model[1].weight[:, 0] *= 40  # of 16 weights of a block 15 keep few codes
    return model


def test_the_worst_for_their_work_come_first_and_no_more_than_fit() -> None:
    model, images = network(), torch.randn(2, 16, 8, 8)
    calibrate(prepare(model, include=["*"]), [images])
    expected = {}
    whole = network()(images)
    for name in "0123":
        alone = prepare(network(), include=[name])
        calibrate(alone, [images])
        expected[name] = (alone.eval()(images) - whole).square().sum().item()
    macs = {"0": 4, "1": 4, "2": 1, "3": 1}  # of ten
    order = sorted(macs, key=lambda name: -expected[name] / macs[name])
    assert sensitive_layers(model, [images], 1.0) == order
    assert sensitive_layers(model, [images], 0.2) == [name for name in order if macs[name] == 1]
    assert sensitive_layers(model, [images], 0.05) == []
    assert all(layer.quantizing for layer in quantized_layers(model).values())
    assert sensitive_layers(model, [images], 0.2, fp4=0.9) == [name for name in order if macs[name] == 1][:1]
    eight = prepare(model, include=["*"], fp8=["1", "2"])
    assert set(sensitive_layers(eight, [images], 1.0)) == {"0", "3"}
    prepare(model, include=["0", "1", "2"])  # layer 3, a tenth of the work, is FP16
    assert sensitive_layers(model, [images], 1.0, fp4=0.8) == ["2"]
    assert sensitive_layers(model, [images], 1.0, fp4=0.95) == []


def test_a_training_has_them_in_fp8_and_resumes_with_them(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = with_settings(
        tiny, ["quant.fp16_macs=0.05", "quant.fp8_macs=0.1", "train.epochs=1", "train.finetune_epochs=2"]
    )
    run, original = create_run(tmp_path / "run"), Trainer.step
    train_models(config, run, ("fp16",))

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        self.interrupt.requested = True

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            train_models(config, run, ("nvfp4",))
    assert not run.checkpoint("nvfp4").exists()
    chosen = json.loads((run.model_dir("nvfp4") / SENSITIVE).read_text())
    train_models(config, run, ("nvfp4",), resume=True)
    card, names = read_card(run.checkpoint("nvfp4")), chosen["fp8"]
    assert list(card.formats["fp8"]) == names
    assert list(card.exclude) == chosen["fp16"]
    model, _ = load_model(run.checkpoint("nvfp4"))
    formats = {name: layer.recipe.activation.format for name, layer in quantized_layers(model).items()}
    assert [name for name in formats if formats[name] == "fp8"] == [name for name in formats if name in names]
    assert 0 < len(names) < len(formats) == 11 - len(chosen["fp16"]) < 11


@pytest.mark.usefixtures("whole_unets")
def test_layers_that_the_recipe_has_in_fp8_stay_there(tiny: Config, tmp_path: Path) -> None:
    settings = ["quant.fp8_macs=0.02", "recipe=nvfp4_fp8_qat", "train.epochs=1", "train.calibration=1"]
    run = create_run(tmp_path / "run")
    train_models(with_settings(tiny, settings), run, ("fp16", "nvfp4_ptq"))
    model, _ = load_model(run.checkpoint("nvfp4_ptq"))
    formats = {name: eight_bits(layer.recipe) or "FP4" for name, layer in quantized_layers(model).items()}
    more = {name for name in formats if formats[name] == "FP8"}
    recipes = {name for name, layer in quantized_layers(model).items() if not is_single_gemm(layer)}
    assert recipes < more < formats.keys()


def test_layers_in_fp8_are_no_work_in_fp4() -> None:
    model = torch.nn.Sequential(*(torch.nn.Conv2d(16, 16, 1) for _ in range(4)))
    prepare(model, include=["1", "2", "3"], fp8=["3"])
    quantizing = [layer.quantizing for layer in quantized_layers(model).values()]
    assert macs_in_fp4(model, (16, 4, 4)) == 0.5
    assert [layer.quantizing for layer in quantized_layers(model).values()] == quantizing  # as it was


def test_the_rule_leaves_nine_tenths_of_the_work_in_fp4(tiny: Config, tmp_path: Path) -> None:
    config = with_settings(tiny, ["recipe=nvfp4_best", "train.epochs=1", "train.calibration=1"])
    assert (config.recipe, config.quant.fp4_macs, config.quant.start) == ("nvfp4_4o6_weight_qat", 0.9, 0.5)
    assert with_settings(tiny, ["recipe=nvfp4_best", "quant.fp4_macs=0.5"]).quant.fp4_macs == 0.5
    for sets in (["recipe=nvfp4_best", "quant.start=0"], ["quant.start=0", "recipe=nvfp4_best"]):
        assert with_settings(tiny, sets).quant.start == 0
    file = tmp_path / "config.yaml"
    file.write_text("recipe: nvfp4_best\nquant: {start: 0}\n", encoding="utf-8")
    assert load_config(file).quant.start == 0
    save_config(tiny, file)  # whose zeros are defaults
    assert load_config(file, ["recipe=nvfp4_best"]).quant == config.quant
    run = create_run(tmp_path / "run")
    train_models(config, run, ("fp16", "nvfp4_ptq"))
    model, card = load_model(run.checkpoint("nvfp4_ptq"))
    assert card.recipe == config.recipe
    assert card.formats["fp8"]
    assert 0.9 <= macs_in_fp4(model, card.input_shape) < 0.95


@pytest.mark.parametrize(
    ("settings", "cause"),
    [
        (["recipe=nvfp4_best", "train.from_scratch=true"], r"quant\.fp4_macs measures"),
        (["recipe=nvfp4_bes"], r"Did you mean 'nvfp4_best'\?"),
        (["recipe=nvfp4_best+dynamic"], "rules take no modifier; the recipe alone is nvfp4_4o6_weight_qat"),
        (["quant.fp16_macs=0.1", "train.from_scratch=true"], r"quant\.fp16_macs measures what a trained network loses"),
        (["quant.fp8_macs=0.1", "recipe=nvfp4_train"], "nvfp4_train"),
    ],
)
def test_what_cannot_be_measured_or_be_fp8_is_refused_before_anything_is_trained(
    tiny: Config, settings: list[str], cause: str
) -> None:
    with pytest.raises(InputError, match=cause):
        with_settings(tiny, settings)
