"""Telemetry as a file of JSON lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fp4deploy.system.files import append_line
from fp4deploy.system.schema import whole_lines
from fp4deploy.train.logging.metrics_log import keep_lines
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


def _parsed(line: Any) -> dict[str, Any] | None:
    """The line if it is an entry, its numbers whole and its parts objects."""
    if not isinstance(line, dict) or line.get("kind") not in (SAMPLE, EPOCH):
        return None
    whole = all(type(line.get(name)) is int for name in ("step", "epoch"))
    return line if whole and all(isinstance(line.get(name, {}), dict) for name in PARTS) else None


def _belongs(line: dict[str, Any] | None, step: int, epoch: int) -> bool:
    if line is None:
        return False
    return bool(line["epoch"] <= epoch if line["kind"] == EPOCH else line["step"] <= step)
