"""Ctrl-C as a signal, a killed process, a full disk: what is left resumes to the same bits."""

from __future__ import annotations

import copy
import errno
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from fp4deploy.data import generate_shapes
from fp4deploy.errors import InputError, Interrupted
from fp4deploy.models.spec import name_model
from fp4deploy.runs import Run, create_run
from fp4deploy.system.files import append_line
from fp4deploy.train import Config, load_config, train_models, with_settings
from fp4deploy.train.interrupt import Interrupt
from fp4deploy.train.logging.jsonl_tracker import keep_epochs
from fp4deploy.train.logging.running_statistics import EpochStatistics, RunningStatistics
from fp4deploy.train.loop import Trainer
from fp4deploy.train.state import Progress, SavingPace, load_state, read_progress, save_state
from tests.train.launch import assert_same, copy_of, start
from tests.train.small_network import SPEC

SETTINGS = [
    f"model.spec={SPEC}",
    "data.height=32",
    "data.width=32",
    "train.epochs=2",
    "train.finetune_epochs=2",
    "train.batch_size=2",
    "telemetry.every=0",
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("shapes") / "data"
    generate_shapes(folder, train=8, val=4, size=32, seed=0)
    return load_config(None, [f"data.root={folder}", *SETTINGS])


@pytest.fixture(scope="module")
def straight(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = create_run(tmp_path_factory.mktemp("runs") / "straight")
    train_models(config, run)
    return run


@pytest.mark.parametrize(
    ("model", "method", "call", "position"),
    [
        ("fp16", "step", 2, (0, 2)),
        ("fp16", "step", 6, (1, 2)),
        ("nvfp4", "step", 1, (0, 1)),
        ("nvfp4", "evaluate", 1, (0, 4)),
    ],
)
def test_ctrl_c_saves_inside_the_epoch_and_resumes_exactly(
    config: Config,
    straight: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    method: str,
    call: int,
    position: tuple[int, int],
) -> None:
    run = copy_of(straight, tmp_path / "a run", ["fp16"] if model == "nvfp4" else [])
    calls, original = [0], getattr(Trainer, method)

    def signalled(self: Trainer, *arguments: torch.Tensor) -> object:
        calls[0] += self.job.model == model
        if self.job.model == model and calls[0] == call:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, method, signalled)
        with pytest.raises(Interrupted) as stopped:
            train_models(config, run, resume=True)
    assert str(stopped.value) == f"ended by SIGINT; resume with: fp4deploy train --out '{run.path}' --resume"
    progress = read_progress(run.model_dir(model) / "state" / "last.safetensors")
    assert (progress.epoch, progress.batch) == position
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train_models(config, run, resume=True)
    assert_same(run, straight)


def test_no_end_of_a_training_leaves_workers_of_the_loaders(
    config: Config, straight: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held while the training ends: a traceback or an unfinished iteration may refer to a loader's iterator."""
    config, run = with_settings(config, ["data.workers=2"]), copy_of(straight, tmp_path / "run", [])
    step, seen, held, before = Trainer.step, [0], [], set(multiprocessing.active_children())

    def ending(end: Callable[[], None]) -> Callable[..., None]:
        def stopped(self: Trainer, *batch: torch.Tensor) -> None:
            seen[0] = len(set(multiprocessing.active_children()) - before)
            held.append(self)
            end()
            step(self, *batch)

        return stopped

    def fail() -> None:
        raise InputError("an error")

    def interrupt() -> None:
        if held[-1].progress.batch == 1:
            os.kill(os.getpid(), signal.SIGINT)

    for end, error in ((fail, InputError), (interrupt, Interrupted)):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "step", ending(end))
            with pytest.raises(error) as raised:
                train_models(config, run, ["fp16"], resume=True)
        assert seen[0] >= 2, "no workers have run"
        assert set(multiprocessing.active_children()) <= before, raised.value
    assert read_progress(run.model_dir("fp16") / "state" / "last.safetensors").batch > 0  # skips batches when resumed
    train_models(config, run, resume=True)
    assert set(multiprocessing.active_children()) <= before
    assert_same(run, straight)


def test_the_same_signal_again_interrupts_at_once_and_another_does_not() -> None:
    with pytest.raises(KeyboardInterrupt), Interrupt() as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        assert interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(0.01)
        assert interrupt.number == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def train_until_step_6(out: Path, reached: Path, settings: Path) -> None:
    """In a process that will be killed: train, and wait at the seventh step."""
    name_model(SPEC)
    step = Trainer.step

    def waiting(self: Trainer, *batch: torch.Tensor) -> None:
        if self.progress.step == 6:
            reached.touch()
            time.sleep(60)
        step(self, *batch)

    Trainer.step = waiting  # type: ignore[method-assign]
    train_models(load_config(settings), Run(out))


def test_a_killed_process_resumes_exactly(config: Config, straight: Run, tmp_path: Path) -> None:
    run, reached = create_run(tmp_path / "run"), tmp_path / "reached"
    process = start(train_until_step_6, run.path, reached, straight.config_path)
    try:
        while process.is_alive() and not reached.exists():
            time.sleep(0.02)
        assert reached.exists()
    finally:
        process.kill()
        process.join()
    leftover = run.model_dir("fp16") / "state" / ".0123456789abcdef.partial"
    leftover.mkdir()
    (leftover / "last.safetensors").write_bytes(b"half a file")
    train_models(config, run, resume=True)
    assert not leftover.exists()
    assert_same(run, straight)


def test_long_epochs_are_saved_on_the_way(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = []
    monkeypatch.setattr(Trainer, "_save_state", lambda self: saved.append((self.progress.epoch, self.progress.batch)))
    often = config.model_copy(update={"train": config.train.model_copy(update={"save_minutes": 1e-9, "epochs": 1})})
    train_models(often, create_run(tmp_path / "run"), ("fp16",))
    assert saved == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 0)]


def test_the_metrics_log_keeps_whole_lines_of_finished_epochs(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for epoch in (1, 2, 3):
        append_line(path, {"epoch": epoch, "loss": float("nan")})
    assert json.loads(path.read_text().splitlines()[0]) == {"epoch": 1, "loss": None}
    with path.open("a") as file:
        file.write('{"epoch": 1, "lo')
    keep_epochs(path, 2)
    assert [json.loads(line)["epoch"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "damage", [b"\xff\n", b"[" * 5000 + b"\n", b'{"epoch": "1"}\n', b'{"epoch": 1e999}\n', b"[]\n"]
)
def test_damaged_lines_of_the_metrics_log_are_dropped_on_resume(tmp_path: Path, damage: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"epoch": 1}\n' + damage + b'{"epoch": 2}\n')
    keep_epochs(path, 2)
    assert path.read_bytes() == b'{"epoch": 1}\n{"epoch": 2}\n'


def test_a_full_disk_leaves_the_metrics_log_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.jsonl"
    append_line(path, {"epoch": 1})
    append_line(path, {"epoch": 2})
    before = path.read_text()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(InputError, match="No space left"):
        keep_epochs(path, 1)
    assert path.read_text() == before
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(InputError, match="No space left"):
        append_line(path, {"epoch": 3})


def test_finite_losses_and_consecutive_skipped_steps_are_counted() -> None:
    statistics = RunningStatistics(torch.device("cpu"), EpochStatistics(consecutive=2))
    for loss, norm in ((1.0, 1.0), (float("nan"), float("inf")), (float("inf"), float("nan")), (3.0, float("inf"))):
        statistics.add_loss(torch.tensor(loss))
        statistics.add_step(torch.tensor(norm))
    assert statistics.read() == EpochStatistics(4.0, 2, 3, consecutive=3, running=2.0, seen=2, lost=2)
    assert statistics.read().mean_loss == 2.0
    overflow = "NaN or Inf as the loss of 2 batches: lower train.lr or, where FP16 overflows, train.precision=bf16"
    assert statistics.read().warning() == f"skipped 3 steps with non-finite gradients; {overflow}"
    assert statistics.read().next_epoch().lost == 0
    assert EpochStatistics().mean_loss is None


def test_a_spike_is_a_loss_far_above_the_running_mean() -> None:
    device, losses = torch.device("cpu"), [2.0] * 19 + [9.0] + [2.0] * 10 + [20.0, 2.0, 30.0, float("nan")]
    statistics = RunningStatistics(device, EpochStatistics(), spike=4.0)
    for loss in losses:
        statistics.add_loss(torch.tensor(loss))
    counts = statistics.read()
    assert (counts.spikes, counts.largest) == (2, 30.0)  # the 9 came before there was a mean to compare with
    assert 2.0 < counts.running < 2.4
    assert counts.warning() == (
        "NaN or Inf as the loss of 1 batch: lower train.lr or, where FP16 overflows, train.precision=bf16; "
        "2 loss spikes, largest 30"
    )
    following = counts.next_epoch()
    assert (following.spikes, following.batches, following.seen) == (0, 0, 33)
    halves = RunningStatistics(device, EpochStatistics(), spike=4.0)
    for loss in losses[:25]:
        halves.add_loss(torch.tensor(loss))
    again = RunningStatistics(device, EpochStatistics(**asdict(halves.read())), spike=4.0)  # as a resume does
    for loss in losses[25:]:
        again.add_loss(torch.tensor(loss))
    assert again.read() == counts
    assert EpochStatistics(skipped=2).warning() == "skipped 2 steps with non-finite gradients"
    assert EpochStatistics().warning() is None


def test_saving_takes_at_most_a_twentieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("fp4deploy.train.state.time.monotonic", lambda: now[0])
    pace, saved = SavingPace(minutes=10), []
    for epoch in range(60):
        now[0] += 1.0  # the epoch
        if pace.due_after_epoch():
            with pace.saving():
                now[0] += 0.5
            saved.append(epoch)
    assert saved == [0, 10, 20, 30, 40, 50]
    assert not pace.due_within_epoch()
    now[0] += 601
    assert pace.due_within_epoch()


def test_a_slow_disk_is_still_saved_to_every_few_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("fp4deploy.train.state.time.monotonic", lambda: now[0])
    pace = SavingPace(minutes=10)
    with pace.saving():
        now[0] += 3600
    now[0] += 599
    assert not pace.due_after_epoch()
    now[0] += 2
    assert pace.due_after_epoch()


class Scaler:
    """A stand-in for the loss scaler of a GPU: its state is what it was given."""

    def __init__(self, scale: float) -> None:
        self.state = {"scale": scale, "growth_interval": 2000, "_growth_tracker": 7}

    def state_dict(self) -> dict[str, float]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.state = dict(state)


def test_the_loss_scaler_comes_back(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save_state(tmp_path / "s.safetensors", model, optimizer, Scaler(512.0), Progress(epoch=3))
    fresh = Scaler(65536.0)
    assert load_state(tmp_path / "s.safetensors", model, optimizer, fresh).epoch == 3
    assert fresh.state == Scaler(512.0).state
    assert type(fresh.state["growth_interval"]) is int


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save_state(tmp_path / "s.safetensors", model, optimizer, None, Progress())
    expected = torch.rand(8)
    load_state(tmp_path / "s.safetensors", model, optimizer, None)
    assert torch.equal(torch.rand(8), expected)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "1.running_var"])
def test_weights_that_are_not_finite_are_not_resumed_from(tmp_path: Path, name: str, number: float) -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 1), torch.nn.BatchNorm2d(3))
    optimizer = torch.optim.Adam(model.parameters())
    model.state_dict()[name].flatten()[-1] = number
    save_state(tmp_path / "s.safetensors", model, optimizer, None, Progress())
    with pytest.raises(InputError, match=rf"cannot be resumed from \(NaN or Inf in {name}\)"):
        load_state(tmp_path / "s.safetensors", model, optimizer, None)


class Part:
    """A part of a training with a tensor of its own."""

    def __init__(self, value: float) -> None:
        self.tensors = {"mean.weight": torch.full((3,), value)}

    def state(self) -> dict[str, torch.Tensor]:
        return self.tensors

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        self.tensors = dict(state)


def test_moments_counters_and_parts_come_back(tmp_path: Path) -> None:
    """Of each parameter its own, also of one in channels_last, whose moments are laid out as it is."""
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 3, 3), torch.nn.Conv2d(3, 5, 3))
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(model.parameters())
    for seed in range(3):
        model(torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
    progress = Progress(3, 17, 0.5, 12.5, {"disc": 0.25, "ring": None}, 2, 4, 9, 1.5, asdict(EpochStatistics()))
    save_state(tmp_path / "s.safetensors", model, optimizer, None, progress, {"one": Part(1.0), "two": Part(2.0)})
    other = copy.deepcopy(model)
    fresh = torch.optim.Adam(other.parameters())
    parts = {"one": Part(0.0), "two": Part(0.0)}
    assert load_state(tmp_path / "s.safetensors", other, fresh, None, parts) == progress
    assert read_progress(tmp_path / "s.safetensors") == progress
    assert [part.tensors["mean.weight"].tolist() for part in parts.values()] == [[1.0] * 3, [2.0] * 3]
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)
        for name, moment in optimizer.state[one].items():
            assert torch.equal(fresh.state[two][name], moment)
            assert name == "step" or fresh.state[two][name].stride() == two.stride()


@pytest.mark.parametrize("share", [0.5, 0.9, 0.999])
def test_a_flipped_byte_of_a_state_is_found(tmp_path: Path, share: float) -> None:
    path = tmp_path / "s.safetensors"
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    save_state(path, model, optimizer, None, Progress(epoch=3))
    whole = bytearray(path.read_bytes())
    whole[int(share * len(whole))] ^= 16
    path.write_bytes(whole)
    with pytest.raises(InputError, match=r"cannot be resumed from .*is corrupt"):
        load_state(path, model, optimizer, None)
