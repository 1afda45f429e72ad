"""Stages ask a task, they do not compare its name."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from fp4deploy.errors import InputError
from fp4deploy.tasks import TASKS
from fp4deploy.train import load_config

ROOT = Path(__file__).resolve().parents[2]
OWN = (
    *("fp4deploy/tasks/", "fp4deploy/models/"),  # tasks themselves, and the card that names them
    "fp4deploy/detection/errors.py",  # a kind of error of a detector is called as one of them
)
FILES = [path for folder in ("fp4deploy", "cli") for path in sorted((ROOT / folder).rglob("*.py"))]


def names(part: ast.expr) -> set[object]:
    """Constants that are compared, alone or in a tuple or set."""
    listed = part.elts if isinstance(part, (ast.Tuple, ast.List, ast.Set)) else [part]
    return {each.value for each in listed if isinstance(each, ast.Constant)}


def compared(path: Path) -> list[int]:
    """Lines that compare something with the name of a task."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Compare) and any(names(part) & set(TASKS) for part in (node.left, *node.comparators))
    ]


def test_no_stage_compares_the_name_of_a_task() -> None:
    others = [path for path in FILES if not str(path.relative_to(ROOT)).startswith(OWN)]
    assert len(others) > 300
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in others for line in compared(path)]


def test_settings_of_other_tasks_exist_and_are_refused() -> None:
    values = {"train.class_weights": "{a: 2}", "train.class_balance": "median_frequency", "train.auprc": "true"}
    values["train.tversky"] = "[0.3, 0.7]"
    for task in TASKS.values():
        load_config(None, [f"task={task.name}"])
        for key, why in task.unused.items():
            with pytest.raises(InputError) as refused:
                load_config(None, [f"task={task.name}", f"{key}={values.get(key, '0.1')}"])
            assert key in str(refused.value)
            assert why in str(refused.value)
