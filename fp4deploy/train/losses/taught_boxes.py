"""Distillation of a detector: how far its boxes are from those of a teacher, place by place.

With z and t the class logits of student and teacher at one place, T the temperature, and s(x) the sigmoid,

    class        T^2 KL(s(t / T) || s(z / T))   over places and classes           / sum over places of max_c s(t_c)
    box          w (1 - GIoU of the student's box with the teacher's)             / sum of w
    centre-ness  w T^2 KL(s(t / T) || s(z / T)) of its logits                     / sum of w

w is the teacher's score of the place, of its best class: where the teacher sees no object, its box means nothing. The
classes are independent of one another in a detector, so that KL is of a probability and its complement and not of a
softmax. The three are weighted as the loss against the labels is (`losses.boxes`), whose GIoU this is: most of what FP4
costs a detector is the exact place of the sides, and the teacher says at every place where they are, also where no
label was assigned. The sums run over all processes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4deploy.models.boxes import DetectionHead
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.boxes import giou


@dataclass(frozen=True)
class BoxDivergence:
    """`BoxDivergence(...)(outputs, teacher, temperature)` of two [N, channels, places] -> float32 scalar, 0 for equal
    ones; `weights`: of class, box and centre-ness.
    """

    head: DetectionHead
    weights: tuple[float, float, float] = (1.0, 1.0, 1.0)

    def __call__(self, outputs: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
        if outputs.shape != teacher.shape:
            raise ValueError(f"the teacher's outputs are {list(teacher.shape)}, the student's {list(outputs.shape)}")
        head = self.head
        with torch.autocast(outputs.device.type, enabled=False):
            outputs, teacher = (each if each.dtype == torch.float64 else each.float() for each in (outputs, teacher))
            found, expected = head.class_logits(outputs), head.class_logits(teacher)
            box = head.distances(teacher)
            with_area = (box[:, 0] + box[:, 2] > 0) & (box[:, 1] + box[:, 3] > 0)  # fcos_relu has boxes without
            weight = head.scores(teacher).amax(1) * with_area
            overlap = giou(head.distances(outputs), box.where(with_area[:, None], 1.0))
            centre = torch.zeros_like(weight)
            if head.centred:
                centre = bernoulli_divergence(head.centredness(outputs), head.centredness(teacher), temperature)
            sums = [
                bernoulli_divergence(found, expected, temperature).sum(),
                ((1 - overlap) * weight).sum(),
                (centre * weight).sum(),
                expected.sigmoid().amax(1).sum(),
                weight.sum(),
            ]
            of_class, of_box, of_centre, seen, mass = summed(torch.stack(sums)).unbind()
            parts = of_class / seen.clamp(min=1), of_box / mass.clamp(min=1), of_centre / mass.clamp(min=1)
            return torch.stack([each * part for each, part in zip(self.weights, parts, strict=True)]).sum()


def bernoulli_divergence(logits: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 KL of every element: between the teacher's probability of yes and the student's, both at logits / T."""
    z, t = logits / temperature, teacher / temperature
    yes = t.sigmoid()
    return temperature**2 * (
        yes * (F.logsigmoid(t) - F.logsigmoid(z)) + (1 - yes) * (F.logsigmoid(-t) - F.logsigmoid(-z))
    )
