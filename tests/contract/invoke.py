"""The command line in this process, through its public entry point."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.contract import internals


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


def fp4deploy(*arguments: object, folder: Path) -> Done:
    """Run `fp4deploy ARGUMENTS` in a folder."""
    stdout, stderr, argv, before = io.StringIO(), io.StringIO(), sys.argv, Path.cwd()
    sys.argv = ["fp4deploy", *map(str, arguments)]
    os.chdir(folder)
    code: object = 0
    try:
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            internals.command_line().main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.argv = argv
        os.chdir(before)
    return Done(0 if code is None else int(str(code)), stdout.getvalue(), stderr.getvalue())


def must(*arguments: object, folder: Path) -> Done:
    """Run a command that has to succeed."""
    done = fp4deploy(*arguments, folder=folder)
    if done.code:
        raise AssertionError(f"fp4deploy {' '.join(map(str, arguments))} ended with {done.code}\n{done.stderr}")
    return done
