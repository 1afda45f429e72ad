"""The auxiliary losses that a configuration asks for: the teacher of a distillation, and weight dampening.

`losses.auxiliary` has their formulas. Only `nvfp4` has them, and `fp16_control` is distilled as well, so that the
comparison of the two stays fair (`distill.control=false` switches that off).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.models import DetectionHead, ModelCard, load_weights, read_card
from fp4deploy.models.checkpoint import network_of
from fp4deploy.train.config import Config
from fp4deploy.train.losses.auxiliary import AuxiliaryLosses, Divergence, distillation_loss
from fp4deploy.train.losses.taught_boxes import BoxDivergence
from fp4deploy.train.tasks import require_same_head


def make_auxiliary_losses(
    config: Config, model: str, target: ModelCard, start: Callable[[], Path]
) -> AuxiliaryLosses | None:
    """The auxiliary losses of one model, None where there are none.

    Args:
        target: the card of that model.
        start: gives the FP16 checkpoint of a fine-tuning; called only where it is the teacher.

    Raises:
        InputError: there is no teacher, or it is one of another task, other classes or another head.
    """
    distilled = config.distill.teaches and (model == "nvfp4" or (model == "fp16_control" and config.distill.control))
    damping = config.quant.damping if model == "nvfp4" else 0.0
    if not distilled and not damping:
        return None
    teacher = None
    if distilled:
        teacher = _teacher(Path(config.distill.teacher) if config.distill.teacher else start(), target)
    chosen = config.quant.damping_start, _divergence(config, target)
    return AuxiliaryLosses(teacher, config.distill, damping, *chosen)


def _divergence(config: Config, target: ModelCard) -> Divergence:
    if isinstance(target.head, DetectionHead):
        chosen = config.detection
        return BoxDivergence(target.head, (chosen.class_loss, chosen.box_loss, chosen.centre_loss))
    return distillation_loss


def _teacher(path: Path, target: ModelCard) -> nn.Module:
    card = read_card(path)
    if card.precision != "fp16" or (card.task, card.class_names) != (target.task, target.class_names):
        raise InputError(
            f"{path} cannot teach: it is {card.task}, {card.precision}, with {len(card.class_names)} classes, and a "
            f"teacher is an FP16 model of the {target.task} task and the classes {', '.join(target.class_names)}. "
            "Give another with --set distill.teacher=FILE."
        )
    require_same_head(path, card.head, target.head)
    teacher = network_of(path, card)
    load_weights(teacher, path)
    return teacher
