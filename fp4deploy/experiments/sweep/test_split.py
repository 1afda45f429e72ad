"""Scores on the test split, whose images were not used to choose the best epoch: once, when a training is over.

    test.json     next to the model's checkpoint: split, images, and the scores as metrics.jsonl has them

The best checkpoint is scored as it ships (`qat.load_model`), in autocast on a GPU and in FP32 on a CPU. Continuing
the training removes the file; after a change of the test split, remove it by hand. `fp4deploy bench --split test`
scores every artefact of a run.
"""

from __future__ import annotations

import json
import math
from contextlib import closing
from pathlib import Path

import torch

from fp4deploy.bench.records import Record
from fp4deploy.data import TEST, CocoDataset, expand, has_split
from fp4deploy.errors import InputError
from fp4deploy.qat import load_model
from fp4deploy.rest import rest_of
from fp4deploy.runs import Run
from fp4deploy.system.files import atomic_write
from fp4deploy.system.schema import Share, read_json, validated
from fp4deploy.tasks import TASKS, TaskScores, key_of, readable, task_of
from fp4deploy.train.batches import validation_loader
from fp4deploy.train.config import Config
from fp4deploy.train.tasks import make_task

FILE = "test.json"


def score_test(config: Config, run: Run, model: str) -> str | None:
    """Score the best checkpoint of a model on the test split, unless it is scored or there is no such split.

    Returns:
        The scores for a person; None where nothing was to do.

    Raises:
        InputError: images or the checkpoint cannot be read, the split lacks a class or has nothing to score, or a file
            cannot be written.
    """
    path, root = run.model_dir(model) / FILE, config.data.root
    if root is None or not needs_test_score(config, run, model):
        return None
    images, scores = _score(config, Path(root), run.checkpoint(model))
    if not math.isfinite(scores.score):
        raise InputError(f"The test split of {root} holds no object of the classes that are scored.")
    with atomic_write(path) as temporary:
        temporary.write_text(
            json.dumps({"split": TEST, "images": images, **scores.line()}, indent=1) + "\n", encoding="utf-8"
        )
    return scores.text()


def needs_test_score(config: Config, run: Run, model: str) -> bool:
    """Whether the data has a test split, and the model is not scored on it yet."""
    root = config.data.root
    if root is None or (run.model_dir(model) / FILE).is_file():
        return False
    return has_split(Path(root), TEST, TASKS[config.task].counts_objects)


class _TestScores(Record):
    miou: Share | None = None
    ap: Share | None = None
    top1: Share | None = None


def read_test(run: Run, model: str, metric: str) -> float | None:
    """The score of this metric that `score_test` has written; None where it has not.

    Raises:
        InputError: the file cannot be read.
    """
    path = run.model_dir(model) / FILE
    if not path.is_file():
        return None
    found = validated(_TestScores, read_json(path), path)
    score: float | None = getattr(found, key_of(metric))
    return score


def forget_test(run: Run, model: str) -> None:
    """Before the model is trained on: its checkpoint will be another one."""
    (run.model_dir(model) / FILE).unlink(missing_ok=True)


@torch.inference_mode()
def _score(config: Config, root: Path, checkpoint: Path) -> tuple[int, TaskScores]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network, card = load_model(checkpoint, device)
    data = task_of(card).for_card(card, root, TEST)
    if isinstance(data, CocoDataset) and not data.annotated:
        raise InputError(f"The test split of {root} has images and no annotations: there is nothing to score.")
    task = make_task(config, card, data)
    evaluation = task.evaluation()
    autocast = rest_of(card).autocast(device.type)
    with closing(validation_loader(config, data)) as batches, autocast:
        for batch in batches:
            images, labels = expand(*(part.to(device, non_blocking=True) for part in batch))
            evaluation.update(readable(task.outputs(network, images)), labels)
    return len(data), evaluation.compute()
