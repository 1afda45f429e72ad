"""RUN/commands.jsonl: the commands a run came from, each with its time and its machine.

A report can then list them all, for a run that was trained on one machine, resumed on another and exported on a third;
`fp4deploy run` also keeps its own command and the measuring machine in report.json.
"""

from __future__ import annotations

import os
import shlex
import sys
from datetime import datetime, timezone

from fp4deploy.bench.environment import environment
from fp4deploy.bench.records import Machine, Record
from fp4deploy.runs import Run, processes
from fp4deploy.system.files import append_line
from fp4deploy.system.schema import records, whole_lines

FILE = "commands.jsonl"


class RecordedCommand(Record):
    """One line of commands.jsonl; `at` is in UTC."""

    at: str | None = None
    command: str
    environment: Machine


def record(run: Run, command: str | None = None) -> None:
    """Append a command, by default that of this process.

    Raises:
        InputError: the file cannot be written.
    """
    at = datetime.now(timezone.utc).isoformat(timespec="seconds")
    append_line(run.path / FILE, {"at": at, "command": command or this_command(), "environment": environment()})


def recorded(run: Run) -> list[RecordedCommand]:
    """What was recorded, oldest first; lines that cannot be read are left out."""
    return list(records(RecordedCommand, whole_lines(run.path / FILE)))


def this_command() -> str:
    """The command line of this process, as a user would type it."""
    program = ["fp4deploy"]
    if processes() > 1:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        here = os.environ.get("LOCAL_WORLD_SIZE", str(processes()))
        spread = ["--nnodes", nodes] if nodes != "1" else []
        program = ["torchrun", *spread, "--nproc-per-node", here, "-m", "fp4deploy.cli"]
    return shlex.join([*program, *sys.argv[1:]])
