"""On a GPU: FP16 autocast with a loss scaler, skipped steps, resume inside an epoch with the scaler's state."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.plugins import available
from fp4deploy.qat.recipes import RECIPES
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.loop import Trainer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    generate_shapes(tmp_path / "data", train=8, val=4, size=64, seed=0)
    settings = ["model.scale=0.125", "data.height=64", "data.width=64", "train.batch_size=2", "data.workers=2"]
    return load_config(None, [f"data.root={tmp_path / 'data'}", *settings, "train.epochs=3", "train.finetune_epochs=2"])


def lines(run: Run, model: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()]


def test_all_models_train_under_fp16_autocast(config: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(config, run, ("fp16", "nvfp4", "fp16_control"))
    for model in run.models():
        for line in lines(run, model):
            assert line["arithmetic"] == "fp16 autocast"
            assert line["peak_memory_bytes"] > 0
        weights = load_file(run.checkpoint(model))
        assert all(value.dtype == torch.float32 and value.isfinite().all() for value in weights.values())
    assert lines(run, "fp16")[-1]["loss"] < lines(run, "fp16")[0]["loss"]


@pytest.mark.parametrize("fused", [True, False])
def test_a_delayed_amax_trains(config: Config, tmp_path: Path, fused: bool) -> None:
    run = create_run(tmp_path / "run")
    settings = ["recipe=nvfp4_qat_delayed", "train.from_scratch=true", f"train.fused={str(fused).lower()}"]
    train_models(with_settings(config, settings), run, ("nvfp4",))
    assert {line["kernels"] for line in lines(run, "nvfp4")} == ({"cuda"} if fused and available() else {"torch"})
    assert lines(run, "nvfp4")[-1]["loss"] < lines(run, "nvfp4")[0]["loss"]
    amaxes = [value for name, value in load_file(run.checkpoint("nvfp4")).items() if name.endswith("input_amax")]
    assert len(amaxes) == 21
    assert all(0 < value < 1e4 for value in amaxes)


def test_every_layer_quantised_trains_on_the_kernels(config: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    settings = ['quant.include=["*"]', "train.from_scratch=true"]
    train_models(with_settings(config, settings), run, ("nvfp4",))
    assert {line["kernels"] for line in lines(run, "nvfp4")} == ({"cuda"} if available() else {"torch"})
    assert lines(run, "nvfp4")[-1]["loss"] < lines(run, "nvfp4")[0]["loss"]
    amaxes = [name for name in load_file(run.checkpoint("nvfp4")) if name.endswith("input_amax")]
    assert len(amaxes) == 23


def test_a_step_of_non_finite_gradients_is_skipped_by_the_scaler(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, changed = Trainer.step, []

    def poisoned(self: Trainer, *batch: torch.Tensor) -> None:
        if self.progress.step != 6:
            return original(self, *batch)
        loss, before = self.loss, [p.clone() for p in self.bare.parameters()]
        self.loss = lambda logits, target: loss(logits, target) * float("nan")  # type: ignore[assignment]
        original(self, *batch)
        self.loss = loss
        changed.append(any(not torch.equal(p, old) for p, old in zip(self.bare.parameters(), before, strict=True)))
        return None

    monkeypatch.setattr(Trainer, "step", poisoned)
    run = create_run(tmp_path / "run")
    train_models(with_settings(config, ["train.cuda_graph=false"]), run, ("fp16",))
    assert changed == [False]
    assert lines(run, "fp16")[1]["skipped_steps"] >= 1


def test_ctrl_c_saves_the_scaler_and_the_workers_do_not_mind(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, original = create_run(tmp_path / "run"), Trainer.step
    scales: list[float] = []

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        if self.progress.step == 6:
            scales.append(self.accelerator.scaler.get_scale())
            os.kill(os.getpid(), signal.SIGINT)

    def observed(self: Trainer, *batch: torch.Tensor) -> None:
        scales.append(self.accelerator.scaler.get_scale())
        original(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            train_models(config, run, ("fp16",))
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", observed)
        train_models(config, run, ("fp16",), resume=True)
    assert scales[0] == scales[1]
    assert len(scales) == 1 + 6  # 12 steps in all, 6 of them before
    assert [line["step"] for line in lines(run, "fp16")] == [4, 8, 12]


def test_everything_at_once_trains_and_resumes(config: Config, tmp_path: Path) -> None:
    """Averaged weights, class weights, a teacher, damping, first and last layer quantised, on the fused path."""
    settings = ["train.ema=0.99", "train.class_balance=median_frequency", "train.label_smoothing=0.05"]
    settings += ["distill.weight=1", "quant.damping=1e-3", "quant.damping_start=0", "quant.include=['*']"]
    run = create_run(tmp_path / "run")
    models = ("fp16", "fp16_control", "nvfp4", "nvfp4_ptq")
    train_models(with_settings(config, settings), run, models)
    for model in run.models():
        assert {line["kernels"] for line in lines(run, model)} == {"cuda" if available() else "torch"}
        assert all(value.isfinite().all() for value in load_file(run.checkpoint(model)).values())
    again = train_models(with_settings(config, settings), run, models, resume=True)
    assert again["nvfp4"].epochs == 2


@pytest.mark.parametrize("recipe", ["nvfp4_qat+learned", "nvfp4_qat+dynamic", "nvfp4_4o6_qat", "nvfp4_qat_2d"])
def test_recipes_without_fused_kernels_train(config: Config, tmp_path: Path, recipe: str) -> None:
    run = create_run(tmp_path / "run")
    settings = [f"recipe={recipe}", "quant.percentile=99.9", "train.checkpointing=true"]
    train_models(with_settings(config, settings), run, ("fp16", "nvfp4"))
    assert lines(run, "nvfp4")[-1]["loss"] < 1.2 * lines(run, "nvfp4")[0]["loss"]
    assert all(value.isfinite().all() for value in load_file(run.checkpoint("nvfp4")).values())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_trains(config: Config, tmp_path: Path, recipe: str) -> None:
    run = create_run(tmp_path / "run")
    train_models(with_settings(config, [f"recipe={recipe}", "train.from_scratch=true"]), run, ("nvfp4",))
    assert lines(run, "nvfp4")[-1]["loss"] < lines(run, "nvfp4")[0]["loss"]
