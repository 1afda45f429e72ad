"""What a step trains with: rates and decay of each parameter, epochs and rate of each model, epochs that are scored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from fp4deploy.qat import prepare
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.optimizer import make_optimizer, set_learning_rate
from fp4deploy.train.schedule import training_job
from tests.train.small_network import SPEC


def test_weights_alone_decay_and_clips_have_a_rate_of_their_own() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 1))
    prepare(model, "nvfp4_qat+learned")
    optimizer = make_optimizer(model, 0.1, 0.05, clip_lr=0.25, clip_decay=0.5)
    set_learning_rate(optimizer, 0.02)
    found = {}
    for group in optimizer.param_groups:
        found |= {id(each): (float(group["lr"]), group["weight_decay"]) for each in group["params"]}
    of = {name: found[id(parameter)] for name, parameter in model.named_parameters()}
    assert of.pop("2.input_amax") == (0.02 * 0.25, 0.5)
    assert of == {name: (0.02, 0.05 if name in ("0.weight", "2.weight", "3.weight") else 0.0) for name in of}
    assert len(found) == len(of) + 1


def test_the_step_is_that_of_the_rates() -> None:
    """Of AdamW's first step, which is the rate times the sign of the gradient, and the decay."""
    layer = nn.Linear(1, 1)
    with torch.no_grad():
        layer.weight.fill_(2.0)
        layer.bias.fill_(2.0)
    optimizer = make_optimizer(layer, 1.0, 0.5)
    set_learning_rate(optimizer, 0.1)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert layer.weight.item() == pytest.approx(2.0 * (1 - 0.1 * 0.5) - 0.1)
    assert layer.bias.item() == pytest.approx(2.0 - 0.1)


@pytest.mark.parametrize("scratch", [False, True])
def test_each_model_has_its_epochs_and_its_rate(scratch: bool, tmp_path: Path) -> None:
    settings = ["train.epochs=8", "train.finetune_epochs=3", "train.lr=0.5", "train.finetune_lr=0.25"]
    config = with_settings(Config(), [*settings, f"train.from_scratch={str(scratch).lower()}"])
    jobs = {
        model: training_job(config, Run(tmp_path), model) for model in ("fp16", "fp16_control", "nvfp4", "nvfp4_ptq")
    }
    whole, tuned = (8, 0.5), (3, 0.25)
    found = {model: (job.epochs, job.lr) for model, job in jobs.items()}
    assert found == {
        "fp16": whole,
        "fp16_control": tuned,
        "nvfp4": whole if scratch else tuned,
        "nvfp4_ptq": (0, 0.25),
    }


def test_every_third_epoch_and_the_last_are_scored(tiny: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    settings = [f"model.spec={SPEC}", "train.epochs=5", "train.evaluate_every=3"]
    train_models(with_settings(tiny, settings), run, ("fp16",))
    lines = (run.model_dir("fp16") / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["miou"] is not None for line in lines] == [False, False, True, False, True]


def test_adamax_skips_a_step_of_non_finite_gradients() -> None:
    """What a loss scaler tells it; every other step is torch's."""
    torch.manual_seed(0)
    layer, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(layer.state_dict())
    ours = make_optimizer(layer, 0.1, 0.0, name="adamax")
    theirs = torch.optim.Adamax(plain.parameters(), lr=0.1)
    for bad in (True, False, True, False):
        value = torch.inf if bad else 0.5
        for model in (layer, plain):
            for number, parameter in enumerate(model.parameters(), start=1):
                parameter.grad = torch.full_like(parameter, value * number)
        ours.found_inf = torch.tensor([float(bad)])  # type: ignore[attr-defined]
        ours.step()
        if not bad:
            theirs.step()
        for one, other in zip(layer.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)
            if not bad:
                assert torch.equal(ours.state[one]["exp_inf"], theirs.state[other]["exp_inf"])
