"""Real processes in tests: start one in a folder with planted modules, kill it, and see what is left of it."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING

from tests.cli.command_line import PACKAGE
from tests.train.launch import start

if TYPE_CHECKING:
    import torch

LIMIT = 120  # seconds; only a failing test waits so long

# Modules that are imported late by something, also by Python's own start of a child.
PLANTED = (
    "sitecustomize", "usercustomize", "dataclasses", "json", "signal", "pickle", "copyreg", "socket", "selectors",
    "random", "tempfile", "struct", "contextlib", "typing", "multiprocessing", "concurrent", "resource", "hashlib",
    "subprocess", "threading", "queue", "logging", "numpy", "torch", "onnx", "triton", "yaml", "fp4deploy",
)  # fmt: skip


def plant(folder: Path, mark: Path) -> Path:
    """A folder whose modules, once imported, leave `mark` and end the process."""
    folder.mkdir(exist_ok=True)
    for name in PLANTED:
        code = f"open({str(mark)!r}, 'a').write({name!r} + '\\n')\nimport os\nos._exit(7)\n"
        (folder / f"{name}.py").write_text(code, encoding="utf-8")
    return folder


def wait_until(true: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Wait for a state that can be observed."""
    end = time.monotonic() + limit
    while not true():
        assert time.monotonic() < end, f"{what} did not happen within {limit} seconds"
        time.sleep(0.02)


def script(
    path: Path, code: str, *arguments: object, cwd: Path | None = None, **environment: str
) -> subprocess.Popen[str]:
    """Start Python code in a process of its own that imports what this one can."""
    path.write_text(code, encoding="utf-8")
    return subprocess.Popen(
        [sys.executable, str(path), *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(os.path.isabs, sys.path)), **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def children_of(pid: int | None) -> list[int]:
    """Processes that a process has started, from /proc."""
    found: list[int] = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if file.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(file.parent.name))
    return found


def pids_in(folder: Path) -> list[int]:
    """Processes that have made a file of their number in a folder."""
    return [int(path.name) for path in folder.iterdir()] if folder.is_dir() else []


def end(process: subprocess.Popen[str], how: int = signal.SIGKILL) -> None:
    """Send a signal and wait for the process."""
    process.send_signal(how)
    process.wait(LIMIT)


def fp4deploy(
    folder: Path, *arguments: object, stdout: str = "out.txt", set_up: str = "", **environment: str
) -> Command:
    """Start a command in a folder, in a process forked from one that has imported torch.

    Args:
        stdout: file for its output, or "closed", or "pipe" for a pipe that nobody reads.
        set_up: function of this module that the process calls first.
        environment: variables; an empty one is removed.
    """
    before = {path.name for path in folder.glob("*.out")}
    mine = folder / f"{len(before)}.out"
    mine.mkdir()
    parts = (str(folder), [str(part) for part in arguments], str(mine), stdout, set_up, environment)
    return Command(start(_fp4deploy, *parts), mine)


class Command:
    """A command that runs: its process, and the files that take its output."""

    def __init__(self, process: BaseProcess, folder: Path) -> None:
        self.process, self.folder = process, folder

    def send(self, number: int) -> None:
        """Send a signal."""
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        self.process.join(LIMIT)
        status = self.process.exitcode
        if status is None:
            self.process.kill()
        assert status is not None, f"still running: {self.stderr}"
        return status

    def wait_until(self, true: Callable[[], object], what: str) -> None:
        """Wait for a state, as long as the process runs."""
        wait_until(lambda: true() or not self.process.is_alive(), what)
        assert true(), self.stderr

    @property
    def stdout(self) -> str:
        """What it has printed."""
        return (self.folder / "out.txt").read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """Its notes and errors."""
        file = self.folder / "err.txt"
        return file.read_text(encoding="utf-8") if file.is_file() else ""


def _fp4deploy(
    folder: str, arguments: list[str], output: str, stdout: str, set_up: str, environment: dict[str, str]
) -> None:
    os.chdir(folder)
    for name, value in environment.items():
        os.environ.pop(name, None) if value == "" else os.environ.update({name: value})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    _redirect(2, os.open(f"{output}/err.txt", os.O_WRONLY | os.O_CREAT))
    if stdout == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        _redirect(1, writer)
    elif stdout != "closed":
        path = stdout if os.path.isabs(stdout) else f"{output}/{stdout}"
        _redirect(1, os.open(path, os.O_WRONLY | os.O_CREAT))
    encoding = environment.get("PYTHONIOENCODING", "utf-8")
    sys.stdout, sys.stderr = (open(number, "w", encoding=encoding, closefd=False) for number in (1, 2))  # noqa: SIM115
    if stdout == "closed":
        os.close(1)
        sys.stdout = None  # type: ignore[assignment]  # as Python does
    if set_up:
        globals()[set_up]()
    sys.argv = ["fp4deploy", *arguments]
    importlib.import_module(f"{PACKAGE}.main").main()


def _redirect(descriptor: int, to: int) -> None:
    os.dup2(to, descriptor)
    os.close(to)


def wait_in_the_first_step() -> None:
    """A training that touches the file `stepping` in its first step, and does not come out of it."""
    from fp4deploy.train.loop import Trainer

    def step(self: Trainer, *batch: object) -> None:
        Path("stepping").touch()
        while True:
            time.sleep(0.05)

    Trainer.step = step  # type: ignore[assignment, method-assign]


def wait_in_the_fourth_epoch() -> None:
    """A training that touches the file `stepping` in its fourth epoch, and goes on when it is interrupted."""
    from fp4deploy.train.loop import Trainer

    original = Trainer.step

    def step(self: Trainer, *batch: torch.Tensor) -> None:
        if self.progress.epoch == 3:
            Path("stepping").touch()
            wait_until(lambda: self.interrupt.requested, "an interruption")
        original(self, *batch)

    Trainer.step = step  # type: ignore[method-assign]


def files_of_200_kb() -> None:
    """No file may grow beyond 200 kB, as on a disk that is nearly full."""
    import resource

    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
