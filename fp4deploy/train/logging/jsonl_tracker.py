"""Telemetry as a file of JSON lines, and metrics.jsonl: each line is flushed at once, so that a crash loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fp4deploy.errors import InputError
from fp4deploy.system.files import append_line, write_whole
from fp4deploy.system.schema import MAX_LINES_BYTES, parse_json, read_bytes, whole_lines
from fp4deploy.train.logging.tracker import EPOCH, SAMPLE, Entry

FILE = "telemetry.jsonl"
PARTS = ("values", "layers", "codes")


class JsonlTracker:
    """One JSON line an entry, flushed at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def resume(self, step: int, epoch: int) -> None:
        """Drop later lines, and one that a crash cut short."""
        if not self.path.is_file():
            return
        keep_lines(self.path, lambda line: _belongs(_parsed(line), step, epoch))

    def log(self, entry: Entry) -> None:
        """Append a line.

        Raises:
            InputError: the disk is full or the folder cannot be written.
        """
        parts = {"values": entry.values, "layers": entry.layers, "codes": entry.codes}
        head = {"kind": entry.kind, "step": entry.step, "epoch": entry.epoch}
        append_line(self.path, {**head, **{name: part for name, part in parts.items() if part}})

    def pictures(self, files: Mapping[str, Path], step: int) -> None:
        """They are files of the run already."""

    def close(self) -> None:
        """Nothing is open."""


def read_entries(path: Path) -> list[Entry]:
    """The entries of a telemetry.jsonl in order; damaged lines are skipped."""
    found = []
    for line in whole_lines(path):
        parsed = _parsed(line)
        if parsed is not None:
            parts = {name: parsed.get(name, {}) for name in PARTS}
            found.append(Entry(parsed["kind"], parsed["step"], parsed["epoch"], **parts))
    return found


def _parsed(line: object) -> dict[str, Any] | None:
    """The line if it is an entry, its numbers whole and its parts objects."""
    if not isinstance(line, dict) or line.get("kind") not in (SAMPLE, EPOCH):
        return None
    whole = all(type(line.get(name)) is int for name in ("step", "epoch"))
    return line if whole and all(isinstance(line.get(name, {}), dict) for name in PARTS) else None


def _belongs(line: dict[str, Any] | None, step: int, epoch: int) -> bool:
    if line is None:
        return False
    return bool(line["epoch"] <= epoch if line["kind"] == EPOCH else line["step"] <= step)


def keep_epochs(path: Path, last: int) -> None:
    """Drop the lines of epochs that will be trained again, and lines that cannot be read.

    Raises:
        InputError: the disk is full; the file keeps its lines.
    """
    if not path.is_file():
        return
    keep_lines(path, lambda line: _epoch(line) <= last)


def keep_lines(path: Path, wanted: Callable[[object], bool]) -> None:
    """Keep the lines of a JSON Lines file whose values are `wanted`, each with its newline.

    Raises:
        InputError: the file cannot be read, or the disk is full; the file keeps its lines.
    """
    whole = read_bytes(path, MAX_LINES_BYTES)
    kept = b"".join(line + b"\n" for line in whole.splitlines() if _is_wanted(line, wanted))
    if kept != whole:
        write_whole(path, kept)


def _is_wanted(line: bytes, wanted: Callable[[object], bool]) -> bool:
    try:
        return wanted(parse_json(line.decode("utf-8"), "the line", nan="none"))
    except (InputError, UnicodeDecodeError):
        return False


def _epoch(line: object) -> float:
    number = line.get("epoch") if isinstance(line, dict) else None
    return number if type(number) is int else math.inf
