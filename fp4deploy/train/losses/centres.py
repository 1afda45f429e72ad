"""Loss of the centre-and-offset head.

    loss = semantic (cross-entropy + Dice) + heatmap * H + offset * O

    target heatmap   t(p) = max_k exp(-|p - c_k|² / 2 σ_k²)      c_k: centre of mass of object k, on a whole pixel
                     σ_k = sigma * sqrt(area_k), between 1 and 8 pixels of the input
    H = sum (h - t)² / max(sum t, labelled / 100)                over labelled pixels
    O = mean |o - (c_k - p) / OFFSET_UNIT|                       over the pixels of things, both directions

σ grows with the object, because a peak that is as wide as the object overlaps with that of the next object: with 0.15
the peaks of two round objects that touch are 7 σ apart. H is divided by the mass of the peaks and not by the number of
pixels; peaks are a hundredth of an image or less, and their mean error would be negligible next to the cross-entropy.
The bound keeps a batch without objects from weighing more than a hundred times its mean error.

Everything is computed on the device from the map of numbers, without a loop over objects: sums by scatter-add give the
centres, and every object stamps a small patch with scatter-max, so that the cost grows with objects x patch and not
with objects x image. The number of objects is read back once a step. With several processes the sums run over all of
them, as those of the semantic loss do.

Two objects with one centre (a ring around a disc) cannot be told apart by this head; the set loss can.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp4deploy.data.sample import IGNORE
from fp4deploy.models.heads import OFFSET_UNIT, InstanceHead
from fp4deploy.tracing import not_compiled
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.loss import Loss
from fp4deploy.train.losses.segmentation import SegmentationLoss

SIGMA_MIN, SIGMA_MAX = 1.0, 8.0  # pixels of the input
REACH = 3.0  # sigmas after which a peak counts as 0: exp(-4.5) = 0.011
MIN_MASS = 0.01  # of the labelled pixels


@dataclass(frozen=True)
class CentreTargets:
    """heatmap float32 [N, H, W]; offsets float32 [N, 2, H, W] (down, right) in `OFFSET_UNIT`; things bool [N, H, W]."""

    heatmap: Tensor
    offsets: Tensor
    things: Tensor


class CentreLoss(Loss):
    """`CentreLoss(...)(outputs [N, classes + 3, H, W], labels int64 [N, 2, H, W])` -> float32 scalar.

    Labels are class ids or 255, and numbers of objects.
    """

    def __init__(
        self, head: InstanceHead, semantic: SegmentationLoss, heatmap: float, offset: float, sigma: float
    ) -> None:
        self.head, self.semantic = head, semantic
        self.heatmap, self.offset, self.sigma = heatmap, offset, sigma

    @not_compiled
    def targets(self, labels: Tensor) -> tuple[Tensor, ...]:
        """What `of` compares the outputs with: class ids, and the fields of `CentreTargets`."""
        found = centre_targets(labels[:, 1], self.sigma)
        return labels[:, 0], found.heatmap, found.offsets, found.things

    @not_compiled
    def of(self, outputs: Tensor, masks: Tensor, heatmap: Tensor, offsets: Tensor, things: Tensor) -> Tensor:
        """The loss from what `targets` made of the labels."""
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            labelled = masks != IGNORE
            error = ((self.head.heatmap(outputs) - heatmap).square() * labelled).sum()
            apart = ((self.head.offsets(outputs) - offsets).abs().sum(1) / 2 * things).sum()
            sums = error, apart, (heatmap * labelled).sum(), labelled.sum(), things.sum()
            error, apart, peaks, pixels, count = summed(torch.stack([part.to(error.dtype) for part in sums])).unbind()
            heat = error / torch.maximum(peaks, MIN_MASS * pixels).clamp(min=1.0)
            offset = apart / count.clamp(min=1)
            semantic = self.semantic(self.head.semantic(outputs), masks)
            return semantic + self.heatmap * heat + self.offset * offset


@torch.no_grad()
def centre_targets(ids: Tensor, sigma: float) -> CentreTargets:
    """Targets of int64 [N, H, W] numbers of objects, which need not be consecutive."""
    count, height, width = ids.shape
    slots = int(ids.max()) + 1  # the one read; number 0 has a slot, too
    image = torch.arange(count, device=ids.device).view(-1, 1, 1)
    slot = (image * slots + ids).flatten()
    rows = torch.arange(height, device=ids.device).view(1, -1, 1).expand_as(ids)
    columns = torch.arange(width, device=ids.device).view(1, 1, -1).expand_as(ids)
    area = _sums(torch.ones_like(slot), slot, count * slots)
    centre = torch.stack([_sums(axis.flatten(), slot, count * slots) for axis in (rows, columns)])
    centre = (centre / area.clamp(min=1)).round()  # float32 [2, slots]
    things = ids > 0
    pointed = centre[:, slot].view(2, count, height, width)
    offsets = (pointed - torch.stack((rows, columns))) / OFFSET_UNIT * things
    present = (area > 0) & (torch.arange(count * slots, device=ids.device) % slots > 0)
    heatmap = _stamp(centre[:, present], area[present], present.nonzero()[:, 0] // slots, ids.shape, sigma)
    return CentreTargets(heatmap, offsets.transpose(0, 1), things)


def _sums(values: Tensor, slot: Tensor, slots: int) -> Tensor:
    return torch.zeros(slots, dtype=torch.int64, device=slot.device).scatter_add_(0, slot, values)


def _stamp(centre: Tensor, area: Tensor, image: Tensor, shape: torch.Size, sigma: float) -> Tensor:
    """Heatmap [N, H, W] of peaks at centre [2, K] of images int64 [K]."""
    count, height, width = shape
    heatmap = torch.zeros(count * height * width, device=centre.device)
    if not len(area):
        return heatmap.view(shape)
    spread = (sigma * area.float().sqrt()).clamp(SIGMA_MIN, SIGMA_MAX).view(-1, 1, 1)
    reach = math.ceil(REACH * float(spread.max()))
    steps = torch.arange(-reach, reach + 1, device=centre.device)
    down, right = steps.view(1, -1, 1), steps.view(1, 1, -1)
    value = torch.exp(-(down**2 + right**2) / (2 * spread**2))
    row, column = centre[0].long().view(-1, 1, 1) + down, centre[1].long().view(-1, 1, 1) + right
    inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
    inside = inside & (down**2 + right**2 <= (REACH * spread) ** 2)
    place = (image.view(-1, 1, 1) * height + row) * width + column
    heatmap.scatter_reduce_(0, place[inside], value[inside], "amax")
    return heatmap.view(shape)
