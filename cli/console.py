"""Where output goes: results on stdout, progress and notes on stderr, JSON alone on stdout.

With `--quiet` stderr gets errors alone. With `--json`, commands without a JSON of their own print their results as one
document, which `collected` makes of the lines and facts that are given to `done`; their tables go to stderr.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from fp4deploy.runs import is_first_process
from fp4deploy.system.terminal import console, is_quiet

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

_collected: list[dict[str, Any]] | None = None  # results for `--json`; None where they are printed

PIPE_WIDTH = 220  # columns of a table that goes to a file or pipe, so that no path is cut


def results() -> Console:
    """Console for what the command was asked for (stdout)."""
    return _console(sys.stdout) if _collected is None else notes()


@contextmanager
def collected(command: str) -> Iterator[None]:
    """Print what is `done` in the block as one JSON document on stdout, if it ends without an error."""
    global _collected
    found: list[dict[str, Any]] = []
    _collected = found
    try:
        yield
    finally:
        _collected = None
    if is_first_process():
        print_json({"command": command, "results": found})


def notes() -> Console:
    """Console for progress, headings and remarks (stderr)."""
    return _console(sys.stderr, quiet=is_quiet())


def _console(stream: TextIO, quiet: bool = False) -> Console:
    return console(stream, width=None if stream.isatty() else PIPE_WIDTH, quiet=quiet)


def table(
    head: Iterable[str], rows: Iterable[Iterable[str | Text]] = (), right: Container[str] = (), header: bool = True
) -> Table:
    """A table without a frame, whose cells are folded where it is too narrow; right: columns of numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, show_header=header)
    for name in head:
        made.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def note(text: str) -> None:
    """One remark on stderr, of the first process alone; `text` is printed as it is, without markup."""
    if is_first_process():
        notes().print(text, markup=False, soft_wrap=True)


def done(text: str, **facts: Any) -> None:
    """One line of result on stdout, of the first process alone, never wrapped, so that a path can be copied.

    facts: the same for programs, JSON values; with `--json` they and the text are an entry of the document.
    """
    if is_first_process():
        if _collected is not None:
            _collected.append({**facts, "text": text.strip()})
        results().print(text, markup=False, soft_wrap=True)


def print_json(value: Any) -> None:
    """Write `value` as JSON to stdout, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def shown(path: Path) -> str:
    """`path` as a person writes it: relative to the current folder where it lies inside."""
    try:
        return str(Path(os.path.realpath(path)).relative_to(os.path.realpath("")))
    except (OSError, ValueError):  # the current folder may be gone
        return str(path)


def typed(path: Path) -> str:
    """`path` as an argument of the next command, to be copied into a shell."""
    text = shown(path)
    if os.name == "nt":
        import subprocess

        return subprocess.list2cmdline([text])
    return shlex.quote(text)
