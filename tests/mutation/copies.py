"""A copy of the checkout in which code may be broken, and tests that run there."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("fp4deploy", "cli", "tests", "benchmarks", "configs", "examples", "pyproject.toml")


def copy_to(folder: Path) -> Path:
    """The code and the tests in a folder of their own."""
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.is_file():
            shutil.copy(source, folder / part)
    return folder


def run_python(folder: Path, *arguments: str, seconds: float, output: Path) -> int | None:
    """Run Python in a copy, which is imported in place of the checkout; its exit status, None after `seconds`."""
    path = os.pathsep.join([str(folder), *filter(os.path.isabs, sys.path)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    with output.open("w", encoding="utf-8") as file:
        try:
            return subprocess.run(
                [sys.executable, *arguments], cwd=folder, env=environment, stdout=file, stderr=file, timeout=seconds,
                check=False,
            ).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            return None


LIBRARIES = (
    "accelerate", "numpy", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "pycocotools.mask", "pydantic", "pytest",
    "scipy.stats", "torch", "torch.onnx", "torchmetrics",
)  # fmt: skip
OWN = ("benchmarks", "cli", "fp4deploy", "tests")


def run_pytest(folder: Path, *arguments: str, seconds: float, output: Path) -> int | None:
    """pytest's exit status in a copy, None after `seconds`; in a process forked from this one with `LIBRARIES` loaded.

    Importing torch takes longer than most of the tests.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    pid = os.fork()
    if pid == 0:
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
            status = int(importlib.import_module("pytest").main([*arguments]))
            sys.stdout.flush()
        finally:
            os._exit(status)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, found = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(found)
        time.sleep(0.05)
    os.killpg(pid, 9)
    os.waitpid(pid, 0)
    return None
