"""Auxiliary losses: distillation from a teacher's logits and features (`losses.features`), and weight dampening.

Distillation. With z the logits of the student, t those of the teacher, T the temperature and softmax_T(x) the softmax
of x / T over the classes,

    loss  =  task * loss of the labels  +  weight * T^2 * mean over pixels of KL(softmax_T(t) || softmax_T(z))
             +  features * loss of the features

T^2 keeps the gradient's size when T changes. The teacher is the FP16 model that fine-tuning starts from, so that at
first the divergence is the effect of quantisation alone. It needs no labels and covers void pixels as well. A detector
has a divergence of its own in place of KL (`losses.taught_boxes`).

Dampening. In straight-through training a weight near the threshold between two codes oscillates between them. Late in
the training a penalty on the distance to the code's value, with a weight that rises linearly to `damping`,

    loss  +=  damping * ramp * sum over layers of |w - Q(w)|^2,      gradient to w alone

makes it settle; earlier it would keep the weights at the codes they start with.

Sources: Hinton, Vinyals, Dean, "Distilling the Knowledge in a Neural Network", 2015; Nagel et al., "Overcoming
Oscillations in Quantization-Aware Training", 2022.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import nn

from fp4deploy.plugins.quantize.layout import place
from fp4deploy.qat import QuantizedLayer
from fp4deploy.qat.fused_unet import FusedUNet, fuse_unet
from fp4deploy.train.losses.features import Features
from fp4deploy.train.sections import DistillSection

Divergence = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


@dataclass
class AuxiliaryLosses:
    """The auxiliary losses of one model, `placed` on the device that it trains on.

    teacher: a model that gives outputs of the student's shape for the images, or None.
    divergence: of (student's outputs, teacher's outputs, temperature).
    damping, damping_start: as in `sections.QuantSection`.
    """

    teacher: nn.Module | None = None
    distill: DistillSection = field(default_factory=DistillSection)
    damping: float = 0.0
    damping_start: float = 0.5
    divergence: Divergence = field(default_factory=lambda: distillation_loss)
    features: Features | None = None

    @property
    def compares_features(self) -> bool:
        """Every layer has to be called as a module: no fused forward, which calls none, and no compiled one."""
        return self.teacher is not None and self.distill.features > 0

    def placed(
        self, student: nn.Module, device: torch.device, layout: torch.memory_format, fused: bool
    ) -> AuxiliaryLosses:
        """Move the teacher to the device, frozen, in the layout of the student's images."""
        if self.teacher is not None:
            if self.compares_features:
                self.features = Features(student, self.teacher)
            if fused:
                fuse_unet(self.teacher)
            layout = torch.channels_last if isinstance(self.teacher, FusedUNet) else layout
            place(self.teacher, device, layout).eval().requires_grad_(False)
        return self

    def __call__(
        self,
        loss: torch.Tensor,
        images: torch.Tensor,
        logits: torch.Tensor,
        layers: Sequence[QuantizedLayer],
        done: float,
        autocast: Callable[[], AbstractContextManager[object]],
    ) -> torch.Tensor:
        """The whole loss, a scalar; `done` is the share of the training's steps that are done."""
        if self.teacher is not None:
            with torch.no_grad(), autocast():
                teacher_logits = self.teacher(images)
            loss = self.distill.task * loss
            if self.distill.weight:
                loss = loss + self.distill.weight * self.divergence(logits, teacher_logits, self.distill.temperature)
            if self.features is not None:
                loss = loss + self.distill.features * self.features.loss()
        strength = self.damping * max(0.0, (done - self.damping_start) / (1 - self.damping_start))
        if strength > 0:
            loss = loss + strength * damping_loss(layers)
        return loss


def distillation_loss(logits: torch.Tensor, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """T^2 KL(teacher || student), the mean over pixels, in FP32.

    Args:
        logits, teacher: [N, C, H, W], any float dtype.
    """
    if logits.shape != teacher.shape:
        raise ValueError(f"the teacher's logits are {list(teacher.shape)}, the student's {list(logits.shape)}")
    with torch.autocast(logits.device.type, enabled=False):
        student = (logits.float() / temperature).log_softmax(1)
        expected = (teacher.float() / temperature).log_softmax(1)
        divergence = (expected.exp() * (expected - student)).sum(1)
    return temperature**2 * divergence.mean()


def damping_loss(layers: Sequence[QuantizedLayer]) -> torch.Tensor:
    """Sum over layers and elements of |w - Q(w)|^2, Q(w) taken as constant; 0 where no weight is quantised."""
    total = torch.zeros((), device=layers[0].weight.device if layers else None)
    for layer in layers:
        if layer.recipe.weight is not None:
            with torch.no_grad():
                target = layer.quantized_weight()
            total = total + (layer.weight - target).float().square().sum()
    return total
