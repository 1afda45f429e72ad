"""Telemetry inside the loop: the schedule, the same weights with and without it, resume to the line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.qat import load_model, quantized_layers
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.logging.jsonl_tracker import read_entries
from fp4deploy.train.logging.telemetry import STATE, read_gradients
from fp4deploy.train.logging.tracker import EPOCH, SAMPLE, Entry
from fp4deploy.train.loop import Trainer
from tests.train.launch import copy_of
from tests.train.small_network import SPEC

COMMON = [
    "data.height=32",
    "data.width=32",
    "train.epochs=3",
    "train.finetune_epochs=2",
    "train.batch_size=4",
    "telemetry.every=2",
]
SMALL, UNET = [f"model.spec={SPEC}", *COMMON], ["model.scale=0.125", *COMMON]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=12, val=4, size=32, seed=0)
    return folder


@pytest.fixture
def config(data: Path) -> Config:
    return load_config(None, [f"data.root={data}", *SMALL])


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = create_run(tmp_path_factory.mktemp("runs") / "straight")
    train_models(load_config(None, [f"data.root={data}", *SMALL]), run)
    return run


def entries(run: Run, model: str) -> list[Entry]:
    return read_entries(run.model_dir(model) / "telemetry.jsonl")


def samples(run: Run, model: str) -> list[Entry]:
    return [entry for entry in entries(run, model) if entry.kind == SAMPLE]


def same_weights(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_every_nth_step_and_the_last_are_sampled(straight: Run) -> None:
    assert [(entry.step, entry.epoch) for entry in samples(straight, "fp16")] == [
        (1, 1), (3, 1), (5, 2), (7, 3), (9, 3),
    ]  # fmt: skip
    assert [entry.step for entry in samples(straight, "nvfp4")] == [1, 3, 5, 6]
    epochs = [entry for entry in entries(straight, "fp16") if entry.kind == EPOCH]
    metrics = [json.loads(line) for line in (straight.model_dir("fp16") / "metrics.jsonl").read_text().splitlines()]
    assert [(e.step, e.epoch, e.values["loss"]) for e in epochs] == [
        (line["step"], line["epoch"], pytest.approx(line["loss"], rel=1e-8)) for line in metrics
    ]


def test_what_is_tracked(data: Path, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(load_config(None, [f"data.root={data}", *UNET, "train.epochs=1"]), run)
    fp16, nvfp4 = samples(run, "fp16"), samples(run, "nvfp4")
    network, _ = load_model(run.checkpoint("nvfp4"))
    quantized = quantized_layers(network)
    assert len(quantized) == 11
    for entry in fp16:
        assert not entry.codes
        assert entry.layers["head"].keys() == {"weight", "activation", "gradient"}
    for number, entry in enumerate(nvfp4):
        assert entry.codes.keys() == quantized.keys()
        assert entry.values["gradient_norm"] > 0
        for name in quantized:
            weight = entry.layers[name]["weight"]
            assert (weight["flips"] is None) == (number == 0)
            assert 15 < (weight["sqnr_db"] or 0) < 30
            assert (entry.layers[name]["activation"]["correlation"] or 0) > 0.9
        assert "sqnr_db" not in entry.layers["head"]["weight"]
    assert any((entry.layers["encoder.0.conv2"]["weight"]["flips"] or 0) > 0 for entry in nvfp4)


@pytest.mark.parametrize("recipe", ["nvfp4_qat", "nvfp4_train"])
def test_the_same_weights_with_and_without(data: Path, tmp_path: Path, recipe: str) -> None:
    runs = []
    for every in (0, 1):
        settings = [f"data.root={data}", *UNET, f"telemetry.every={every}", f"recipe={recipe}", "train.epochs=1"]
        run = create_run(tmp_path / f"every{every}")
        train_models(load_config(None, settings), run, ("nvfp4",), from_scratch=True)
        runs.append(run)
    assert same_weights(*(run.model_dir("nvfp4") / "state" / "last.safetensors" for run in runs))
    assert not (runs[0].model_dir("nvfp4") / "telemetry.jsonl").exists()
    assert not (runs[0].model_dir("nvfp4") / "state" / STATE).exists()
    assert len(samples(runs[1], "nvfp4")) == 3


@pytest.mark.parametrize(
    ("step", "error"),
    [(2, KeyboardInterrupt()), (3, KeyboardInterrupt()), (3, RuntimeError("crash")), (4, RuntimeError("crash"))],
)
def test_a_resumed_training_tracks_the_same(
    config: Config, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, error: BaseException
) -> None:
    """Ctrl-C saves inside the epoch, a crash falls back to the last one; both repeat no line and lose none."""
    run = copy_of(straight, tmp_path / "run", ["fp16"])
    original = Trainer.step

    def interrupted(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        if self.job.model == "nvfp4" and self.progress.step == step:
            if isinstance(error, RuntimeError):
                raise error
            self.interrupt.requested = True

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(type(error)):
            train_models(config, run, resume=True)
    train_models(config, run, resume=True)
    for model in ("fp16", "nvfp4"):
        assert entries(run, model) == entries(straight, model)
        first, second = read_gradients(run.model_dir(model)), read_gradients(straight.model_dir(model))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_lost_or_foreign_telemetry_state_costs_the_flips_only(
    config: Config, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, damage in enumerate((None, b"damaged")):
        run = copy_of(straight, tmp_path / f"run{number}", ["fp16"])
        original = Trainer.step

        def interrupted(self: Trainer, *batch: torch.Tensor, original: Any = original) -> None:
            original(self, *batch)
            self.interrupt.requested = self.job.model == "nvfp4" and self.progress.step == 3

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train_models(config, run, resume=True)
        state = run.model_dir("nvfp4") / "state" / STATE
        if damage is None:
            state.unlink()
        else:
            state.write_bytes(damage)
        train_models(config, run, resume=True)
        assert same_weights(run.checkpoint("nvfp4"), straight.checkpoint("nvfp4"))
        mine, theirs = samples(run, "nvfp4"), samples(straight, "nvfp4")
        assert [entry.step for entry in mine] == [entry.step for entry in theirs]
        assert mine[2].layers["body"]["weight"]["flips"] is None
        assert mine[3] == theirs[3]


def test_another_interval_may_be_chosen_on_resume(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "run")
    original = Trainer.step

    def interrupted(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        self.interrupt.requested = self.progress.step == 4

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train_models(config, run, ("fp16",))
    train_models(with_settings(config, ["telemetry.every=5"]), run, ("fp16",), resume=True)
    assert [entry.step for entry in samples(run, "fp16")] == [1, 3, 6, 9]


@pytest.mark.variants
def test_a_compiled_model_is_probed(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled forward ignores hooks; a backend that runs the graph as it is needs no compiler.

    Evaluation is not compiled here: it would be traced again, and telemetry does not see it.
    """
    compile_, evaluate = torch.compile, Trainer.evaluate

    def eagerly(self: Trainer, *arguments: Any) -> Any:
        with torch.compiler.set_stance("force_eager"):
            return evaluate(self, *arguments)

    monkeypatch.setattr(Trainer, "evaluate", eagerly)
    monkeypatch.setattr(torch, "compile", lambda *args, **named: compile_(*args, **{**named, "backend": "eager"}))
    run = create_run(tmp_path / "run")
    settings = ["train.compile=true", "train.epochs=1", "telemetry.every=2"]
    train_models(with_settings(config, settings), run, ("nvfp4",), from_scratch=True)
    torch._dynamo.reset()
    found = samples(run, "nvfp4")
    assert [entry.step for entry in found] == [1, 3]
    for entry in found:
        assert (entry.layers["body"]["activation"]["sqnr_db"] or 0) > 5
        assert entry.layers["stem"]["activation"]["count"] == 2 * 3 * 32 * 32


def test_accumulated_steps_are_sampled_once(config: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    train_models(with_settings(config, ["train.accumulate=2", "telemetry.every=1"]), run, ("fp16",))
    assert [entry.step for entry in samples(run, "fp16")] == [1, 2, 3, 4, 5, 6]


def test_a_missing_tracker_is_refused_before_anything_is_trained(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = Run(tmp_path / "run")
    with pytest.raises(UnavailableError, match="'wandb' needs wandb, which is missing"):
        train_models(with_settings(config, ["telemetry.trackers=[jsonl, wandb]"]), run)
    assert not run.path.exists()


@pytest.mark.parametrize("setting", ["telemetry.every=-1", "telemetry.trackers=[csv]", "telemetry.evry=3"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(InputError, match="telemetry"):
        load_config(None, [setting])
