"""A task in the training loop: its loss and its warnings; `fp4deploy.tasks` has what it has in common with bench.

| task | labels | loss | best checkpoint by |
|---|---|---|---|
| semantic | classes [N, H, W] | cross-entropy + Dice | mIoU at the size of the input |
| instance, centres | classes and numbers [N, 2, H, W] | semantic + heatmap + offsets | AP at the images' own size |
| instance, set | classes and numbers [N, 2, H, W] | matched BCE + Dice, and semantic | AP at the images' own size |
| detection | boxes [N, M, 5] | focal + GIoU + centre-ness | AP at the images' own size |
| classification | classes [N] | cross-entropy | share of images whose class is right |

A validation batch of instances and boxes comes with the indices of its images in place of labels, because AP is
measured against the annotations.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp4deploy.data import CocoDataset, SegmentationDataset, cached_counts, class_balance
from fp4deploy.errors import InputError
from fp4deploy.models import DetectionHead, InstanceHead, ModelCard
from fp4deploy.models.heads import ClassHead, Head
from fp4deploy.models.spec import parse_spec
from fp4deploy.models.torchvision_detectors import own_layout
from fp4deploy.runs import Run
from fp4deploy.tasks import TASKS, Evaluation
from fp4deploy.tasks.images import ClassEvaluation
from fp4deploy.tasks.volumes import applied_by_torch
from fp4deploy.train.config import Config
from fp4deploy.train.losses.boxes import BoxLoss
from fp4deploy.train.losses.centres import CentreLoss
from fp4deploy.train.losses.loss import LabelLoss, Loss
from fp4deploy.train.losses.segmentation import SegmentationLoss
from fp4deploy.train.losses.sets import SetLoss
from fp4deploy.train.sections import TrainSection

COUNTS_FILE = "class_counts.json"
ByName = dict[str, float]  # class -> weight


class TrainingTask:
    """One task on one validation split.

    metric: its score's key in files.
    """

    def __init__(self, loss: Loss, card: ModelCard, val: SegmentationDataset, auprc: bool = False) -> None:
        """auprc: validations measure it, too.

        Raises:
            InputError: `auprc` of volumes.
        """
        if auprc and card.volume is not None:
            raise InputError("train.auprc is of images, and volumes are scored by Dice and distances. Leave it false.")
        self.loss, self.card, self._val, self._auprc = loss, card, val, auprc
        self._task = TASKS[card.task]
        self.metric = self._task.key

    @cached_property
    def _ground_truth(self) -> dict[str, object] | None:
        return self._task.ground_truth(self._val)

    def outputs(self, network: Any, inputs: Tensor) -> Tensor:
        """What a validation takes of a network: its outputs, of a volume those of all its windows."""
        return applied_by_torch(self.card, network, inputs)

    def evaluation(self) -> Evaluation:
        """A new validation."""
        found = self._task.evaluation(self._val, self.card, self._ground_truth)
        found.matches = False
        if isinstance(found, ClassEvaluation):
            found.curves = self._auprc
        return found


def make_task(config: Config, card: ModelCard, val: Any, balance: ByName | None = None) -> TrainingTask:
    """The task of a configuration; `val` is the validation split, not cached, `balance` as of `semantic_loss`."""
    return TrainingTask(LOSSES[config.task](config, card, balance), card, val, config.train.auprc)


def _semantic(config: Config, card: ModelCard, balance: ByName | None) -> SegmentationLoss:
    return semantic_loss(config.train, card, balance)


def _instance(config: Config, card: ModelCard, balance: ByName | None) -> CentreLoss | SetLoss:
    assert isinstance(card.head, InstanceHead)
    chosen, semantic = config.instance, semantic_loss(config.train, card, balance)
    if card.head.method == "centres":
        return CentreLoss(card.head, semantic, chosen.heatmap, chosen.offset, chosen.sigma)
    return SetLoss(card.head, semantic, chosen.mask_bce, chosen.mask_dice, chosen.empty)


def _detection(config: Config, card: ModelCard, balance: ByName | None) -> BoxLoss:
    assert isinstance(card.head, DetectionHead)
    chosen = config.detection
    weights = chosen.class_loss, chosen.box_loss, chosen.centre_loss
    return BoxLoss(card.head, (card.height, card.width), weights, chosen.alpha, chosen.gamma)


def _classification(config: Config, card: ModelCard, balance: ByName | None) -> LabelLoss:
    return LabelLoss(config.train.label_smoothing)


LOSSES: dict[str, Any] = {
    "semantic": _semantic,
    "instance": _instance,
    "detection": _detection,
    "classification": _classification,
}


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


def make_head(config: Config, data: SegmentationDataset) -> InstanceHead | ClassHead | DetectionHead | None:
    """Layout of the output that the configuration asks for on this data; None of a semantic model."""
    found: InstanceHead | ClassHead | DetectionHead | None = HEADS[config.task](config, data)
    return found


def _instance_head(config: Config, data: SegmentationDataset) -> InstanceHead:
    assert isinstance(data, CocoDataset)
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


def _no_head(config: Config, data: SegmentationDataset) -> None:
    return None


def _detection_head(config: Config, data: SegmentationDataset) -> DetectionHead:
    chosen = config.detection
    layout = {
        "method": "fcos",
        "width": chosen.width,
        "depth": chosen.depth,
        **own_layout(parse_spec(config.model.spec)),
    }
    return DetectionHead(
        **layout,
        classes=len(data.class_names) - 1,
        threshold=chosen.threshold,
        nms=chosen.nms,
        max_detections=chosen.max_detections,
    )


def _class_head(config: Config, data: SegmentationDataset) -> ClassHead:
    return ClassHead("label", len(data.class_names))


HEADS: dict[str, Any] = {
    "semantic": _no_head,
    "instance": _instance_head,
    "detection": _detection_head,
    "classification": _class_head,
}


def semantic_loss(settings: TrainSection, card: ModelCard, balance: ByName | None = None) -> SegmentationLoss:
    """Cross-entropy and Dice with the weights of the configuration; `balance` weighs classes in the former alone."""
    weights = _weights(settings.class_weights, card), settings.label_smoothing, _weights(balance, card)
    return SegmentationLoss(settings.cross_entropy, settings.dice, *weights, settings.tversky)


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


def require_same_head(path: Path, found: Head | None, expected: Head | None) -> None:
    """Let a checkpoint be fine-tuned, or teach, only with the channels it was trained with; how they are decoded may
    differ.

    Raises:
        InputError: the channels mean something else.
    """
    if _layout(found) != _layout(expected) or getattr(found, "stuff", ()) != getattr(expected, "stuff", ()):
        raise InputError(
            f"{path} has the head {_layout(found)}, and this run {_layout(expected)}. Give both the same "
            "instance.method, instance.channels and instance.stuff, or, of detectors, the same strides and model; or "
            "choose another checkpoint."
        )


def _layout(head: Head | None) -> str:
    return "none" if head is None else head.layout
