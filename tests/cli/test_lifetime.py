"""Commands as processes: ended by signals, two at once, on full disks, with closed outputs, in strange places."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fp4deploy.errors import InputError
from fp4deploy.runs import Run
from fp4deploy.train.state import read_progress
from tests.bench.perfect import perfect
from tests.cli.command_line import ENVIRONMENT, PACKAGE, Invoke
from tests.fixtures import TINY
from tests.processes import LIMIT, children_of, fp4deploy, runs, wait_until

pytestmark = pytest.mark.skipif(os.name == "nt", reason="signals and file systems of POSIX")
SETTINGS = [part for setting in TINY for part in ("--set", setting)]
FOR_EVER = ("--set", "train.epochs=100000")


def train(data: Path, *more: object) -> list[object]:
    return ["train", "--data", data, "--models", "fp16", "--telemetry-every", 0, *SETTINGS, *more]


def epochs(run: Path) -> list[int]:
    log = run / "fp16" / "metrics.jsonl"
    lines = log.read_text().rpartition("\n")[0].splitlines() if log.is_file() else []
    return [json.loads(line)["epoch"] for line in lines]


def partial(folder: Path) -> list[Path]:
    return list(folder.rglob("*.partial"))


@pytest.fixture
def tiny_checkpoint(tiny_run: Run) -> Path:
    return tiny_run.checkpoint("fp16")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_saves_and_the_status_names_it(tiny_data: Path, tmp_path: Path, number: int, status: int) -> None:
    command = fp4deploy(tmp_path, *train(tiny_data, "--out", "run", *FOR_EVER))
    command.wait_until(lambda: epochs(tmp_path / "run"), "the first epoch")
    command.send(number)
    assert command.wait() == status
    progress = read_progress(tmp_path / "run" / "fp16" / "state" / "last.safetensors")
    assert epochs(tmp_path / "run") == list(range(1, progress.epoch + 1))  # of the signal, not of an epoch before
    assert "Traceback" not in command.stderr
    assert command.stderr.rstrip().endswith("resume with: fp4deploy train --out run --resume")
    assert command.stderr.count("--resume") == 1
    assert ("Interrupted." if number == signal.SIGINT else f"Ended by {signal.Signals(number).name}.") in command.stderr
    assert not partial(tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), pytest.param(signal.SIGKILL, -9, marks=pytest.mark.nightly)]
)
def test_workers_of_a_loader_outlive_a_signal_and_end_with_the_training(
    tiny_data: Path, tmp_path: Path, number: int, status: int
) -> None:
    """SIGTERM goes to every process of the job, as in a batch system; `kill -9` to the training alone."""
    arguments = train(tiny_data, "--out", "run", *FOR_EVER, "--set", "data.workers=1")
    command = [sys.executable, "-m", PACKAGE, *map(str, arguments)]
    with open(tmp_path / "notes", "w") as notes:
        process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=notes, stderr=notes)
    try:
        wait_until(lambda: epochs(tmp_path / "run") or process.poll() is not None, "the first epoch")
        workers = children_of(process.pid)
        assert len(workers) >= 2, (tmp_path / "notes").read_text()  # of training and of validation
        for pid in workers if number == signal.SIGTERM else []:
            os.kill(pid, number)
        process.send_signal(number)
        assert process.wait(LIMIT) == status, (tmp_path / "notes").read_text()
    finally:
        process.kill()
    wait_until(lambda: not any(map(runs, workers)), "the end of the loader's workers")
    if number == signal.SIGTERM:
        progress = read_progress(tmp_path / "run" / "fp16" / "state" / "last.safetensors")
        assert epochs(tmp_path / "run") == list(range(1, progress.epoch + 1))


def test_the_second_ctrl_c_ends_a_step_that_does_not(tiny_data: Path, tmp_path: Path) -> None:
    command = fp4deploy(tmp_path, *train(tiny_data, "--out", "run"), set_up="wait_in_the_first_step")
    command.wait_until((tmp_path / "stepping").exists, "the first step")
    command.send(signal.SIGINT)
    command.wait_until(lambda: "press Ctrl-C again" in command.stderr, "the answer to the first Ctrl-C")
    assert command.process.is_alive()
    command.send(signal.SIGINT)
    assert command.wait() == 130
    assert "Traceback" not in command.stderr
    assert not partial(tmp_path)


def test_an_ignored_hangup_stays_ignored(tiny_data: Path, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {PACKAGE}.process as p, os, signal\nwith p.stop_on_signals(): "
             "os.kill(os.getpid(), signal.SIGHUP); print('alive')"],
            capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)
    assert done.stdout == "alive\n", done.stderr


def test_two_trainings_of_one_folder_are_one_training_and_one_refusal(tiny_data: Path, tmp_path: Path) -> None:
    both = [fp4deploy(tmp_path, *train(tiny_data, "--out", "run")) for _ in range(2)]
    assert sorted(command.wait() for command in both) == [0, 2], [command.stderr for command in both]
    (refused,) = (command for command in both if command.process.exitcode == 2)
    assert "run is in use by" in refused.stderr or "exists already" in refused.stderr
    assert epochs(tmp_path / "run") == [1, 2]
    assert (tmp_path / "run" / "fp16" / "best.safetensors").is_file()


def test_two_resumes_of_one_run_are_one_and_a_refusal_that_names_the_other(tiny_data: Path, tmp_path: Path) -> None:
    first = fp4deploy(tmp_path, *train(tiny_data, "--out", "run", *FOR_EVER))
    first.wait_until(lambda: epochs(tmp_path / "run"), "the first epoch")
    for arguments in (["train", "--resume", "--out", "run"], train(tiny_data, "--out", "run")):
        second = fp4deploy(tmp_path, *arguments)
        assert second.wait() == 2
        if "--resume" in arguments:
            assert f"is in use by process {first.process.pid} on " in second.stderr
            assert "fp4deploy train --data" in second.stderr
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    third = fp4deploy(tmp_path, "train", "--resume", "--out", "run")  # a dead process holds nothing
    before = len(epochs(tmp_path / "run"))
    third.wait_until(lambda: len(epochs(tmp_path / "run")) > before, "the next epoch")
    third.send(signal.SIGTERM)
    assert third.wait() == 143
    assert epochs(tmp_path / "run") == list(range(1, len(epochs(tmp_path / "run")) + 1))


def test_a_refused_training_leaves_the_files_of_the_other(tmp_path: Path, invoke: Invoke) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert invoke("train", "--data", tmp_path / "nothing", "--out", mine).exit_code == 2
    assert list(mine.iterdir()) == []  # an empty folder that was there stays, what failed in it goes
    assert invoke("train", "--data", tmp_path / "nothing", "--out", tmp_path / "new").exit_code == 2
    assert not (tmp_path / "new").exists()
    (mine / "photo.jpg").touch()
    assert invoke("train", "--data", tmp_path / "nothing", "--out", mine).exit_code == 2
    assert [path.name for path in mine.iterdir()] == ["photo.jpg"]


SWEEP = """
set: {model.scale: 0.125, data.height: 32, data.width: 32, train.epochs: 100000, train.batch_size: 4, data.root: ROOT}
seeds: [0]
variants: {scratch: {model: nvfp4, set: {train.from_scratch: true}}}
"""


def test_two_sweeps_of_one_folder_are_one_and_a_refusal(tiny_data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SWEEP.replace("ROOT", json.dumps(str(tiny_data))))
    first = fp4deploy(tmp_path, "sweep", "mine.yaml", "--out", "out")
    first.wait_until((tmp_path / "out" / "scratch" / "seed0" / "config.yaml").exists, "the first training")
    second = fp4deploy(tmp_path, "sweep", "mine.yaml", "--out", "out")
    assert second.wait() == 2
    assert f"out is in use by process {first.process.pid}" in second.stderr
    first.send(signal.SIGTERM)
    assert first.wait() == 143
    assert "give the same command to go on" in first.stderr
    assert (tmp_path / "out" / "sweep.json").is_file()


def bench(checkpoint: Path, data: Path) -> list[object]:
    return ["bench", "--engine", checkpoint, "--data", data, "--iterations", 1, "--json", "found.json"]


@pytest.mark.parametrize(("stdout", "status"), [("/dev/full", 2), ("pipe", 0), ("closed", 0)])
def test_results_are_written_where_stdout_breaks(
    tiny_checkpoint: Path, tiny_data: Path, tmp_path: Path, stdout: str, status: int
) -> None:
    if stdout == "/dev/full" and not Path(stdout).exists():
        pytest.skip("this system has no /dev/full")
    command = fp4deploy(tmp_path, *bench(tiny_checkpoint, tiny_data), stdout=stdout)
    assert command.wait() == status, command.stderr
    assert json.loads((tmp_path / "found.json").read_text())["artifacts"][0]["status"] == "ok"
    assert "Traceback" not in command.stderr
    assert ("Error" in command.stderr) == (status == 2)
    if status:
        assert "What was printed is not complete: No space left on device." in command.stderr


def test_a_gate_is_judged_though_nobody_reads(tiny_checkpoint: Path, tiny_data: Path, tmp_path: Path) -> None:
    measured = fp4deploy(tmp_path, *bench(tiny_checkpoint, tiny_data))
    assert measured.wait() == 0, measured.stderr
    document = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "base.json").write_text(json.dumps(perfect(document)))
    gate = ["--baseline", "base.json", "--max-drop", 0]
    command = fp4deploy(tmp_path, *bench(tiny_checkpoint, tiny_data), *gate, stdout="pipe")
    assert command.wait() == 1
    assert "points below the baseline" in command.stderr


def test_an_ascii_terminal_shows_equivalents(tiny_checkpoint: Path, tiny_data: Path, tmp_path: Path) -> None:
    command = fp4deploy(tmp_path, "check", "unet:0.125×", PYTHONIOENCODING="ascii")
    assert command.wait() == 2
    assert "'0.125x' is not a scale" in command.stderr
    command = fp4deploy(tmp_path, *bench(tiny_checkpoint, tiny_data), PYTHONIOENCODING="ascii")
    assert command.wait() == 0, command.stderr
    assert command.stdout.isascii()
    assert command.stderr.isascii()


def test_a_narrow_terminal(tmp_path: Path) -> None:
    master, terminal = pty.openpty()
    try:
        name = os.ttyname(terminal)
        for arguments in (["--help"], ["check", "unet:0.125"]):
            command = fp4deploy(tmp_path, *arguments, stdout=name, COLUMNS="20")
            printed = b""
            while command.process.is_alive() or select.select([master], [], [], 0)[0]:
                if select.select([master], [], [], 0.05)[0]:
                    printed += os.read(master, 65536)
            assert command.wait() == 0, command.stderr
            assert printed
            assert "Traceback" not in command.stderr
    finally:
        os.close(master)
        os.close(terminal)


@pytest.mark.parametrize("late", [False, True])
def test_a_terminal_that_is_closed(tmp_path: Path, late: bool) -> None:
    master, terminal = pty.openpty()
    command = [sys.executable, "-m", PACKAGE, "--help"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=terminal, stderr=subprocess.PIPE)
    os.close(terminal)
    if late:
        os.read(master, 1)
    os.close(master)
    assert process.communicate(timeout=LIMIT)[1] == b""
    assert process.returncode == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Any]:
    """Mount a file system in memory, of some bytes or read-only."""
    mounted: list[Path] = []

    def mount(options: str, name: str = "disk") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no right to mount a file system here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    try:
        yield mount
    except FileNotFoundError:
        pytest.skip("this system has no mount")
    finally:
        for folder in mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def test_a_full_disk(tiny_data: Path, tmp_path: Path, small_disk: Any) -> None:
    disk = small_disk("size=128k")
    for arguments in (
        ["data", "shapes", disk / "set"],
        train(tiny_data, "--out", disk / "run"),
    ):
        command = fp4deploy(tmp_path, *arguments)
        assert command.wait() == 2, command.stderr
        assert "No space left on device" in command.stderr
        assert "Traceback" not in command.stderr
        assert not partial(disk)
    assert not (disk / "set").exists()


def test_a_disk_that_fills_up_during_a_training(tiny_data: Path, tmp_path: Path) -> None:
    command = fp4deploy(tmp_path, *train(tiny_data, "--out", "run"), set_up="files_of_200_kb")
    assert command.wait() == 2
    assert "File too large" in command.stderr
    assert not partial(tmp_path)


def test_a_read_only_folder(tiny_checkpoint: Path, tiny_data: Path, tmp_path: Path, small_disk: Any) -> None:
    folder = tmp_path / "fixed"
    if os.geteuid() == 0:  # root writes wherever the file system lets it
        folder = small_disk("ro", "fixed")
    else:
        folder.mkdir(mode=0o555)
    for arguments in (
        ["data", "shapes", folder / "set"],
        train(tiny_data, "--out", folder / "run"),
        [*bench(tiny_checkpoint, tiny_data)[:-1], folder / "found.json"],
    ):
        command = fp4deploy(tmp_path, *arguments)
        assert command.wait() == 2, command.stderr
        assert "Traceback" not in command.stderr
        assert "defect" not in command.stderr


def test_without_a_home(tiny_data: Path, tmp_path: Path) -> None:
    command = fp4deploy(tmp_path, *train(tiny_data, "--out", "run"), HOME="", XDG_CACHE_HOME="", FP4DEPLOY_CACHE="")
    assert command.wait() == 0, command.stderr
    assert not (tmp_path / "~").exists()


def test_unicode_spaces_and_markup_in_paths(tiny_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Fotos für 模型 [red] :smile:"
    folder.mkdir()
    (folder / "my data").symlink_to(tiny_data)
    run = "läufe/eins [red]"
    for arguments in (
        train(Path("my data"), "--out", run),
        ["bench", "--engine", f"{run}/fp16/best.safetensors", "--iterations", 1],
    ):
        command = fp4deploy(folder, *arguments)
        assert command.wait() == 0, command.stderr
    assert "eins [red]" in command.stdout.replace("\n", "")


def test_a_locale_that_is_not_utf8(tiny_data: Path, tmp_path: Path) -> None:
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    (tmp_path / "数据 ±").symlink_to(tiny_data)
    done = subprocess.run(
        [sys.executable, "-m", PACKAGE, "data", "check", "数据 ±"],
        cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.isascii()  # the name is in it, as escapes
    assert done.stderr.endswith(b"has no defect.\n")


def test_names_are_printed_literally(app: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from importlib import import_module

    from fp4deploy.bench.records import ArtifactEntry

    name = "[/x] [red]:smile: \x1b[2J\x1b]0;title\x07 \u202egnp.x"
    entry = ArtifactEntry(
        path=name, model=None, backend=name, precision="FP16", size_bytes=1, sha256="0", status="ok", reason=name
    )
    import_module(f"{PACKAGE}.commands.stages.bench").print_table([entry])
    import_module(f"{PACKAGE}.console").done(name)
    printed = capsys.readouterr().out
    assert printed.count(r"[/x] [red]:smile: \x1b[2J\x1b]0;title\x07 \u202egnp.x") >= 3
    assert "\x1b" not in printed


def test_what_is_styled_is_printed_literally(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib import import_module

    from rich.table import Table
    from rich.text import Text

    table = Table("layer of the network")
    table.add_row(Text("a\x1b[2Jb", style="green"))
    import_module(f"{PACKAGE}.console").results().print(table, Text("c\x1b]0;title\x07d"))
    printed = capsys.readouterr().out
    assert r"a\x1b[2Jb" in printed
    assert "\x1b" not in printed
    assert "\x07" not in printed


def test_an_error_prints_names_literally(invoke: Invoke, monkeypatch: pytest.MonkeyPatch) -> None:
    import fp4deploy.bench.environment as environment

    def fail() -> None:
        raise InputError("\x1b[2Jcleared [/x]")

    monkeypatch.setattr(environment, "tools", fail)
    assert invoke("doctor").stderr == "Error: \\x1b[2Jcleared [/x]\n"


@pytest.mark.parametrize("width", [100, 125, 130, 180])
def test_a_narrow_terminal_breaks_no_name(app: Any, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    from importlib import import_module

    from fp4deploy.bench.records import ArtifactEntry, Quantiles
    from fp4deploy.system.terminal import console

    bench = import_module(f"{PACKAGE}.commands.stages.bench")
    screen = io.StringIO()
    monkeypatch.setattr(bench, "results", lambda: console(screen, width=width))
    backend, precision = "ONNX Runtime 1.31.1 (CPU, decomposed in memory)", "FP16 (run in FP32)"
    measured = {"model": "fp16", "backend": backend, "precision": precision, "miou": 0.5, "status": "ok"}
    times = Quantiles(p50=2.5, p90=2.75, p99=3.25)
    entries = [
        ArtifactEntry.model_validate({"path": f"runs/a/{name}", "latency_ms": times, **measured})
        for name in ("fp16/best.safetensors", "export/unet.fp16.portable.onnx")
    ]
    bench.print_table(entries)
    words = screen.getvalue().split()
    assert {"fp16/best.safetensors", "export/unet.fp16.portable.onnx", "Runtime", "memory)"} <= set(words)
    assert words.count("ok") == len(entries)
    assert {"2.5", "2.75", "3.25"} <= set(words), "p50, p90 and p99, also where they have no columns of their own"
    assert not any("runs/a" in word for word in words)
