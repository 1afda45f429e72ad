"""Reading <model>/metrics.jsonl: one line an epoch of a training, with its loss and the scores of its validation."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import Field

from fp4deploy.bench.records import Record, Scores
from fp4deploy.report.model import Task
from fp4deploy.runs import Run


class Epoch(Record):
    """One epoch; a score is None where that epoch was not validated."""

    epoch: int
    loss: float | None = None
    miou: float | None = None
    ap: float | None = None
    per_class: Scores = Field(default_factory=dict)

    def score(self, task: Task) -> float | None:
        """mIoU of a semantic model, AP of an instance model."""
        return self.ap if task == "instance" else self.miou


def history(run: Run, model: str) -> list[Epoch]:
    """Epochs of a model in the order of the file; a line that an interruption cut short is skipped."""
    path = run.model_dir(model) / "metrics.jsonl"
    return [found for line in _lines(path) if (found := _epoch(line)) is not None]


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else []


def _epoch(line: str) -> Epoch | None:
    try:
        return Epoch.model_validate(json.loads(line, parse_constant=lambda _: None))
    except ValueError:  # also pydantic's ValidationError
        return None
