"""The command, in this process and for others, installed or in a plain checkout."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

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
