"""Of training."""

from __future__ import annotations

import numpy as np
import torch

from fp4deploy.train import schedule
from fp4deploy.train.losses import auxiliary, boxes, centres, features, segmentation, sets, taught_boxes
from tests.contract.results.arguments import (
    classes,
    gathered,
    objects,
    real,
)
from tests.contract.results.of_scores import HEADS, box_outputs
from tests.contract.results.plain import Answer, each

LABELS = torch.from_numpy(np.stack([np.where(objects() > 0, 1 + objects() % 2, 0), objects()])).long()[None]
BOXES = torch.tensor([[[1, 3, 2, 12, 9], [2, 12, 5, 38, 22], [255, 1, 15, 30, 20], [-1, 0, 0, 0, 0]]]).float()
WEIGHTS = (None, torch.tensor([1.0, 0, 2, 3]))
RESULTS: dict[str, Answer] = {
    "learning rates": each(schedule.learning_rate, (0, 1, 5, 9, 10), (1, 10), (2.0,), (0.0, 0.05, 0.4)),
    "dice": each(segmentation.dice_loss, (real(2, 4, 9, 14),), (classes(2, 9, 14),), WEIGHTS),
    "cross-entropy": each(lambda *options: segmentation.SegmentationLoss(*options).of(real(2, 4, 9, 14), classes(2, 9, 14)),
                          (1.0, 2.0), (0.0, 3.0), WEIGHTS, (0.0, 0.2), WEIGHTS),
    "distillation": each(auxiliary.distillation_loss, (real(2, 4, 9, 14),), (real(2, 4, 9, 14, seed=1),), (1.0, 3.0)),
    "focal": each(boxes.focal_loss, (real(3, 8),), ((real(3, 8, seed=1) > 0).float(),), (0.25, 0.7), (0.0, 2.0)),
    "giou": lambda: [boxes.giou(real(2, 4, 9).exp(), real(2, 4, 9, seed=1).exp()), boxes.centre_ness(real(2, 4, 9).exp())],
    "assigned": gathered(HEADS, lambda head: boxes.assign(BOXES, head, (24, 40))),
    "box divergence": gathered(HEADS, lambda head: [taught_boxes.BoxDivergence(head, weights)(
        box_outputs(head)[None], box_outputs(head)[None].flip(2), temperature) for weights in ((1, 1, 1), (1, 0, 0), (0, 2, 0))
        for temperature in (1.0, 4.0)]),
    "centre targets": each(centres.centre_targets, (LABELS[:, 1],), (0.15, 0.5)),
    "features": each(features.distance, (real(3, 4), torch.zeros(3, 4)), (real(3, 4, seed=1), torch.zeros(3, 4))),
    "objects selected": each(sets.select_objects, (LABELS[:, 1],), (1, 3, 9)),
    "pair costs": each(sets.pair_cost, (real(1, 5, 30),), (real(1, 3, 30) > 0,), (real(1, 30) > -1,), (1.0, 3.0), (0.0, 2.0)),
}  # fmt: skip
