"""A copy of the checkout in which code may be broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
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
