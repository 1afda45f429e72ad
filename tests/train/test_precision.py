"""train.precision: the arithmetic of a training, what its models are deployed in, and what a training in FP16 says."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp4deploy.data import generate_shapes
from fp4deploy.errors import GateError, InputError, Interrupted
from fp4deploy.models import read_card
from fp4deploy.qat import load_model
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, loop, train_models, with_settings
from fp4deploy.train.optimizer import skip_where
from tests.train.small_network import SPEC, Small

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the arithmetic of a CPU")
SETTINGS = ["data.height=32", "data.width=32", "train.epochs=1", "train.finetune_epochs=1", "train.batch_size=2"]


@pytest.fixture
def config(tmp_path: Path) -> Config:
    generate_shapes(tmp_path / "data", train=4, val=2, size=32, seed=0)
    return load_config(None, [f"model.spec={SPEC}", f"data.root={tmp_path / 'data'}", "data.workers=0", *SETTINGS])


def arithmetic(run: Run, model: str) -> set[str]:
    lines = (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["arithmetic"] for line in lines}


@pytest.mark.parametrize(
    ("precision", "expected", "rest"),
    [("auto", "fp32", "fp16"), ("fp32", "fp32", "fp16"), ("bf16", "bf16 autocast", "bf16")],
)
@on_cpu
def test_arithmetic_and_what_is_deployed(
    config: Config, tmp_path: Path, precision: str, expected: str, rest: str
) -> None:
    seen = set[torch.dtype]()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda layer, _, y: seen.add(y.dtype) if isinstance(layer, torch.nn.Conv2d) and layer.training else None
    )
    run = create_run(tmp_path / "run")
    train_models(with_settings(config, [f"train.precision={precision}", "train.ema=0.9"]), run)
    handle.remove()
    assert seen == {torch.bfloat16 if precision == "bf16" else torch.float32}
    for model in ("fp16", "nvfp4"):
        assert arithmetic(run, model) == {expected}
        states = [run.checkpoint(model), run.model_dir(model) / "state" / "last.safetensors"]
        kept = {tensor.dtype for path in states for tensor in load_file(path).values() if tensor.is_floating_point()}
        assert kept == {torch.float32}  # master weights, their average, moments of the optimiser, statistics
        assert read_card(run.checkpoint(model)).rest == rest
        network, _ = load_model(run.checkpoint(model), model=SPEC)
        weight: Any = network.get_submodule("stem").weight
        assert torch.equal(weight, weight.to(torch.bfloat16 if rest == "bf16" else torch.float16).float())


@on_cpu
def test_fp16_needs_a_gpu(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.precision is fp16, whose loss scaler needs a GPU"):
        train_models(with_settings(config, ["train.precision=fp16"]), create_run(tmp_path / "run"))


@on_cpu
@pytest.mark.parametrize("given", [False, True])
def test_fine_tuning_keeps_the_precision_of_its_start(config: Config, tmp_path: Path, given: bool) -> None:
    """Of the run's own FP16 model, or of a checkpoint that is named; also when it is resumed."""
    first, run = create_run(tmp_path / "first"), create_run(tmp_path / "run")
    train_models(with_settings(config, ["train.precision=bf16"]), first, ("fp16",))
    start = f"train.init_checkpoint={first.checkpoint('fp16')}"
    tuned = with_settings(config, [start, "train.precision=auto"] if given else [start, "train.precision=fp32"])
    for resume in (False, True):
        train_models(tuned, run, ("nvfp4",), resume=resume)
        assert read_card(run.checkpoint("nvfp4")).rest == ("bf16" if given else "fp16")


@on_cpu
def test_initial_weights_of_a_checkpoint_bring_its_precision(config: Config, tmp_path: Path) -> None:
    """Weights without a card, as of another tool, do not."""
    first = create_run(tmp_path / "first")
    train_models(with_settings(config, ["train.precision=bf16"]), first, ("fp16",))
    save_file(load_file(first.checkpoint("fp16")), tmp_path / "weights.safetensors")
    for name, rest in ((first.checkpoint("fp16"), "bf16"), (tmp_path / "weights.safetensors", "fp16")):
        run = create_run(tmp_path / rest)
        for resume in (False, True):
            train_models(with_settings(config, [f"model.init={name}"]), run, ("fp16",), resume=resume)
            assert read_card(run.checkpoint("fp16")).rest == rest


@on_cpu
def test_a_resumed_run_keeps_its_precision(config: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(with_settings(config, ["train.precision=bf16"]), run, ("fp16",))
    with pytest.raises(InputError, match=r"train\.precision: bf16 -> fp32"):
        train_models(with_settings(config, ["train.precision=fp32"]), run, ("fp16",), resume=True)


@on_cpu
def test_a_training_in_bf16_resumes_exactly(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients in FP4, averaged weights and telemetry."""
    more = ["train.precision=bf16", "recipe=nvfp4_train", "train.ema=0.9", "telemetry.every=1", "telemetry.plots=false"]
    config = with_settings(config, [*more, "train.from_scratch=true"])
    straight, run, step = create_run(tmp_path / "straight"), create_run(tmp_path / "run"), loop.Trainer.step
    train_models(config, straight, ("nvfp4",))

    def signalled(self: loop.Trainer, *batch: torch.Tensor) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(loop.Trainer, "step", signalled)
        with pytest.raises(Interrupted):
            train_models(config, run, ("nvfp4",))
    train_models(config, run, ("nvfp4",), resume=True)
    weights = [load_file(each.checkpoint("nvfp4")) for each in (straight, run)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    samples = [(each.model_dir("nvfp4") / "telemetry.jsonl").read_text().count("\n") for each in (straight, run)]
    assert samples[0] == samples[1] > 0


@on_cpu
def test_a_training_that_overflows_names_the_layer(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured without the autocast that accelerate puts around the module's forward, in which it is infinite."""
    forward = Small.forward

    def overflowing(self: Small, x: torch.Tensor) -> torch.Tensor:
        large = torch.inf if torch.is_autocast_enabled("cpu") else 1e8
        return forward(self, x) * self.body(self.stem(x).abs() * large).amax() * torch.inf

    monkeypatch.setattr(Small, "forward", overflowing)
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPPED", 2)
    init = loop.Trainer.__init__

    def as_on_a_gpu(self: loop.Trainer, *arguments: Any, **options: Any) -> None:
        init(self, *arguments, **options)
        self.autocast = "fp16"

    monkeypatch.setattr(loop.Trainer, "__init__", as_on_a_gpu)
    with pytest.raises(GateError, match=r"leave FP16's range: body.*65504.*--set train\.precision=bf16\.$"):
        train_models(with_settings(config, ["train.precision=bf16"]), create_run(tmp_path / "run"), ("fp16",))


def test_a_step_is_skipped_without_a_loss_scaler() -> None:
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    seen = []
    for gradient in (1.0, torch.nan, 1.0):
        weight.grad = torch.full((4,), gradient)
        skip_where(optimizer, ~torch.isfinite(weight.grad.norm()))
        optimizer.step()
        seen.append((float(weight.detach()[0]), float(optimizer.state[weight]["step"])))
    assert seen[0] == seen[1]
    assert (seen[2][0] < seen[1][0], seen[2][1]) == (True, 2.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_unet_trains_on_a_gpu(tmp_path: Path, precision: str, fused: str) -> None:
    generate_shapes(tmp_path / "data", train=8, val=4, size=64, seed=0)
    settings = ["model.scale=0.125", "data.height=64", "data.width=64", "train.batch_size=2", "train.epochs=3"]
    more = [f"data.root={tmp_path / 'data'}", f"train.precision={precision}", f"train.fused={fused}"]
    run = create_run(tmp_path / "run")
    train_models(load_config(None, [*settings, *more]), run)
    assert arithmetic(run, "nvfp4") == {"fp32" if precision == "fp32" else "bf16 autocast"}
    lines = [json.loads(line) for line in (run.model_dir("nvfp4") / "metrics.jsonl").read_text().splitlines()]
    assert {line["kernels"] for line in lines} <= ({"torch"} if precision == "fp32" else {"cuda", "torch"})
    assert lines[-1]["loss"] < lines[0]["loss"] * 1.5
    assert not any(line["skipped_steps"] for line in lines)
