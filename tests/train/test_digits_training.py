"""Training with `model.digits`: every layer in FP4, exact resume, where a model may start and where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.errors import InputError
from fp4deploy.models import build_unet, load_weights, read_card
from fp4deploy.models.input_encoding import ENCODED_CHANNELS, expand_weight
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from tests.train.launch import copy_of

EVERYTHING = ["model.digits=true", "quant.include=['*']"]
FIRST = "encoder.0.conv1.weight"


@pytest.fixture(scope="module")
def trained(tiny: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two epochs of FP16 and two of NVFP4, all layers in FP4; the FP16 model quantised and not trained as well."""
    run = create_run(tmp_path_factory.mktemp("digits") / "run")
    train_models(settings(tiny), run, ("fp16", "nvfp4", "nvfp4_ptq"))
    return run


def settings(tiny: Config, *more: str) -> Config:
    return with_settings(tiny, [*EVERYTHING, *more])


def test_every_product_is_in_fp4_and_the_card_says_digits(trained: Run) -> None:
    for name in ("nvfp4", "nvfp4_ptq"):
        model, card = load_model(trained.checkpoint(name))
        assert card.digits
        assert len(quantized_layers(model)) == 13
        first = quantized_layers(model)["encoder.0.conv1"]
        assert first.weight.shape[1] == ENCODED_CHANNELS
        assert first.input_amax.item() == pytest.approx(6, abs=1e-6)
    assert read_card(trained.checkpoint("fp16")).digits


def test_training_moves_the_weights_of_all_channels(trained: Run) -> None:
    before, after = (load_file(trained.checkpoint(name))[FIRST] for name in ("nvfp4_ptq", "nvfp4"))
    assert ((before != after).flatten(2).any(2).any(0)).all()


@pytest.mark.parametrize(("model", "step"), [("fp16", 3), ("nvfp4", 1)])
def test_interrupted_and_resumed_equals_straight(
    trained: Run, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, step: int
) -> None:
    run = copy_of(trained, tmp_path / "run", ["fp16"] if model == "nvfp4" else [])
    config, models, original = settings(tiny), tuple(dict.fromkeys(("fp16", model))), Trainer.step

    def interrupted(self: Trainer, *batch: torch.Tensor) -> None:
        if self.job.model == model and self.progress.step == step:
            self.interrupt.requested = True
        original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_models(config, run, models, resume=True)
    train_models(config, run, models, resume=True)
    expected, found = (load_file(each.checkpoint(model)) for each in (trained, run))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_plain_fp16_checkpoint_is_expanded(tiny: Config, tiny_run: Run, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    start = [f"train.init_checkpoint={tiny_run.checkpoint('fp16')}", "train.finetune_epochs=1"]
    train_models(settings(tiny, *start), run, ("nvfp4_ptq", "fp16_control"))
    before, after = load_file(tiny_run.checkpoint("fp16")), load_file(run.checkpoint("nvfp4_ptq"))
    assert torch.equal(after[FIRST], expand_weight(before[FIRST]))
    assert all(torch.equal(after[name], value) for name, value in before.items() if name != FIRST)
    assert read_card(run.checkpoint("fp16_control")).digits


def test_digits_cannot_be_taken_away_again(tiny: Config, trained: Run, tmp_path: Path) -> None:
    start = f"train.init_checkpoint={trained.checkpoint('fp16')}"
    with pytest.raises(InputError, match=r"encodes its images in several FP4 terms.*--set model\.digits=true"):
        train_models(with_settings(tiny, [start]), create_run(tmp_path / "run"), ("nvfp4",))


def test_a_run_does_not_change_its_mind(trained: Run, tiny: Config) -> None:
    config = settings(tiny, "model.digits=false")
    with pytest.raises(InputError, match="model.digits: True -> False"):
        train_models(config, trained, ("nvfp4",), resume=True)


@pytest.mark.parametrize("digits", [True, False], ids=["its own kind", "the other kind"])
def test_a_teacher_reads_the_image_its_own_way(
    trained: Run, tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digits: bool
) -> None:
    seen = []
    monkeypatch.setattr(Trainer, "run", lambda self, resume: seen.append(self.auxiliary.teacher) or self.progress)
    more = [f"distill.teacher={trained.checkpoint('fp16')}", "distill.weight=1", "train.from_scratch=true"]
    more += [f"model.digits={str(digits).lower()}"]
    train_models(settings(tiny, *more), create_run(tmp_path / "run"), ("nvfp4",))
    expected = build_unet(len(read_card(trained.checkpoint("fp16")).class_names), 0.125, digits=True)
    load_weights(expected, trained.checkpoint("fp16"))
    x = torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        torch.testing.assert_close(seen[0](x), expected.eval()(x))


def test_checkpointed_blocks_give_the_same_model(trained: Run, tiny: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(settings(tiny, "train.checkpointing=true"), run, ("fp16",))
    expected, found = (load_file(each.checkpoint("fp16")) for each in (trained, run))
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_an_instance_model_has_digits_too(tiny: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(
        with_settings(tiny, [*EVERYTHING, "task=instance", "train.epochs=1", "train.finetune_epochs=1"]),
        run,
        ("fp16", "nvfp4"),
    )
    model, card = load_model(run.checkpoint("nvfp4"))
    assert (card.task, card.digits, len(quantized_layers(model))) == ("instance", True, 13)


def test_an_estimate_measures_what_would_be_trained(tiny: Config) -> None:
    from fp4deploy.train import estimate

    config = settings(tiny)
    (speed,) = estimate.measure(config, ("nvfp4",), steps=1)
    assert speed.training > 0
    assert estimate.as_json(config, [speed], [], 8, 4, 1, 0.9)["digits"] is True
