"""On a GPU: a training replayed from a CUDA graph, or with inputs computed again, has the bits of the plain one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.models import name_model
from fp4deploy.qat import RECIPES
from fp4deploy.qat.recipes import OutlierControl
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.cuda_graph import LAUNCHED_FIRST, CapturedStep
from fp4deploy.train.loop import Trainer
from tests.train.small_network import SPEC

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

STEPS = 52
LAUNCHED, GRAPH, RECOMPUTE = "train.cuda_graph=false", "train.cuda_graph=true", "train.recompute=true"


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """13 epochs of 4 steps, a sample of telemetry in the middle of some."""
    folder = tmp_path_factory.mktemp("data") / "shapes"
    generate_shapes(folder, train=8, val=2, size=64, seed=0)
    settings = ["model.scale=0.25", "data.height=64", "data.width=64", "train.batch_size=2", "data.workers=0"]
    settings += [
        LAUNCHED,
        "train.epochs=13",
        "train.evaluate_every=13",
        "train.from_scratch=true",
        "telemetry.every=17",
    ]
    return load_config(None, [f"data.root={folder}", *settings])


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str | None]]:
    """For every batch that a graph may take, why it is launched, or None where it is replayed."""
    seen: list[str | None] = []
    original = CapturedStep._replay

    def noted(self: CapturedStep, *batch: torch.Tensor) -> None:
        original(self, *batch)
        seen.append(self.refusal)

    monkeypatch.setattr(CapturedStep, "_replay", noted)
    return seen


def trained(config: Config, folder: Path, model: str, *settings: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(mean loss of each epoch, weights after the last)."""
    run = create_run(folder)
    train_models(with_settings(config, list(settings)), run, (model,))
    return result(run, model)


def result(run: Run, model: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    lines: list[Any] = [json.loads(line) for line in (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS
    return [line["loss"] for line in lines], load_file(run.checkpoint(model))


def assert_same(one: tuple[Any, dict[str, torch.Tensor]], other: tuple[Any, dict[str, torch.Tensor]]) -> None:
    assert one[0] == other[0]
    assert one[1].keys() == other[1].keys()
    assert [name for name, value in one[1].items() if not torch.equal(value, other[1][name])] == []


@pytest.mark.parametrize(
    ("model", "changed"),
    [
        ("fp16", ()),
        ("nvfp4", ()),
        ("nvfp4", ("recipe=nvfp4_qat_delayed", "train.ema=0.9")),
        ("nvfp4", (f"model.spec={SPEC}",)),
        ("nvfp4", ("train.fused=false",)),
        ("fp16", ("train.compile=true",)),
        ("fp16", ("train.checkpointing=true",)),
        ("nvfp4", ("recipe=nvfp4_qat+learned",)),
        ("nvfp4", ("recipe=nvfp4_4o6_qat",)),
        ("nvfp4", ("recipe=nvfp4_train",)),
        ("nvfp4", ("recipe=tetrajet_v2",)),
        ("nvfp4", ("recipe=quartet_2",)),
        ("nvfp4", ("recipe=nvfp4_train", "train.products=fp4")),
        ("nvfp4", ("recipe=mx_baseline",)),
        ("fp16", ("train.class_balance=median_frequency", "train.label_smoothing=0.1")),
        ("nvfp4", ("train.class_weights={circle: 3}",)),
        ("nvfp4", ("task=instance",)),
        ("nvfp4", ("task=detection",)),
        ("nvfp4", ("quant.start=0.5",)),
        ("nvfp4", ("quant.start=0.5", "task=detection")),
    ],
)
def test_every_way_has_the_bits_of_the_plain_training(
    config: Config, tmp_path: Path, replays: list[str | None], model: str, changed: tuple[str, ...]
) -> None:
    name_model(SPEC)
    plain = trained(config, tmp_path / "plain", model, *changed)
    assert replays == []
    assert_same(trained(config, tmp_path / "again", model, *changed, RECOMPUTE), plain)
    assert_same(trained(config, tmp_path / "graph", model, *changed, GRAPH), plain)
    assert replays
    assert set(replays) == {None}
    if not changed:
        assert_same(trained(config, tmp_path / "both", model, GRAPH, RECOMPUTE), plain)


@pytest.mark.parametrize("products", ["emulated", "fp4"])
def test_choosing_outlier_channels_has_the_bits_of_the_plain_training(
    config: Config, tmp_path: Path, replays: list[str | None], monkeypatch: pytest.MonkeyPatch, products: str
) -> None:
    name = "tetrajet_v2_outcontrol"
    soon = replace(RECIPES[name], outlier_control=OutlierControl(share=0.1, start=0.2, window=15))
    monkeypatch.setitem(RECIPES, name, soon)
    settings = (f"recipe={name}", f"train.products={products}")
    plain = trained(config, tmp_path / "plain", "nvfp4", *settings)
    chosen = [value for key, value in plain[1].items() if key.endswith(".outlier_channels")]
    assert chosen
    assert all((value >= 0).all() for value in chosen)
    assert_same(trained(config, tmp_path / "graph", "nvfp4", *settings, GRAPH), plain)
    assert replays
    assert set(replays) == {None}


def test_a_network_compiled_for_fusion_has_the_bits_of_the_plain_training(
    config: Config, tmp_path: Path, replays: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    name_model(SPEC)
    monkeypatch.setattr("fp4deploy.train.loop.STEPS_WORTH_COMPILING", STEPS)
    settings = (f"model.spec={SPEC}", "train.fused=auto")
    plain = trained(config, tmp_path / "plain", "nvfp4", *settings)
    assert_same(trained(config, tmp_path / "graph", "nvfp4", *settings, GRAPH), plain)
    assert replays
    assert set(replays) == {None}


def test_a_distilled_training_has_the_bits_of_the_plain_one(
    config: Config, tmp_path: Path, replays: list[str | None]
) -> None:
    trained(config, tmp_path / "teacher", "fp16")
    teacher = Run(tmp_path / "teacher").checkpoint("fp16")
    settings = ("distill.weight=0.5", f"distill.teacher={teacher}")
    plain = trained(config, tmp_path / "plain", "nvfp4", *settings)
    assert_same(trained(config, tmp_path / "graph", "nvfp4", *settings, GRAPH), plain)
    assert replays
    assert set(replays) == {None}


def test_a_loss_that_waits_for_the_gpu_is_launched(
    config: Config, tmp_path: Path, replays: list[str | None], capfd: pytest.CaptureFixture[str]
) -> None:
    """Objects are matched with outputs on the CPU."""
    trained(config, tmp_path / "run", "nvfp4", "task=instance", "instance.method=set", GRAPH)
    assert replays == []
    assert "waits for the GPU" in capfd.readouterr().err


def test_a_training_with_a_graph_resumes(
    config: Config, tmp_path: Path, replays: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = trained(config, tmp_path / "plain", "nvfp4")
    run, original = create_run(tmp_path / "run"), Trainer.step

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        if self.progress.step == 30:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            train_models(with_settings(config, [GRAPH]), run, ("nvfp4",))
    before = len(replays)
    train_models(with_settings(config, [GRAPH]), run, ("nvfp4",), resume=True)
    assert before > 0
    assert len(replays) - before <= 22 - LAUNCHED_FIRST
    assert set(replays) == {None}
    assert_same(result(run, "nvfp4"), plain)


def test_a_step_that_waits_for_the_gpu_is_launched() -> None:
    ran: list[int] = []

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        ran.append(int(images.sum().item()))

    captured = CapturedStep(step, lambda: None)
    for number in range(LAUNCHED_FIRST + 2):
        captured(torch.full((1,), number, device="cuda"), torch.zeros(1, device="cuda"))
    assert ran == list(range(LAUNCHED_FIRST + 2))
    assert captured.refusal is not None
    assert "waits for the GPU" in captured.refusal
