"""RUN/bench.jsonl: what `fp4deploy bench` measured of a run's artefacts, one line each, for `fp4deploy report`.

A line belongs to a file, by its SHA-256, and to a split of data. A report shows the last line of each artefact and
backend on the run's own validation split; numbers on other data are never put into the same table.
"""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from fp4deploy.bench.artifact import EMULATED, OK
from fp4deploy.bench.environment import environment
from fp4deploy.bench.records import ArtifactEntry, Machine, Record
from fp4deploy.runs import Run, run_of
from fp4deploy.system.files import append_line
from fp4deploy.system.schema import records, whole_lines

FILE = "bench.jsonl"


class KeptEntry(Record):
    """One line of bench.jsonl; `at` is in UTC, `data` the folder that was measured on."""

    at: str
    data: str
    entry: ArtifactEntry
    environment: Machine


def keep(path: Path, entry: ArtifactEntry, data: Path) -> None:
    """Append what was measured of a file to its run; a file outside a run, or one that was not run, is left out.

    Raises:
        InputError: the line cannot be written.
    """
    run = run_of(path)
    if run is None or entry.status not in (OK, EMULATED):
        return
    inside = entry.model_copy(update={"path": path.resolve().relative_to(run.path.resolve()).as_posix()})
    line = {
        "at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "data": str(Path(data).resolve()),
        "entry": inside.model_dump(mode="json"),
        "environment": environment(),
    }
    append_line(run.path / FILE, line)


def kept(run: Run) -> list[KeptEntry]:
    """What was measured, oldest first; lines that cannot be read are left out."""
    return list(records(KeptEntry, whole_lines(run.path / FILE)))
