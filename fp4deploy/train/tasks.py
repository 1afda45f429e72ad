"""A task in the training loop: its loss, its evaluation, its warnings.

| task | labels | loss | best checkpoint by |
|---|---|---|---|
| semantic | classes [N, H, W] | cross-entropy + Dice | mIoU at the size of the input |
| instance, centres | classes and numbers [N, 2, H, W] | semantic + heatmap + offsets | AP at the images' own size |
| instance, set | classes and numbers [N, 2, H, W] | matched BCE + Dice, and semantic | AP at the images' own size |

A validation batch of an instance task comes with the indices of its images in place of labels, because AP is measured
against the annotations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from fp4deploy.data import CocoDataset, SegmentationDataset, cached_counts, class_balance
from fp4deploy.errors import InputError
from fp4deploy.instances import InstanceEvaluation
from fp4deploy.metrics import Scores, SegmentationScore
from fp4deploy.models import InstanceHead, ModelCard
from fp4deploy.runs import Run
from fp4deploy.train.config import Config
from fp4deploy.train.losses.centres import CentreLoss
from fp4deploy.train.losses.segmentation import SegmentationLoss
from fp4deploy.train.losses.sets import SetLoss
from fp4deploy.train.sections import InstanceSection, TrainSection

COUNTS_FILE = "class_counts.json"
METRICS = {"semantic": "mIoU", "instance": "AP"}
Gather = Callable[..., Any]
ByName = dict[str, float]  # class -> weight


class TaskScores(Protocol):
    """Scores of one validation."""

    @property
    def score(self) -> float: ...
    def line(self) -> dict[str, Any]: ...
    def text(self) -> str: ...


class Evaluation(Protocol):
    """Collects one validation; `gather` joins what several processes have."""

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather) -> None: ...
    def compute(self) -> TaskScores: ...


class Task(Protocol):
    """One task; `metric` is its score's name in files."""

    metric: str
    loss: Any

    def evaluation(self) -> Evaluation: ...
    def warnings(self) -> list[str]: ...


class SemanticTask:
    """A class for every pixel."""

    metric = "miou"

    def __init__(self, settings: TrainSection, card: ModelCard, balance: ByName | None = None) -> None:
        self.class_names = card.class_names
        self.loss = semantic_loss(settings, card, balance)

    def evaluation(self) -> Evaluation:
        """mIoU."""
        return _SemanticEvaluation(self.class_names)

    def warnings(self) -> list[str]:
        """None."""
        return []


class _SemanticEvaluation:
    def __init__(self, class_names: tuple[str, ...]) -> None:
        self._score = SegmentationScore(len(class_names), class_names)

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather) -> None:
        prediction, labels = gather((outputs.argmax(dim=1), labels))
        self._score.update(prediction, labels)

    def compute(self) -> Scores:
        return self._score.compute()


class InstanceTask:
    """An object for every pixel of a thing."""

    metric = "ap"

    def __init__(
        self,
        settings: TrainSection,
        instance: InstanceSection,
        card: ModelCard,
        val: CocoDataset,
        balance: ByName | None = None,
    ) -> None:
        assert card.head is not None
        self.head, self._val = card.head, val
        semantic = semantic_loss(settings, card, balance)
        self.loss: CentreLoss | SetLoss
        if card.head.method == "centres":
            self.loss = CentreLoss(card.head, semantic, instance.heatmap, instance.offset, instance.sigma)
        else:
            self.loss = SetLoss(card.head, semantic, instance.mask_bce, instance.mask_dice, instance.empty)

    @cached_property
    def _ground_truth(self) -> dict[str, Any]:
        return self._val.ground_truth()

    def evaluation(self) -> Evaluation:
        """COCO's AP."""
        return InstanceEvaluation(self._val, self.head, self._ground_truth)

    def warnings(self) -> list[str]:
        """Those of the loss."""
        return self.loss.warnings()


def make_task(config: Config, card: ModelCard, val: Any, balance: ByName | None = None) -> Task:
    """The task of a configuration; `val` is the validation split, not cached, `balance` as of `semantic_loss`."""
    if config.task == "semantic":
        return SemanticTask(config.train, card, balance)
    return InstanceTask(config.train, config.instance, card, val, balance)


def class_weights(config: Config, run: Run, train_data: SegmentationDataset) -> ByName | None:
    """Weights of the cross-entropy by how often each class occurs (`train.class_balance`); None where not asked for.

    Counting reads every training mask; the counts are kept in the run's folder.

    Raises:
        InputError: a mask cannot be read.
    """
    if config.train.class_balance is None:
        return None
    counts = cached_counts(train_data, run.path / COUNTS_FILE, str(config.data.root))
    return class_balance(counts, config.train.class_balance, config.train.balance_power)


def make_head(config: Config, data: CocoDataset) -> InstanceHead:
    """Layout of the channels that the configuration asks for on this data."""
    chosen, classes = config.instance, len(data.class_names)
    common: dict[str, Any] = {
        "stuff": data.stuff,
        "nms": chosen.nms,
        "threshold": chosen.threshold,
        "max_detections": chosen.max_detections,
    }
    if chosen.method == "centres":
        return InstanceHead("centres", classes, **common)
    return InstanceHead("set", classes if classes > 2 else 0, chosen.channels, **common)


def semantic_loss(settings: TrainSection, card: ModelCard, balance: ByName | None = None) -> SegmentationLoss:
    """Cross-entropy and Dice with the weights of the configuration; `balance` weighs classes in the former alone."""
    weights = _weights(settings.class_weights, card), settings.label_smoothing, _weights(balance, card)
    return SegmentationLoss(settings.cross_entropy, settings.dice, *weights)


def _weights(by_name: ByName | None, card: ModelCard) -> Tensor | None:
    return torch.tensor([by_name.get(name, 1.0) for name in card.class_names]) if by_name else None


def require_same_task(path: Path, found: ModelCard, expected: ModelCard) -> None:
    """Let a checkpoint be fine-tuned only for the task it was trained for.

    Raises:
        InputError: it was trained for another.
    """
    if found.task != expected.task:
        raise InputError(
            f"{path} was trained for the {found.task} task, and this run is for the {expected.task} task: their output "
            f"channels mean different things. Choose --task {found.task}, or another checkpoint."
        )


def require_same_head(path: Path, found: InstanceHead | None, expected: InstanceHead | None) -> None:
    """Let a checkpoint be fine-tuned only with the channels it was trained with; how they are decoded may differ.

    Raises:
        InputError: the channels mean something else.
    """
    layouts = [(head.method, head.classes, head.masks, head.stuff) if head else None for head in (found, expected)]
    if layouts[0] != layouts[1]:
        raise InputError(
            f"{path} has the instance head {_layout(found)}, and this run {_layout(expected)}. Give both the same "
            "instance.method, instance.channels and instance.stuff, or choose another checkpoint."
        )


def _layout(head: InstanceHead | None) -> str:
    if head is None:
        return "none"
    masks = f" of {head.masks} masks" if head.method == "set" else ""
    stuff = f", {len(head.stuff)} of them stuff" if head.stuff else ""
    return f"'{head.method}'{masks} and {head.classes} semantic channels{stuff}"
