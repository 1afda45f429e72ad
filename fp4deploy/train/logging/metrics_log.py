"""metrics.jsonl: one line an epoch, flushed at once, so that a crash loses nothing that was printed."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.files import atomic_write


def append_line(path: Path, line: dict[str, Any]) -> None:
    """Append one line; NaN becomes null, which JSON has.

    Raises:
        InputError: the disk is full or the folder cannot be written.
    """
    clean = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in line.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(clean, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise InputError(f"{path} could not be written: {error.strerror}. Free some space and use --resume.") from error


def keep_epochs(path: Path, last: int) -> None:
    """Drop the lines of epochs that will be trained again, and a line that an interruption cut short.

    Raises:
        InputError: the disk is full; the file keeps its lines.
    """
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if _epoch(line) <= last]
    if kept != lines:
        with atomic_write(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")


def _epoch(line: str) -> float:
    try:
        return float(json.loads(line)["epoch"])
    except (ValueError, KeyError, TypeError):
        return math.inf
