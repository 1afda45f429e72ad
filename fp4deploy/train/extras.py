"""What a configuration adds to a model's training: a teacher, damping, rates of learned amaxes, weights of classes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fp4deploy.data import SegmentationDataset, cached_counts, class_balance
from fp4deploy.errors import InputError
from fp4deploy.models import build_unet, load_weights, read_card
from fp4deploy.runs import Run
from fp4deploy.train.config import Config
from fp4deploy.train.losses.auxiliary import Additions
from fp4deploy.train.plan import Extras

COUNTS_FILE = "class_counts.json"


def make_extras(
    config: Config, run: Run, model: str, train_data: SegmentationDataset, start: Callable[[], Path]
) -> Extras:
    """The extras of one model; `start` gives the FP16 checkpoint of a fine-tuning, and is asked only for a teacher.

    Raises:
        InputError: there is no teacher, or it has other classes; a mask cannot be read.
    """
    quant = config.quant
    return Extras(
        additions=_additions(config, model, train_data.class_names, start),
        clip_rates=(quant.clip_lr, quant.clip_decay),
        balance=_balance(config, run, train_data),
    )


def _additions(config: Config, model: str, class_names: tuple[str, ...], start: Callable[[], Path]) -> Additions | None:
    taught = config.distill.weight > 0 and (model == "nvfp4" or (model == "fp16_control" and config.distill.control))
    damping = config.quant.damping if model == "nvfp4" else 0.0
    if not taught and not damping:
        return None
    teacher = (
        _teacher(Path(config.distill.teacher) if config.distill.teacher else start(), class_names) if taught else None
    )
    return Additions(teacher, config.distill, damping, config.quant.damping_start)


def _teacher(path: Path, class_names: tuple[str, ...]) -> nn.Module:
    card = read_card(path)
    if card.precision != "fp16" or card.task != "semantic" or card.class_names != class_names:
        raise InputError(
            f"{path} cannot teach: it is {card.task}, {card.precision}, with {len(card.class_names)} classes, and a "
            f"teacher is a semantic FP16 model of the classes {', '.join(class_names)}. Give another with "
            "--set distill.teacher=FILE."
        )
    teacher = build_unet(len(class_names), card.scale, card.digits)
    load_weights(teacher, path)
    return teacher


def _balance(config: Config, run: Run, data: SegmentationDataset) -> dict[str, float] | None:
    if config.train.class_balance is None:
        return None
    counts = cached_counts(data, run.path / COUNTS_FILE, str(config.data.root))
    return class_balance(counts, config.train.class_balance, config.train.balance_power)
