"""Runs of a sweep in processes of their own: the same results, and what happens when one dies or is interrupted."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fp4deploy.data import generate_shapes
from fp4deploy.experiments.sweep.parallel import first_ready
from fp4deploy.experiments.sweep.pool import one_gpu
from fp4deploy.experiments.sweep.run import run_sweep
from fp4deploy.experiments.sweep.spec import Sweep, Variant, load_sweep
from fp4deploy.experiments.sweep.variant import LOG
from fp4deploy.runs import Run
from fp4deploy.train.loop import Trainer
from tests.processes import plant
from tests.train.launch import start

pytestmark = pytest.mark.usefixtures("whole_unets")  # workers know nothing of tests
FILE = """
set: {model.scale: 0.125, data.height: 32, data.width: 32, train.epochs: EPOCHS, train.finetune_epochs: 1,
      train.batch_size: 4, data.root: ROOT, telemetry.every: 0}
seeds: SEEDS
against: control
variants:
  control: {model: fp16_control}
  bad: {model: nvfp4, set: {quant.include: ["nothing*"]}}
"""


def sweep_of(folder: Path, epochs: int = 1, seeds: tuple[int, ...] = (0, 1)) -> Sweep:
    data = folder / "data"
    if not data.is_dir():
        generate_shapes(data, train=8, val=4, size=32, seed=0)
    file = folder / "mine.yaml"
    text = FILE.replace("ROOT", json.dumps(str(data))).replace("EPOCHS", str(epochs))
    file.write_text(text.replace("SEEDS", json.dumps(seeds)))
    return load_sweep(file)


def note_start_method_or_die(run: Run) -> None:
    """Called in the process of a run: how the workers of its loaders will be started; the first run is killed."""
    (run.path / "start_method").write_text(multiprocessing.get_start_method())
    if run.path.parts[-2:] == ("fp16", "seed0"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_two_at_a_time_give_what_one_gives_and_one_that_dies_costs_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    single, said, mark = sweep_of(tmp_path, seeds=(1,)), list[str](), tmp_path / "executed"
    alone = run_sweep(single, tmp_path / "alone", say=lambda _: None)
    sweep, out = sweep_of(tmp_path), tmp_path / "parallel"
    monkeypatch.chdir(plant(tmp_path / "planted", mark))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "planted"))
    parallel = run_sweep(sweep, out, say=said.append, started=note_start_method_or_die, jobs=2)
    assert not mark.exists(), mark.read_text()  # workers import nothing from the current folder
    methods = {file.read_text() for file in out.rglob("start_method")}
    assert methods == {multiprocessing.get_start_method()}
    for name, row in alone["variants"].items():
        run, other = row["runs"]["1"], parallel["variants"][name]["runs"]["1"]
        for key in ("status", "best", "last", "epochs"):
            assert run.get(key) == other.get(key), (name, key)
    for variant in ("fp16", "control"):
        model = sweep.variant(variant).model
        files = [folder / variant / "seed1" / model / "best.safetensors" for folder in (tmp_path / "alone", out)]
        one, two = map(load_file, files)
        assert all((value == two[key]).all() for key, value in one.items())
    assert said.index("fp16, seed 1: starting") < said.index("control, seed 1: starting")
    assert sum("bad, seed 1: failed" in text for text in said) == 1
    assert "epoch 1/1" in (out / "control" / "seed1" / LOG).read_text()
    assert json.loads((out / "sweep.json").read_text()) == parallel

    first = {name: row["runs"]["0"] for name, row in parallel["variants"].items()}
    assert {run["status"] for run in first.values()} == {"failed"}
    assert "Its process died (signal SIGKILL)" in first["fp16"]["error"]
    assert sum("fp16, seed 0: failed. Its process died" in text for text in said) == 1

    said.clear()
    run_sweep(single, tmp_path / "alone", ("control",), say=said.append, jobs=2)
    assert sorted(said) == sorted(text for text in said if ": done, mIoU " in text)
    assert len(said) == 2


def killed_when_it_trains(file: Path, out: Path) -> None:
    """In a process of its own: a sweep that is killed."""

    def end_when_it_trains() -> None:
        while not any(out.rglob("train.log")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=end_when_it_trains, daemon=True).start()
    run_sweep(load_sweep(file), out, ("control",), jobs=2)


@pytest.mark.variants
@pytest.mark.slow
def test_workers_end_after_a_sweep_that_was_killed(tmp_path: Path) -> None:
    sweep = sweep_of(tmp_path, seeds=(0,))
    environment = {"SWEEP_OF_THIS_TEST": str(tmp_path)}
    process = start(killed_when_it_trains, sweep.file, tmp_path / "out", environment=environment)
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    for _ in range(1200):
        if not with_environment(f"SWEEP_OF_THIS_TEST={tmp_path}"):
            return
        time.sleep(0.1)
    pytest.fail("a worker still runs")


def with_environment(entry: str) -> list[str]:
    """Processes that were started with this environment variable and still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if entry.encode() in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def slowly(run: Run) -> None:
    """Called in the process of a run: its steps take time, and nothing of the CPU's."""

    def slow(self: Trainer, *batch: torch.Tensor) -> None:
        time.sleep(0.5)
        self.statistics.add_loss(torch.zeros(()))
        self.progress.step += 1
        self.progress.batch += 1

    Trainer.step = slow  # type: ignore[method-assign]


@pytest.mark.variants
@pytest.mark.slow
def test_minutes_stop_processes_of_a_background_job(tmp_path: Path) -> None:
    sweep, out = sweep_of(tmp_path, epochs=100_000, seeds=(0,)), tmp_path / "out"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        results = run_sweep(sweep, out, ("control",), minutes=0.1, say=lambda _: None, started=slowly, jobs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert children() == []
    assert {run["status"] for run in results["variants"]["fp16"]["runs"].values()} <= {"unfinished", "missing"}


@pytest.mark.slow
def test_an_interruption_is_passed_on_and_saved(tmp_path: Path) -> None:
    sweep, out = sweep_of(tmp_path, epochs=100_000), tmp_path / "out"
    logs = [out / "fp16" / f"seed{seed}" / "fp16" / "metrics.jsonl" for seed in (0, 1)]

    def interrupt_when_both_train() -> None:
        while not all(path.is_file() for path in logs):
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    watcher = threading.Thread(target=interrupt_when_both_train, daemon=True)
    watcher.start()
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, out, ("control",), say=lambda _: None, started=slowly, jobs=2)
    watcher.join()
    assert children() == []
    runs = json.loads((out / "sweep.json").read_text())["variants"]["fp16"]["runs"]
    for seed in (0, 1):
        run = runs[str(seed)]
        assert run["status"] == "unfinished"
        assert run["epochs"] >= len(logs[seed].read_text().splitlines())  # saved at the interruption, not before
        assert "resume with" in (out / "fp16" / f"seed{seed}" / LOG).read_text()


def children() -> list[int]:
    """Processes that this one started and that run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        command = (path.parent / "cmdline").read_bytes()
        if int(parent) == os.getpid() and state != "Z" and b"spawn_main" in command:
            found.append(int(path.parent.name))
    return found


def variant(name: str, base: str | None) -> Variant:
    return Variant(name, "nvfp4", (), None, base, "")


def test_a_run_waits_for_what_it_starts_from() -> None:
    base, qat, scratch = variant("fp16", None), variant("qat", "fp16"), variant("scratch", None)
    tasks = [(base, 0), (qat, 0), (scratch, 0), (base, 1), (qat, 1)]
    assert first_ready(tasks, []) == (base, 0)
    assert first_ready(tasks[1:], [(base, 0)]) == (scratch, 0)
    assert first_ready(tasks[3:], [(base, 0), (scratch, 0)]) == (base, 1)
    assert first_ready(tasks[4:], [(base, 1)]) is None
    assert first_ready(tasks[1:], []) == (qat, 0)


def test_a_run_waits_for_its_teacher() -> None:
    base, control = variant("fp16", None), variant("control", "fp16")
    taught = replace(variant("taught", "fp16"), teacher="control")
    assert first_ready([(taught, 0), (control, 0)], []) == (control, 0)
    assert first_ready([(taught, 0)], [(control, 0)]) is None
    assert first_ready([(taught, 0)], [(control, 1), (base, 1)]) == (taught, 0)


@pytest.mark.parametrize(
    ("seen", "gpus", "expected"),
    [(None, 0, [None] * 3), (None, 2, ["0", "1", "0"]), ("5,7", 2, ["5", "7", "5"]), ("", 4, ["0", "1", "2"])],
)
def test_each_process_sees_one_gpu(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, gpus: int, expected: list[str | None]
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    found = []
    for number in range(3):
        with one_gpu(number):
            found.append(os.environ.get("CUDA_VISIBLE_DEVICES"))
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == seen
    assert found == expected
