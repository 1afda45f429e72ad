"""The loop on tiny generated data: what is written, exact resume, interruption, full disk, divergence, controls."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.errors import GateError, InputError
from fp4deploy.models import checkpoint as checkpoint_module
from fp4deploy.models import read_card
from fp4deploy.provenance import links
from fp4deploy.qat import load_model
from fp4deploy.runs import Run, create_run
from fp4deploy.train import Config, SegmentationLoss, load_config, train_models, with_settings
from fp4deploy.train.loop import MAX_CONSECUTIVE_SKIPPED, Trainer
from fp4deploy.train.schedule import learning_rate, training_job
from fp4deploy.train.state import read_progress
from tests.modes import LEARNS, LOOKS, Mode, modes
from tests.train.launch import copy_of
from tests.train.small_network import SPEC

SMALL = [
    "model.scale=0.125",
    "data.height=32",
    "data.width=32",
    "train.epochs=3",
    "train.finetune_epochs=2",
    "train.batch_size=4",
    "telemetry.every=0",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return folder


@pytest.fixture
def config(data: Path) -> Config:
    return load_config(None, [f"data.root={data}", *SMALL])


def lines(run: Run, model: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.model_dir(model) / "metrics.jsonl").read_text().splitlines()]


def same_weights(first: Path, second: Path) -> bool:
    a, b = load_file(first), load_file(second)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def timeless(run: Run, model: str) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in ("seconds", "images_per_s")} for line in lines(run, model)]


def stop_after(monkeypatch: pytest.MonkeyPatch, model: str, step: int, error: BaseException) -> None:
    """Raise `error` in the middle of the given step of `model`."""
    original = Trainer.step

    def interrupted(self: Trainer, *batch: torch.Tensor) -> float:
        if self.job.model == model and self.progress.step == step:
            raise error
        return original(self, *batch)

    monkeypatch.setattr(Trainer, "step", interrupted)


SEEN: dict[str, set[Mode]] = {
    "step": set(),
    "evaluate": set(),
}  # how modules run in methods of the trainer of `straight`


@pytest.fixture(scope="module")
def straight(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = create_run(tmp_path_factory.mktemp("runs") / "straight")
    with pytest.MonkeyPatch.context() as patch:
        for name, seen in SEEN.items():
            patch.setattr(Trainer, name, watched(getattr(Trainer, name), seen))
        train_models(load_config(None, [f"data.root={data}", *SMALL]), run, ("fp16", "nvfp4", "fp16_control"))
    return run


def watched(method: Callable[..., Any], seen: set[Mode]) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        with modes() as found:
            result = method(*given)
        seen.update(found)
        return result

    return call


def test_steps_learn_and_evaluations_look(straight: Run) -> None:
    assert straight.models()
    assert {"step": {LEARNS}, "evaluate": {LOOKS}} == SEEN


def test_a_run_leaves_the_files_of_the_contract(straight: Run) -> None:
    assert straight.models() == ["fp16", "nvfp4", "fp16_control"]
    for model in straight.models():
        assert (straight.model_dir(model) / "state" / "last.safetensors").is_file()
    assert load_config(straight.config_path).train.epochs == 3
    assert [line["epoch"] for line in lines(straight, "fp16")] == [1, 2, 3]
    assert lines(straight, "fp16")[0]["per_class"].keys() >= {"background", "circle"}
    card = read_card(straight.checkpoint("nvfp4"))
    assert (card.precision, card.recipe, card.background) == ("nvfp4", "nvfp4_qat", True)
    for model in straight.models():
        load_model(straight.checkpoint(model))


def test_best_checkpoint_is_that_of_the_best_epoch(straight: Run) -> None:
    from safetensors import safe_open

    for model in straight.models():
        with safe_open(straight.checkpoint(model), framework="pt") as file:
            recorded = float(file.metadata()["fp4deploy.miou"])
        assert recorded == max(line["miou"] for line in lines(straight, model))


def test_a_training_notes_its_data_and_what_it_started_from(straight: Run, data: Path) -> None:
    assert {link.path: [source.path for source in link.inputs] for link in links(straight)} == {
        "fp16/best.safetensors": [str(data)],
        "nvfp4/best.safetensors": ["fp16/best.safetensors", str(data)],
        "fp16_control/best.safetensors": ["fp16/best.safetensors", str(data)],
    }


def test_control_trains_exactly_as_long_as_nvfp4(straight: Run) -> None:
    control, nvfp4 = lines(straight, "fp16_control"), lines(straight, "nvfp4")
    assert [(line["epoch"], line["step"], line["lr"]) for line in control] == [
        (line["epoch"], line["step"], line["lr"]) for line in nvfp4
    ]
    assert control[-1]["loss"] != nvfp4[-1]["loss"]


def test_same_seed_same_weights(config: Config, straight: Run, tmp_path: Path) -> None:
    again = create_run(tmp_path / "again")
    train_models(config, again, ("fp16",))
    assert same_weights(straight.checkpoint("fp16"), again.checkpoint("fp16"))


@pytest.mark.parametrize(("model", "step"), [("fp16", 1), ("fp16", 5), ("nvfp4", 0), ("nvfp4", 3)])
def test_interrupted_and_resumed_equals_straight(
    config: Config, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, step: int
) -> None:
    run = copy_of(straight, tmp_path / "run", ["fp16"] if model == "nvfp4" else [])
    models = ("fp16",) if model == "fp16" else ("fp16", "nvfp4")
    with monkeypatch.context() as patch:
        stop_after(patch, model, step, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            train_models(config, run, models, resume=True)
    train_models(config, run, models, resume=True)
    for name in models:
        assert timeless(run, name) == timeless(straight, name)
        assert same_weights(run.checkpoint(name), straight.checkpoint(name))
        assert same_weights(
            run.model_dir(name) / "state" / "last.safetensors", straight.model_dir(name) / "state" / "last.safetensors"
        )


def test_a_delayed_amax_resumes_exactly(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside an epoch, where the next step quantises with what was tracked before the interruption."""
    settings = with_settings(config, ["recipe=nvfp4_qat_delayed", "train.from_scratch=true", "train.epochs=2"])
    runs = [create_run(tmp_path / name) for name in ("straight", "interrupted")]
    train_models(settings, runs[0], ("nvfp4",))
    save_at, original = 1, Trainer.step

    def signalled(self: Trainer, *batch: torch.Tensor) -> None:
        original(self, *batch)
        self.interrupt.requested = self.progress.step == save_at

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", signalled)
        with pytest.raises(KeyboardInterrupt):
            train_models(settings, runs[1], ("nvfp4",))
    train_models(settings, runs[1], ("nvfp4",), resume=True)
    assert read_card(runs[1].checkpoint("nvfp4")).recipe == "nvfp4_qat_delayed"
    assert timeless(runs[0], "nvfp4") == timeless(runs[1], "nvfp4")
    states = [run.model_dir("nvfp4") / "state" / "last.safetensors" for run in runs]
    assert same_weights(*states)
    load_model(runs[1].checkpoint("nvfp4"))


def test_resuming_a_finished_run_trains_nothing(config: Config, straight: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    before = timeless(straight, "fp16")
    stop_after(monkeypatch, "fp16", 0, AssertionError("trained again"))
    result = train_models(config, straight, ("fp16",), resume=True)["fp16"]
    assert timeless(straight, "fp16") == before
    assert result.best_score == max(line["miou"] for line in before)
    assert result.epochs == 3


def fail_from(monkeypatch: pytest.MonkeyPatch, write: int) -> None:
    """The disk is full from the given tensor file on; half of that file is written first."""
    original, count = checkpoint_module.save_file, [0]

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        count[0] += 1
        if count[0] >= write:
            Path(path).write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint_module, "save_file", full)


@pytest.mark.parametrize("write", [1, 2, 3, 4])
def test_a_full_disk_keeps_the_last_good_files(
    config: Config, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: int
) -> None:
    run = create_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        fail_from(patch, write)
        with pytest.raises(InputError, match="No space left"):
            train_models(config, run, ("fp16",))
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert not [path for path in files if path.read_bytes() == b"half a file"]
    if run.checkpoint("fp16").is_file():
        load_model(run.checkpoint("fp16"))
    train_models(config, run, ("fp16",), resume=True)
    assert timeless(run, "fp16") == timeless(straight, "fp16")
    assert same_weights(run.checkpoint("fp16"), straight.checkpoint("fp16"))


def with_loss(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> None:
    """Multiply the loss by NaN in the steps that `bad` names."""
    original = Trainer.step

    def poisoned(self: Trainer, *batch: torch.Tensor) -> float:
        loss, step = self.loss, self.progress.step
        if bad(step):
            self.loss = lambda logits, target: loss(logits, target) * float("nan")  # type: ignore[assignment]
        try:
            return original(self, *batch)
        finally:
            self.loss = loss

    monkeypatch.setattr(Trainer, "step", poisoned)


def test_a_non_finite_step_is_skipped_and_counted(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_loss(monkeypatch, lambda step: step in (0, 2))
    run = create_run(tmp_path / "run")
    train_models(config, run, ("fp16",))
    written, counters = lines(run, "fp16"), read_progress(training_job(config, run, "fp16").state_path)
    assert [line["skipped_steps"] for line in written] == [1, 1, 0]
    assert (counters.epoch, counters.step, counters.skipped) == (3, written[-1]["step"], 2), "of all epochs"
    assert counters.seconds == pytest.approx(sum(line["seconds"] for line in written), abs=0.01)
    assert all(value.isfinite().all() for value in load_file(run.checkpoint("fp16")).values())


def test_a_diverged_training_ends_with_one_error(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_loss(monkeypatch, lambda step: step >= 2)
    long = config.model_copy(update={"train": config.train.model_copy(update={"epochs": MAX_CONSECUTIVE_SKIPPED})})
    run = create_run(tmp_path / "run")
    with pytest.raises(GateError, match=r"consecutive steps in epoch .* lower --set train\.lr"):
        train_models(long, run, ("fp16",))
    load_model(run.checkpoint("fp16"))


def test_accumulated_gradients_are_those_of_the_large_batch(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentationLoss, "of", lambda self, logits, target: logits.square().mean())
    first_gradients: list[dict[str, torch.Tensor]] = []
    original = Trainer._update

    def recorded(self: Trainer) -> None:
        if self.progress.step == 0:
            first_gradients.append({name: p.grad.clone() for name, p in self.bare.named_parameters()})
        original(self)

    monkeypatch.setattr(Trainer, "_update", recorded)
    steps = []
    for name, batch, accumulate in (("large", 8, 1), ("small", 2, 4), ("uneven", 2, 3)):
        run = create_run(tmp_path / name)
        settings = [f"train.batch_size={batch}", f"train.accumulate={accumulate}", "train.epochs=1"]
        train_models(with_settings(config, settings), run, ("fp16",))
        steps.append(lines(run, "fp16")[-1]["step"])
    assert steps == [1, 1, 2]
    large, small, _ = first_gradients
    for name, value in large.items():
        torch.testing.assert_close(small[name], value, rtol=1e-3, atol=1e-5 * value.abs().max().item() + 1e-7)


def test_a_weight_for_an_unknown_class_is_refused(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="'cirle'.* Did you mean 'circle'"):
        train_models(with_settings(config, ["train.class_weights.cirle=2"]), Run(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_from_scratch_uses_the_long_schedule(config: Config, tmp_path: Path) -> None:
    run = create_run(tmp_path / "run")
    result = train_models(config, run, ("nvfp4",), from_scratch=True)["nvfp4"]
    assert result.epochs == config.train.epochs
    assert load_config(run.config_path).train.from_scratch


def test_fine_tuning_without_a_starting_point_names_the_ways_out(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"--models fp16,nvfp4.*init_checkpoint.*--from-scratch"):
        train_models(config, create_run(tmp_path / "run"), ("nvfp4",))


def test_starting_from_a_checkpoint_of_another_scale_is_refused(config: Config, straight: Run, tmp_path: Path) -> None:
    other = load_config(
        None,
        [f"data.root={config.data.root}", f"train.init_checkpoint={straight.checkpoint('fp16')}", "model.scale=0.25"],
    )
    with pytest.raises(InputError, match=r"scale 0\.125, and this run has scale 0\.25"):
        train_models(other, create_run(tmp_path / "run"), ("nvfp4",))


def test_starting_from_a_checkpoint_of_other_classes_is_refused(config: Config, straight: Run, tmp_path: Path) -> None:
    names = read_card(straight.checkpoint("fp16")).class_names[1:]
    other = with_settings(
        config,
        [f"train.init_checkpoint={straight.checkpoint('fp16')}", f"data.classes=[{', '.join(reversed(names))}]"],
    )
    with pytest.raises(InputError, match="trained on the classes"):
        train_models(other, create_run(tmp_path / "run"), ("nvfp4",))


def test_fine_tuning_from_an_unfinished_fp16_is_refused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create_run(tmp_path / "run")
    stop_after(monkeypatch, "fp16", 3, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        train_models(config, run)
    with pytest.raises(InputError, match=r"trained 1 of 3 epochs.*--models fp16,nvfp4 --resume"):
        train_models(config, run, ("nvfp4",), resume=True)


def test_a_trained_model_is_not_overwritten(config: Config, straight: Run) -> None:
    with pytest.raises(InputError, match="holds a fp16 already"):
        train_models(config, straight, ("fp16",))


def test_a_resume_with_another_epoch_length_is_refused(config: Config, straight: Run, tmp_path: Path) -> None:
    generate_shapes(tmp_path / "data", train=16, val=4, size=32, seed=0)
    other = with_settings(config, [f"data.root={tmp_path / 'data'}"])
    with pytest.raises(InputError, match="2 batches an epoch, and there are 4 now"):
        train_models(other, straight, ("fp16",), resume=True)
    load_config(straight.config_path)


def test_a_resume_with_other_settings_is_refused(config: Config, straight: Run) -> None:
    changed = config.model_copy(update={"seed": 5})
    with pytest.raises(InputError, match="seed: 0 -> 5"):
        train_models(changed, straight, resume=True)


def test_a_damaged_state_is_one_clear_error(config: Config, straight: Run, tmp_path: Path) -> None:
    run = copy_of(straight, tmp_path / "run", ["fp16"])
    (run.model_dir("fp16") / "state" / "last.safetensors").write_bytes(b"damaged")
    with pytest.raises(InputError, match="cannot be resumed from"):
        train_models(config, run, ("fp16",), resume=True)


def test_unknown_model_and_missing_data(config: Config, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="Did you mean 'nvfp4'"):
        train_models(config, Run(tmp_path), ("nvfp5",))
    with pytest.raises(InputError, match="names no data"):
        train_models(Config(), Run(tmp_path))


def test_learning_rate_rises_then_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == pytest.approx(1.0)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 1e-3
    assert learning_rate(0, 1, 1.0, 0.0) == 1.0


def test_a_short_training_says_that_it_is_not_fused(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fp4deploy.train.loop.available", lambda device: True)  # as on a GPU
    shorter = with_settings(config, [f"model.spec={SPEC}", "train.fused=auto", "train.epochs=2"])
    train_models(shorter, create_run(tmp_path / "auto"), ("fp16", "nvfp4"))
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "fused" in line)
    assert line.startswith("nvfp4: train.fused=auto does not fuse, since it compiles from 10,000 steps on and ")
    assert "has 4: more epochs, or train.compile=true" in line
    train_models(
        with_settings(shorter, ["train.fused=true"]), create_run(tmp_path / "true"), ("nvfp4",), from_scratch=True
    )
    assert "fuse" not in capsys.readouterr().err
