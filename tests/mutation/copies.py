"""Tests that run with one file of the checkout changed: a copy of the checkout for each process, a fork for each run.

Importing torch and ONNX Runtime takes longer than most of the tests, so that this process imports them once, and what
it forks imports the project and the tests alone.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = (
    "fp4deploy",
    "cli",
    "native",
    "tests",
    "benchmarks",
    "configs",
    "docs",
    "examples",
    "README.md",
    "pyproject.toml",
)
LIBRARIES = (
    "accelerate", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "pycocotools.mask", "pydantic", "pytest",
    "scipy.stats", "torch", "torch.onnx",
)  # fmt: skip
OWN = ("benchmarks", "cli", "fp4deploy", "tests")


@dataclass(frozen=True)
class Trial:
    """tests: pytest arguments; file: what has `text` as its content meanwhile, nothing without a name.

    only: node ids, in the order to run them in; all tests without one. first: end with the first failure.
    """

    tests: tuple[str, ...]
    file: str = ""
    text: str = ""
    only: tuple[str, ...] = ()
    first: bool = True


@dataclass(frozen=True)
class Outcome:
    """status: of pytest, None where it did not end in time."""

    status: int | None
    seconds: float
    output: str

    @property
    def failed(self) -> bool:
        """A test noticed: one failed, a module could not be imported, the process ended, or it did not end in time."""
        return self.status not in (0, 4, 5)  # 4: wrong arguments; 5: no tests


def run_trials(trials: Sequence[Trial], jobs: int, seconds: float) -> Iterator[tuple[int, Outcome]]:
    """Run trials, `jobs` at a time and each for `seconds` at most; the number and the outcome of each that ended."""
    _import_libraries()
    with tempfile.TemporaryDirectory() as base:
        if (ROOT.parent / "shared").is_dir():
            (Path(base) / "shared").symlink_to(ROOT.parent / "shared")
        free = [copy_to(Path(base) / str(job)) for job in range(min(jobs, len(trials)))]
        waiting, running = list(enumerate(trials)), dict[int, _Running]()
        try:
            while waiting or running:
                while waiting and free:
                    number, trial = waiting.pop(0)
                    running[number] = _Running(trial, free.pop(), time.monotonic() + seconds)
                for number, each in list(running.items()):
                    if (outcome := each.poll()) is not None:
                        free.append(running.pop(number).folder)
                        yield number, outcome
                time.sleep(0.05)
        finally:
            for each in running.values():
                each.kill()


class _Running:
    """One trial in a process of its own."""

    def __init__(self, trial: Trial, folder: Path, end: float) -> None:
        self.folder, self.end, self.start = folder, end, time.monotonic()
        self.output = folder / "output.txt"
        self.changed = folder / trial.file if trial.file else None
        if self.changed is not None:
            self.before = self.changed.read_bytes()
            self.changed.write_text(trial.text, encoding="utf-8")
        self.pid = os.fork()
        if self.pid == 0:
            _become_pytest(folder, self.output, trial)

    def poll(self) -> Outcome | None:
        """The outcome, None while it runs."""
        done, found = os.waitpid(self.pid, os.WNOHANG)
        status: int | None
        if done:
            status = os.waitstatus_to_exitcode(found)
            with suppress(ProcessLookupError):
                os.killpg(self.pid, 9)  # what the tests left behind
        elif time.monotonic() > self.end:
            self.kill()
            status = None
        else:
            return None
        text = self.output.read_text(encoding="utf-8", errors="replace") if self.output.is_file() else ""
        if self.changed is not None:
            self.changed.write_bytes(self.before)
        for left in ("temporary", ".hypothesis"):
            shutil.rmtree(self.folder / left, ignore_errors=True)
        return Outcome(status, time.monotonic() - self.start, text)

    def kill(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        with suppress(ProcessLookupError):
            os.kill(self.pid, 9)
        os.waitpid(self.pid, 0)


def copy_to(folder: Path) -> Path:
    """The code and the tests in a folder of their own."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, folder / part)
    return folder


def _import_libraries() -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # a pool of threads would not survive the fork
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)


class _Chosen:
    """A plugin of pytest that runs some tests alone, in their order."""

    def __init__(self, tests: Sequence[str]) -> None:
        self.places = {test: place for place, test in enumerate(tests)}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.places:
            chosen = [item for item in items if item.nodeid in self.places]
            items[:] = sorted(chosen, key=lambda item: self.places[item.nodeid])


def _become_pytest(folder: Path, output: Path, trial: Trial) -> None:
    """Run pytest on a copy, which is imported in place of the checkout, and end this process with its status."""
    status = 3
    try:
        os.setpgid(0, 0)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.chdir(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] in OWN]:
            del sys.modules[name]
        sys.path[:] = [str(folder), *[path for path in sys.path if path not in ("", str(ROOT))]]
        sys.dont_write_bytecode = True
        os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(os.path.isabs, sys.path)])
        (folder / "temporary").mkdir(exist_ok=True)
        arguments = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--basetemp",
            str(folder / "temporary" / "pytest"),
            *["-x"][: trial.first],
        ]
        status = int(pytest.main([*arguments, *trial.tests], plugins=[_Chosen(trial.only)]))
        sys.stdout.flush()
    finally:
        os._exit(status)
