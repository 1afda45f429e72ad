"""Run folders, atomic writes and the error tree."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fp4deploy.errors import GateError, InputError, UnavailableError, suggest
from fp4deploy.runs import (
    LOCK,
    RUNS,
    Run,
    create_run,
    hold,
    is_first_process,
    latest_run,
    open_run,
    processes,
)


def test_exit_codes() -> None:
    assert (GateError.exit_code, InputError.exit_code, UnavailableError.exit_code) == (1, 2, 3)


def test_suggestions() -> None:
    assert suggest("nvfp5", ["fp16", "nvfp4"]) == " Did you mean 'nvfp4'?"
    assert suggest("zzz", ["fp16", "nvfp4"]) == ""


@pytest.mark.parametrize("text", ["", "two", "-1", "²", "1" * 5000])
def test_a_launcher_sets_numbers(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    monkeypatch.setenv("RANK", text)
    with pytest.raises(InputError, match="environment variable WORLD_SIZE"):
        processes()
    with pytest.raises(InputError, match="environment variable RANK"):
        is_first_process()


def test_runs_never_overwrite_each_other(tmp_path: Path) -> None:
    first, second = create_run(root=tmp_path), create_run(root=tmp_path)
    assert first.path != second.path
    (first.path / "config.yaml").write_text("a: 1")
    with pytest.raises(InputError, match="never overwrites"):
        create_run(first.path)


def test_latest_run_is_the_one_configured_last(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fp4deploy train"):
        latest_run(tmp_path)
    for age, name in ((2, "new"), (1, "old")):
        run = create_run(tmp_path / name)
        run.config_path.write_text("")
        os.utime(run.config_path, (age, age))
    assert latest_run(tmp_path).path.name == "new"
    assert open_run(tmp_path / "old").path.name == "old"
    with pytest.raises(InputError, match="not a run"):
        open_run(tmp_path)


def test_models_are_those_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    for model in ("nvfp4", "fp16"):
        run.model_dir(model).mkdir()
        run.checkpoint(model).touch()
    assert run.models() == ["fp16", "nvfp4"]


@pytest.mark.parametrize(
    ("config", "stems"),
    [
        ("model: {spec: 'some where/my_net.py:build'}", ["my_net.fp16", "my_net.nvfp4"]),
        ("model: {spec: 'smp:Unet/resnet34'}", ["Unet_resnet34.fp16", "Unet_resnet34.nvfp4"]),
        ("model: {spec: 'package.module:build'}", ["build.fp16", "build.nvfp4"]),
        ("model: {spec: 'unet:0.5'}", ["unet.fp16", "unet.nvfp4"]),
        ("model: {scale: 0.5}", ["unet.fp16", "unet.nvfp4"]),
        ("model: [", ["unet.fp16", "unet.nvfp4"]),
        ("", ["unet.fp16", "unet.nvfp4"]),
    ],
)
def test_artefacts_are_named_by_their_network(tmp_path: Path, config: str, stems: list[str]) -> None:
    (tmp_path / "config.yaml").write_text(config)
    assert [Run(tmp_path).stem(model) for model in ("fp16", "nvfp4")] == stems


def test_what_was_asked_for_is_remembered(tmp_path: Path) -> None:
    run = create_run(tmp_path / "mine")
    assert run.asked_models() == ()
    run.ask_models(["fp16"])
    run.ask_models(["fp16_control", "fp16"])
    assert run.asked_models() == ("fp16", "fp16_control")
    run.models_path.write_text("{truncated")
    with pytest.raises(InputError, match=r"models.json is no list of models.*--models"):
        run.asked_models()


def test_processes_that_start_together_have_folders_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(16) as pool:
        runs = list(pool.map(lambda _: create_run(root=tmp_path / "runs"), range(64)))
    assert len({run.path for run in runs}) == 64
    with ThreadPoolExecutor(2) as pool:
        pool.map(lambda run: (run.path / "mine").touch(), runs)
    assert all((run.path / "mine").exists() for run in runs)


def test_a_folder_that_cannot_be_made_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, root in ((tmp_path / "file" / "run", RUNS), (None, tmp_path / "file")):
        with pytest.raises(InputError, match="cannot be made: Not a directory|cannot be made: File exists"):
            create_run(out, root=root)


def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    code = f"from pathlib import Path\nfrom fp4deploy.runs import hold\nwith hold(Path({str(tmp_path)!r})): pass"
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with hold(tmp_path), hold(tmp_path):  # a process may hold it twice
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert f"{tmp_path} is in use by process {os.getpid()} on " in done.stderr
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_lock_of_a_run_is_no_link(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("kept")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "victim")
    with pytest.raises(InputError, match="cannot be written"), hold(tmp_path / "run"):
        pass
    assert (tmp_path / "victim").read_text() == "kept"


def test_what_a_dead_process_has_left_is_waited_for(tmp_path: Path) -> None:
    """Workers of a killed training keep its lock open for some seconds."""
    (tmp_path / "run").mkdir()
    lock = os.open(tmp_path / "run" / LOCK, os.O_RDWR | os.O_CREAT)
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    os.write(lock, json.dumps({"pid": dead.pid, "host": socket.gethostname(), "command": "fp4deploy train"}).encode())
    worker = subprocess.Popen(["sleep", "600"], pass_fds=[lock])
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.close(lock)
    timer = threading.Timer(0.3, worker.kill)
    timer.start()
    with hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / LOCK).read_text())["pid"] == os.getpid()
    timer.join()
    worker.wait()


def test_a_link_to_nothing_is_no_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "config.yaml").touch()
    (tmp_path / "b" / "config.yaml").symlink_to(tmp_path / "nowhere")
    assert latest_run(tmp_path).path == tmp_path / "a"


def test_a_run_that_is_removed_meanwhile_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for age, name in enumerate(("gone", "last")):
        config = create_run(tmp_path / name).config_path
        config.touch()
        os.utime(config, (age, age))
    is_file = Path.is_file

    def removing(path: Path) -> bool:
        found = is_file(path)
        if path.parent.name == "gone":
            shutil.rmtree(path.parent)
        return found

    monkeypatch.setattr(Path, "is_file", removing)
    assert latest_run(tmp_path).path == tmp_path / "last"
