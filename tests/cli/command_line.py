"""The command, in this process and for others, installed or in a plain checkout."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fp4deploy.errors import UnavailableError

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "fp4deploy.cli"
SEARCHED = [os.environ.get("PYTHONPATH", ""), str(ROOT)]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, SEARCHED))}

Invoke = Callable[..., Any]


def run_in(folder: Path, app: Any, *commands: tuple[str, ...]) -> Path:
    """Run commands one after another in a folder; all must succeed."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        for command in commands:
            result = CliRunner().invoke(app, command, prog_name="fp4deploy")
            assert result.exit_code == 0, result.stderr
    finally:
        os.chdir(before)
    return folder


def without_pictures(page: str) -> str:
    """A page without what its pictures are in base64, which may spell any word."""
    return re.sub(r"base64,[^\"]+", "", page)


def without_engines(patch: pytest.MonkeyPatch) -> None:
    """`run` goes on without engines, as where no builder is installed; `test_stages` has a run with them."""

    def missing(*arguments: object, **options: object) -> None:
        raise UnavailableError("TensorRT-RTX is missing. Add it with: pip install tensorrt-rtx")

    patch.setattr("fp4deploy.pipeline.build_engine", missing)
