"""Loss of a detector: which place should find which object, and how far its output is from that.

Assignment without anchors. An object belongs to the stride s that suits its larger side m: the smallest s with
m <= 16 s, else the largest. Of the places of that stride it takes those inside its box and within 1.5 s of its centre
in both directions, and always the place next to its centre, so that a box smaller than a stride is not lost. A place
that several objects take belongs to the smallest of them.

Assignment to anchors. An anchor takes the object that it overlaps most, from an IoU of 0.5; below, only where no other
anchor overlaps that object more. From 0.4 to 0.5 it counts neither way.

Places inside a crowd that belong to no object count neither way.

    class       focal loss  -a_t (1 - p_t)^g log p_t  over places and classes      / number of places with an object
    box         1 - GIoU, weighted by the centre-ness of the place, or 1           / sum of the weights
    centre-ness BCE against sqrt(min(l, r) / max(l, r) * min(t, b) / max(t, b))    / number of places with an object

    GIoU = IoU - (hull - union) / hull            hull: the smallest box around both

p_t is the probability of what is true, a_t is `alpha` for an object and 1 - alpha for none. Both boxes of a pair are
distances from one prior, so overlap and hull are products of sums of the smaller and of the larger distances: no
coordinates are needed, and the prior's size cancels out. A layout without centre-ness (`models.boxes`) has no such
loss. The sums run over all processes, as those of the other losses do.

Sources: Lin et al., "Focal Loss for Dense Object Detection", 2017; Rezatofighi et al., "Generalized Intersection over
Union", 2019; Tian et al., "FCOS", 2019, of which the assignment differs: there each place chooses by its own distances.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fp4deploy.data.augmentation.letterbox import PAD
from fp4deploy.data.sample import IGNORE
from fp4deploy.models.boxes import DetectionHead, map_sizes
from fp4deploy.tracing import not_compiled
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.loss import Loss

SIDES = 16.0  # strides: the largest side of an object of a stride
RADIUS = 1.5  # strides
MATCHED, UNMATCHED = 0.5, 0.4  # IoU of an anchor with an object
MIN_DISTANCE = 0.02  # strides, of a place that lies outside its small box
PAIRS = 2**25  # objects times places that are compared at once
BACKGROUND = -1


@dataclass(frozen=True)
class BoxTargets:
    """Of each place: class int64 [N, P] from 0, `BACKGROUND` for none; distances float32 [N, 4, P] (`models.boxes`);
    ignored: it counts neither way.
    """

    classes: Tensor
    distances: Tensor
    ignored: Tensor


class BoxLoss(Loss):
    """`BoxLoss(...)(outputs [N, channels, places], boxes float32 [N, M, 5])` -> float32 scalar.

    Labels are rows of class, left, top, right, bottom in pixels of the input; class 255: crowd, -1: no box.
    """

    def __init__(
        self,
        head: DetectionHead,
        size: tuple[int, int],
        weights: tuple[float, float, float] = (1.0, 1.0, 1.0),
        alpha: float = 0.25,
        gamma: float = 2.0,
    ) -> None:
        """`size`: height and width of the input; `weights`: of class, box and centre-ness."""
        self.head, self.size, self.weights = head, size, weights
        self.alpha, self.gamma = alpha, gamma

    @not_compiled
    def targets(self, labels: Tensor) -> tuple[Tensor, ...]:
        """What `of` compares the outputs with: the fields of `BoxTargets`."""
        found = assign(labels, self.head, self.size)
        return found.classes, found.distances, found.ignored

    @not_compiled
    def of(self, outputs: Tensor, classes: Tensor, distances: Tensor, ignored: Tensor) -> Tensor:
        """The loss from what `targets` made of the labels."""
        head, positive = self.head, classes >= 0
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            truth = torch.stack([classes == number for number in range(head.classes)], 1).to(outputs.dtype)
            focal = focal_loss(head.class_logits(outputs), truth, self.alpha, self.gamma)
            distances = distances.to(outputs.dtype)
            overlap = giou(head.distances(outputs), distances)
            centred = centre = torch.ones_like(overlap)
            if head.centred:
                centred = centre_ness(distances)
                centre = F.binary_cross_entropy_with_logits(head.centredness(outputs), centred, reduction="none")
            sums = [
                (focal * ~ignored[:, None]).sum(),
                ((1 - overlap) * centred * positive).sum(),
                (centre * positive).sum() * head.centred,
                positive.sum().to(outputs.dtype),
                (centred * positive).sum(),
            ]
            of_class, of_box, of_centre, count, mass = summed(torch.stack(sums)).unbind()
            parts = of_class / count.clamp(min=1), of_box / mass.clamp(min=1), of_centre / count.clamp(min=1)
            weighted = [weight * part for weight, part in zip(self.weights, parts, strict=True)]
            return torch.stack(weighted).sum()


def focal_loss(logits: Tensor, truth: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    """Focal loss of every element; `truth` 0 or 1, of the shape of `logits`."""
    entropy = F.binary_cross_entropy_with_logits(logits, truth, reduction="none")
    right = torch.exp(-entropy)
    balance = alpha * truth + (1 - alpha) * (1 - truth)
    return balance * (1 - right) ** gamma * entropy


def giou(first: Tensor, second: Tensor) -> Tensor:
    """GIoU [N, P] of boxes of one prior, each as distances [N, 4, P]; the second has an area."""

    def sides(distances: Tensor) -> Tensor:
        across, down = distances[:, 0] + distances[:, 2], distances[:, 1] + distances[:, 3]
        return across.clamp(min=0) * down.clamp(min=0)

    shared, hull = sides(torch.minimum(first, second)), sides(torch.maximum(first, second))
    union = sides(first) + sides(second) - shared
    return shared / union - (hull - union) / hull


def centre_ness(distances: Tensor) -> Tensor:
    """[N, P] of distances [N, 4, P]: 1 in the middle of the box, 0 at its border."""
    left, top, right, bottom = distances.unbind(1)
    across = torch.minimum(left, right) / torch.maximum(left, right)
    down = torch.minimum(top, bottom) / torch.maximum(top, bottom)
    return (across * down).sqrt()


def assign(labels: Tensor, head: DetectionHead, size: tuple[int, int]) -> BoxTargets:
    """What every place should give; `labels` as of `BoxLoss`."""
    priors = head.priors(*size, device=labels.device)
    each = max(1, PAIRS // (labels.shape[1] * priors.shape[1]))
    parts = [_assign(part, head, size, priors) for part in labels.float().split(each)]
    return BoxTargets(
        torch.cat([part.classes for part in parts]),
        torch.cat([part.distances for part in parts]),
        torch.cat([part.ignored for part in parts]),
    )


def _assign(labels: Tensor, head: DetectionHead, size: tuple[int, int], priors: Tensor) -> BoxTargets:
    x, y, across, down = priors
    kind, box = labels[..., 0], labels[..., 1:]
    crowd = kind == IGNORE
    left, top, right, bottom = (edge.unsqueeze(-1) for edge in box.unbind(-1))  # [N, M, 1]
    valid = ((kind > PAD) & ~crowd)[..., None] & (right > left) & (bottom > top)
    inside = (x > left) & (x < right) & (y > top) & (y < bottom)  # [N, M, P]
    if head.anchors > 1:
        owner, found, ignored = _by_overlap(box, valid, priors)
    else:
        owner, found = _by_size(box, valid, inside, head, size, priors)
        ignored = torch.zeros_like(found)
    classes = kind.long().gather(1, owner) - 1
    left, top, right, bottom = box.gather(1, owner[..., None].expand(-1, -1, 4)).unbind(-1)  # [N, P]
    distances = torch.stack(((x - left) / across, (y - top) / down, (right - x) / across, (bottom - y) / down), 1)
    if head.anchors == 1:
        distances = distances.clamp(min=MIN_DISTANCE)
    ignored |= (inside & crowd[..., None]).any(1) & ~found
    return BoxTargets(classes.where(found, BACKGROUND), distances.where(found[:, None], 1.0), ignored)


def _by_size(
    box: Tensor, valid: Tensor, inside: Tensor, head: DetectionHead, size: tuple[int, int], priors: Tensor
) -> tuple[Tensor, Tensor]:
    """Of each place [N, P] the object, and whether there is one: those near the centre, on the stride of its size."""
    x, y, stride, _ = priors
    left, top, right, bottom = (edge.unsqueeze(-1) for edge in box.unbind(-1))
    width, height = right - left, bottom - top
    strides = stride.new_tensor(head.strides)
    level = torch.searchsorted(strides * SIDES, torch.maximum(width, height)).clamp(max=len(strides) - 1)  # [N, M, 1]
    across, down = (left + right) / 2, (top + bottom) / 2
    near = ((x - across).abs() <= RADIUS * stride) & ((y - down).abs() <= RADIUS * stride)
    taken = inside & near & (strides[level] == stride)
    taken = taken.scatter(2, _own_place(level, across, down, head, size), True) & valid
    area = (width * height).expand_as(taken).where(taken, torch.inf)
    smallest, owner = area.min(1)  # [N, P]
    return owner, smallest.isfinite()


def _own_place(level: Tensor, across: Tensor, down: Tensor, head: DetectionHead, size: tuple[int, int]) -> Tensor:
    """The place [N, M, 1] next to the centre of each box, on its own stride."""
    sizes = map_sizes(head.strides, *size)
    rows, columns = (level.new_tensor([pair[axis] for pair in sizes])[level] for axis in (0, 1))
    counts = [rows * columns for rows, columns in sizes]
    first = level.new_tensor([sum(counts[:at]) for at in range(len(counts))])[level]
    stride = across.new_tensor(head.strides)[level]
    row, column = (
        (centre / stride + (0.5 - head.offset)).floor().long().clamp(min=0).minimum(count - 1)
        for centre, count in ((down, rows), (across, columns))
    )
    return first + row * columns + column


def _by_overlap(box: Tensor, valid: Tensor, priors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each anchor [N, P] the object, whether it takes it, and whether its overlap says neither yes nor no."""
    x, y, width, height = priors
    left, top, right, bottom = (edge.unsqueeze(-1) for edge in box.unbind(-1))
    across = torch.minimum(right, x + width / 2) - torch.maximum(left, x - width / 2)
    down = torch.minimum(bottom, y + height / 2) - torch.maximum(top, y - height / 2)
    shared = across.clamp(min=0) * down.clamp(min=0)
    iou = (shared / ((right - left) * (bottom - top) + width * height - shared)).where(valid, 0.0)  # [N, M, P]
    most, owner = iou.max(1)
    nearest = ((iou == iou.amax(2, keepdim=True)) & (iou > 0)).any(1)
    found = (most >= MATCHED) | nearest
    return owner, found, (most >= UNMATCHED) & ~found
