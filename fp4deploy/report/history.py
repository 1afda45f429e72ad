"""Reading <model>/metrics.jsonl: one line an epoch of a training, with its loss and the scores of its validation."""

from __future__ import annotations

from pydantic import Field

from fp4deploy.bench.records import Record, Scores
from fp4deploy.models.card import TaskName
from fp4deploy.runs import Run
from fp4deploy.system.schema import Count, records, whole_lines
from fp4deploy.tasks import TASKS


class Epoch(Record):
    """One epoch; a score is None where that epoch was not validated."""

    epoch: Count
    loss: float | None = None
    miou: float | None = None
    ap: float | None = None
    top1: float | None = None
    per_class: Scores = Field(default_factory=dict)

    def score(self, task: TaskName) -> float | None:
        """Of the task's metric."""
        found: float | None = getattr(self, TASKS[task].key)
        return found


def history(run: Run, model: str) -> list[Epoch]:
    """Epochs of a model in the order of the file; lines that cannot be read are skipped."""
    return list(records(Epoch, whole_lines(run.model_dir(model) / "metrics.jsonl")))
