"""metrics.jsonl: one line an epoch, flushed at once, so that a crash loses nothing that was printed."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.system.files import write_whole
from fp4deploy.system.schema import MAX_LINES_BYTES, parse_json, read_bytes


def keep_epochs(path: Path, last: int) -> None:
    """Drop the lines of epochs that will be trained again, and lines that cannot be read.

    Raises:
        InputError: the disk is full; the file keeps its lines.
    """
    if not path.is_file():
        return
    keep_lines(path, lambda line: _epoch(line) <= last)


def keep_lines(path: Path, wanted: Callable[[Any], bool]) -> None:
    """Keep the lines of a JSON Lines file whose values are `wanted`, each with its newline.

    Raises:
        InputError: the file cannot be read, or the disk is full; the file keeps its lines.
    """
    whole = read_bytes(path, MAX_LINES_BYTES)
    kept = b"".join(line + b"\n" for line in whole.splitlines() if _is_wanted(line, wanted))
    if kept != whole:
        write_whole(path, kept)


def _is_wanted(line: bytes, wanted: Callable[[Any], bool]) -> bool:
    try:
        return wanted(parse_json(line.decode("utf-8"), "the line", nan="none"))
    except (InputError, UnicodeDecodeError):
        return False


def _epoch(line: Any) -> float:
    number = line.get("epoch") if isinstance(line, dict) else None
    return number if type(number) is int else math.inf
