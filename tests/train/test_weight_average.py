"""Averaged weights: the arithmetic, what is evaluated and kept, exact resume, quantiser state."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.qat import RECIPES, load_model
from fp4deploy.qat.recipes import WeightReset
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, train_models, with_settings
from fp4deploy.train.loop import Trainer
from fp4deploy.train.optimizer import WeightAverage
from tests.train.launch import copy_of
from tests.train.small_network import SPEC


def test_the_average_is_the_recursion_with_a_short_memory_at_first() -> None:
    layer = nn.Linear(2, 1, bias=False)
    average = WeightAverage(layer, 0.9)
    shadow, path = layer.weight.detach().clone().double(), [0.5, -1.0, 2.0, 4.0]
    for step, value in enumerate(path * 40):
        with torch.no_grad():
            layer.weight.fill_(value)
        average.update(step)
        decay = min(0.9, (1 + step) / (10 + step))
        shadow = decay * shadow + (1 - decay) * value
        torch.testing.assert_close(average.state()["weight"].double(), shadow, rtol=1e-5, atol=1e-6)


def test_the_model_has_its_own_weights_again_even_after_an_error() -> None:
    layer = nn.Linear(3, 3)
    average = WeightAverage(layer, 0.5)
    before = layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(KeyError), average.applied():
        assert torch.equal(layer.weight, before)
        raise KeyError
    assert torch.equal(layer.weight, before + 1)


def test_the_average_is_what_is_scored_and_kept(tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every epoch is an improvement here, so that the checkpoint is that of the last one, as the state is."""
    scored, original = [], Trainer.evaluate

    def rising(self: Trainer, *arguments: Any) -> object:
        scores = original(self, *arguments)
        scored.append(next(iter(self.bare.parameters())).detach().clone())
        object.__setattr__(scores, "miou", 0.1 * len(scored))
        return scores

    monkeypatch.setattr(Trainer, "evaluate", rising)
    run = create_run(tmp_path / "run")
    train_models(with_settings(tiny, ["train.ema=0.9"]), run, ("fp16", "nvfp4"))
    for model in ("fp16", "nvfp4"):
        best, state = (
            load_file(run.model_dir(model) / name) for name in ("best.safetensors", "state/last.safetensors")
        )
        names = {name.removeprefix("average.") for name in state if name.startswith("average.")}
        assert names == {name for name in best if not name.endswith("input_amax")}
        for name in names:
            assert torch.equal(best[name], state[f"average.{name}"])
        assert any(not torch.equal(best[name], state[f"model.{name}"]) for name in names)
        amaxes = [name for name in best if name.endswith("input_amax")]
        assert len(amaxes) == (11 if model == "nvfp4" else 0)
        assert all(torch.equal(best[name], state[f"model.{name}"]) for name in amaxes)
        load_model(run.checkpoint(model))
    first = "encoder.0.conv1.weight"
    assert torch.equal(scored[1], load_file(run.model_dir("fp16") / "state/last.safetensors")[f"model.{first}"])


def test_an_interrupted_average_and_window_of_resets_resume_exactly(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = WeightReset(start=0.0, period=4, window=2, ratio=2.0)
    monkeypatch.setitem(RECIPES, "nvfp4_qat", replace(RECIPES["nvfp4_qat"], weight_reset=often))
    settings = with_settings(
        tiny, [f"model.spec={SPEC}", "train.ema=0.9", "train.batch_size=2", "train.from_scratch=true"]
    )
    runs, original = [create_run(tmp_path / name) for name in ("straight", "interrupted")], Trainer.step
    train_models(settings, runs[0], ("nvfp4",))

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        self.interrupt.requested = self.progress.step == 6

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            train_models(settings, runs[1], ("nvfp4",))
    stopped = load_file(runs[1].model_dir("nvfp4") / "state/last.safetensors")
    assert {name.split(".")[-1] for name in stopped if name.startswith("resets.")} == {
        "jumped", "moved", "quantized", "weight",
    }  # fmt: skip
    train_models(settings, runs[1], ("nvfp4",), resume=True)
    for name in ("best.safetensors", "state/last.safetensors"):
        first, second = (load_file(run.model_dir("nvfp4") / name) for run in runs)
        assert first.keys() == second.keys()
        assert all(torch.equal(value, second[key]) for key, value in first.items())
    losses = [[json.loads(line)["loss"] for line in (run.model_dir("nvfp4") / "metrics.jsonl").open()] for run in runs]
    assert losses[0] == losses[1]


def test_a_state_without_an_average_is_refused(tiny: Config, tiny_run: Run, tmp_path: Path) -> None:
    run = copy_of(tiny_run, tmp_path / "run", ["fp16"])
    with pytest.raises(InputError, match="began with other settings"):
        train_models(with_settings(tiny, ["train.ema=0.9"]), run, ("fp16",), resume=True)
    run.config_path.unlink()
    with pytest.raises(InputError, match="cannot be resumed from"):
        train_models(with_settings(tiny, ["train.ema=0.9"]), run, ("fp16",), resume=True)
