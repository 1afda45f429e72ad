"""Outputs that say exactly what is annotated, in either layout of the channels."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fp4deploy.data import IGNORE
from fp4deploy.data.sample import Sample
from fp4deploy.models import InstanceHead
from fp4deploy.train.losses.centres import centre_targets
from fp4deploy.train.losses.sets import select_objects

SURE = 20.0  # a logit


def labels_of(sample: Sample) -> Tensor:
    """int64 [1, 2, H, W] at the sample's own size."""
    assert sample.instances is not None
    return torch.from_numpy(np.stack([sample.mask, sample.instances]).astype(np.int64))[None]


def perfect_outputs(labels: Tensor, head: InstanceHead, sigma: float = 0.15) -> Tensor:
    """Outputs [N, channels, H, W] of labels int64 [N, 2, H, W]."""
    masks, ids = labels[:, 0], labels[:, 1]
    classes = torch.nn.functional.one_hot(masks.where(masks != IGNORE, 0), max(head.classes, int(masks.max()) + 1))
    semantic = SURE * classes[..., : head.classes].permute(0, 3, 1, 2).float()
    if head.method == "centres":
        targets = centre_targets(ids, sigma)
        return torch.cat([semantic, targets.heatmap[:, None], targets.offsets], dim=1)
    objects, _, _ = select_objects(ids, head.masks)
    logits = torch.full((len(ids), head.masks, *ids.shape[1:]), -SURE)
    logits[:, : objects.shape[1]] = torch.where(objects, SURE, -SURE)
    return torch.cat([semantic, logits], dim=1)
