"""Decode instances from a model's output, at the size of the original image.

**Centres.** The heatmap has one peak an object. A peak is a pixel that is the largest of its nms x nms window (max
pooling finds all of them at once); of those above the threshold the highest `max_detections` stay. Then every pixel
that is more likely a thing than not votes for its position plus its offset, and is assigned to the nearest centre:

    object of p = argmin_k | p + offset(p) - centre_k |

A vote that ends further from its centre than the radius of the object (of a circle of its area) comes from an object
whose centre was missed; without that rule it would be added to the neighbour's mask. Ties between adjacent peaks, which
FP16 produces, are broken by position; otherwise one object would be split in two.

**Set.** Every channel is a mask; a pixel belongs to the most likely one above 1/2.

Logits and offsets are enlarged bilinearly to the original size *before* any decision, so that outlines are smooth:
enlarged decisions would be blocky, which costs AP at the stricter overlaps. Objects never share a pixel.

    score = centre score (set: mean mask probability) x mean probability of the class, over the object's pixels

Source of the centre method: Cheng et al., "Panoptic-DeepLab", 2020; the limit on a vote's distance is added here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.data.sample import ClassIds, class_type
from fp4deploy.models.heads import OFFSET_UNIT, InstanceHead

PAIRS = 2**24  # votes times centres whose distances are held at once
TIE = 1e-12  # below any difference of FP32 scores that means something, times a million pixels still below FP16's


@dataclass(frozen=True)
class Instances:
    """Objects of one image.

    ids: int32 [H, W], 0 where there is none, else a number from 1 to len(scores).
    classes: int64 [K], class of each; scores: float32 [K], 0 to 1, descending.
    semantic: [H, W] of `class_type`, the most likely class of every pixel; zeros where the model has no semantic
        channels.
    """

    ids: NDArray[np.int32]
    classes: NDArray[np.int64]
    scores: NDArray[np.float32]
    semantic: ClassIds

    def __len__(self) -> int:
        return len(self.scores)


@torch.inference_mode()
def decode(outputs: Tensor, head: InstanceHead, size: tuple[int, int]) -> Instances:
    """Read the instances of one image.

    Args:
        outputs: [channels, h, w] on any device, any float dtype.
        size: height and width of the original image in pixels.
    """
    outputs = outputs.float().nan_to_num(0.0, 0.0, 0.0)
    enlarged = F.interpolate(outputs[None], size, mode="bilinear", align_corners=False)[0]
    probability = head.semantic(enlarged).softmax(0) if head.classes else None
    if head.method == "centres":
        ids, scores = _group(outputs, enlarged, _thing(probability, head), head)
    else:
        ids, scores = _masks(enlarged, _thing(probability, head), head)
    return _finish(ids, scores, probability, head)


def find_centres(heatmap: Tensor, nms: int, threshold: float, most: int) -> tuple[Tensor, Tensor]:
    """Peaks of a heatmap [h, w], the highest first.

    Returns:
        places int64 [K, 2] (row, column), scores float32 [K] in (threshold, 1].
    """
    height, width = heatmap.shape
    order = torch.arange(heatmap.numel(), device=heatmap.device, dtype=torch.float64).view(height, width)
    ranked = heatmap.double() - TIE * order
    highest = F.max_pool2d(ranked[None, None], nms, stride=1, padding=nms // 2)[0, 0]
    peaks = ((ranked == highest) & (heatmap > threshold)).flatten().nonzero()[:, 0]
    scores, chosen = heatmap.flatten()[peaks].sort(descending=True, stable=True)
    places = peaks[chosen[:most]]
    return torch.stack((places // width, places % width), dim=1), scores[:most].clamp(max=1.0)


def _thing(probability: Tensor | None, head: InstanceHead) -> Tensor | None:
    """Where a thing of any class is more likely than background or stuff; bool [H, W]."""
    if probability is None:
        return None
    return probability[[0, *head.stuff]].sum(0) < 0.5


def _group(outputs: Tensor, enlarged: Tensor, thing: Tensor | None, head: InstanceHead) -> tuple[Tensor, Tensor]:
    assert thing is not None
    places, scores = find_centres(head.heatmap(outputs), head.nms, head.threshold, head.max_detections)
    ids = torch.zeros(enlarged.shape[1:], dtype=torch.int64, device=enlarged.device)
    pixels = thing.nonzero()
    if not len(places) or not len(pixels):
        return ids, scores
    stretch = torch.tensor(
        [enlarged.shape[1] / outputs.shape[1], enlarged.shape[2] / outputs.shape[2]], device=outputs.device
    )
    centres = (places + 0.5) * stretch - 0.5
    offsets = head.offsets(enlarged)[:, thing].T * OFFSET_UNIT * stretch
    nearest, distance = _nearest(pixels + offsets, centres)
    area = torch.bincount(nearest, minlength=len(centres)).float()
    near = distance <= (area / torch.pi).sqrt().clamp(min=1.0)[nearest]
    ids[thing] = torch.where(near, nearest + 1, 0)
    return ids, scores


def _nearest(votes: Tensor, centres: Tensor) -> tuple[Tensor, Tensor]:
    """Number and distance of the centre nearest to each vote, in slices that fit into memory."""
    parts = [torch.cdist(part, centres).min(1) for part in votes.split(max(1, PAIRS // len(centres)))]
    return torch.cat([part.indices for part in parts]), torch.cat([part.values for part in parts])


def _masks(enlarged: Tensor, thing: Tensor | None, head: InstanceHead) -> tuple[Tensor, Tensor]:
    probability, channel = head.mask_logits(enlarged).sigmoid().max(0)
    inside = probability > 0.5 if thing is None else (probability > 0.5) & thing
    ids = torch.where(inside, channel + 1, 0)
    total = torch.zeros(head.masks + 1, dtype=torch.float64, device=ids.device)
    total.index_add_(0, ids.flatten(), probability.double().flatten())
    mean = total / torch.bincount(ids.flatten(), minlength=head.masks + 1).clamp(min=1)
    return ids, mean[1:].float()


def _finish(ids: Tensor, scores: Tensor, probability: Tensor | None, head: InstanceHead) -> Instances:
    """Classes, final scores, and numbers in the order of the scores; objects without a pixel are dropped."""
    area = torch.bincount(ids.flatten(), minlength=len(scores) + 1)[1:]
    if probability is None:
        classes = torch.ones_like(area)
        semantic = torch.zeros_like(ids)
    else:
        semantic = probability.argmax(0)
        mean = _class_means(ids, probability, area)
        mean[:, [0, *head.stuff]] = 0.0
        share, classes = mean.max(1)
        scores = scores * share
    kept = (area > 0).nonzero()[:, 0]
    kept = kept[scores[kept].argsort(descending=True, stable=True)][: head.max_detections]
    renumbered = torch.zeros(len(scores) + 1, dtype=torch.int64, device=ids.device)
    renumbered[kept + 1] = torch.arange(1, len(kept) + 1, device=ids.device)
    return Instances(
        ids=renumbered[ids].to(torch.int32).cpu().numpy(),
        classes=classes[kept].cpu().numpy(),
        scores=scores[kept].float().cpu().numpy(),
        semantic=semantic.cpu().numpy().astype(class_type(head.classes)),
    )


def _class_means(ids: Tensor, probability: Tensor, area: Tensor) -> Tensor:
    """Mean probability [K, classes] of each class over the pixels of each object."""
    inside = ids > 0
    total = torch.zeros((len(area), len(probability)), dtype=torch.float64, device=ids.device)
    total.index_add_(0, ids[inside] - 1, probability[:, inside].T.double())
    return (total / area.clamp(min=1)[:, None]).float()
