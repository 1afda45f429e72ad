"""Tasks: what a model's labels, outputs and scores mean.

protocol.py     what every stage asks of a task
semantic.py     a class for every pixel
instance.py     an object for every pixel of a thing
detection.py    a box for every object
"""

from __future__ import annotations

from fp4deploy.models.card import ModelCard
from fp4deploy.tasks.detection import DetectionTask
from fp4deploy.tasks.instance import InstanceTask
from fp4deploy.tasks.protocol import Evaluation, Task, TaskScores, readable
from fp4deploy.tasks.semantic import SemanticTask

TASKS: dict[str, Task] = {task.name: task for task in (SemanticTask(), InstanceTask(), DetectionTask())}

__all__ = ["TASKS", "Evaluation", "Task", "TaskScores", "readable", "task_of"]


def task_of(card: ModelCard) -> Task:
    """The task that a model was trained for."""
    return TASKS[card.task]
