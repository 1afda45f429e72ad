"""Set loss: K output channels, M objects, and the pairing of the two that costs least.

Which channel shows which object is not prescribed. For every image the cost of every pair is computed, all at once,

    cost[k, m] = bce * BCE(x_k, t_m) + dice * Dice(p_k, t_m)              p = sigmoid(x), over labelled pixels
    BCE  = mean softplus(x) - x t            = (sum_i softplus(x_ki) - sum_i x_ki t_mi) / pixels
    Dice = 1 - (2 sum_i p_ki t_mi + 1) / (sum_i p_ki + sum_i t_mi + 1)

so that each needs one matrix product of [K, pixels] with [pixels, M], batched over the images. The Hungarian method
finds the pairing with the smallest sum. It runs on the CPU (K x M numbers an image), for which the CPU waits for the
device in every step. The loss of the matched pairs is then read out of the same matrix, gradients included. A channel
without an object is pushed to empty by BCE against 0. The means over pairs and over empty channels are those of the
whole batch, however it is spread over processes.

Where there is more than one class, semantic channels are trained together with the masks, with cross-entropy and Dice,
and a mask's class is what they say on average inside it.

With more than K objects, the K largest are taken; the others are background to them. They are counted, and the trainer
warns once. A convolutional network sees the same thing wherever it stands, and tells channels apart only by context
and by the image's border; for few objects that is enough, for hundreds take the centre head.

Sources: Carion et al., "DETR", 2020, for the set loss; Cheng et al., "MaskFormer", 2021, for masks with BCE and Dice.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.data.sample import IGNORE
from fp4deploy.models.heads import InstanceHead
from fp4deploy.tracing import not_compiled
from fp4deploy.train.distributed import summed
from fp4deploy.train.losses.loss import Loss
from fp4deploy.train.losses.segmentation import SMOOTH, SegmentationLoss

Pairs = list[tuple[NDArray[np.int64], NDArray[np.int64]]]  # channels and objects of each image


class SetLoss(Loss):
    """`SetLoss(...)(outputs [N, classes + K, H, W], labels int64 [N, 2, H, W])` -> float32 scalar."""

    def __init__(self, head: InstanceHead, semantic: SegmentationLoss, bce: float, dice: float, empty: float) -> None:
        """`bce`, `dice`, `empty`: weights; `empty` is that of the channels without an object."""
        self.head, self.semantic = head, semantic
        self.bce, self.dice, self.empty = bce, dice, empty
        self.crowded_images = self.left_out = 0
        self._warned = False

    @not_compiled
    def of(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Labels are class ids or 255, and numbers of objects."""
        masks, ids = labels[:, 0], labels[:, 1]
        with torch.autocast(outputs.device.type, enabled=False):
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            loss = self._masks(self.head.mask_logits(outputs), masks, ids)
            return loss + self.semantic(self.head.semantic(outputs), masks) if self.head.classes else loss

    def _masks(self, logits: Tensor, masks: Tensor, ids: Tensor) -> Tensor:
        truth, counts, left = select_objects(ids, self.head.masks)
        labelled = (masks != IGNORE).flatten(1)
        flat = logits.flatten(2)
        cost = pair_cost(flat, truth.flatten(2), labelled, self.bce, self.dice)
        self._count(left)
        pairs = match(cost, counts)
        image, channel, target = _gathered(pairs, logits.device)
        unmatched = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
        unmatched[image, channel] = False
        silence = (F.softplus(flat) * labelled[:, None]).sum(2) / labelled.sum(1).clamp(min=1)[:, None]
        matched, empty = cost[image, channel, target].sum(), (silence * unmatched).sum()
        number = matched.new_tensor(len(image)), unmatched.sum().to(matched.dtype)
        matched, empty, found, silent = summed(torch.stack([matched, empty, *number])).unbind()
        return matched / found.clamp(min=1) + self.empty * empty / silent.clamp(min=1)

    def _count(self, left: NDArray[np.int64]) -> None:
        self.crowded_images += int((left > 0).sum())
        self.left_out += int(left.sum())

    def warnings(self) -> list[str]:
        """Once, that there were more objects than channels."""
        if self._warned or not self.left_out:
            return []
        self._warned = True
        return [
            f"{self.crowded_images} images so far had more objects than the {self.head.masks} mask channels; the "
            f"largest were kept and {self.left_out} left out. Raise instance.channels, or take --set "
            "instance.method=centres, which has no limit."
        ]


def select_objects(ids: Tensor, most: int) -> tuple[Tensor, NDArray[np.int64], NDArray[np.int64]]:
    """The largest `most` objects of each image as masks of their own.

    Args:
        ids: int64 [N, H, W], 0 where there is no object.

    Returns:
        bool [N, M, H, W] with M the largest number of objects kept (the rest of an image's M are empty); how many each
        image has kept, and left out.
    """
    slots = int(ids.max()) + 1
    area = torch.zeros((len(ids), slots), dtype=torch.int64, device=ids.device)
    area.scatter_add_(1, ids.flatten(1), torch.ones_like(ids).flatten(1))
    area = area[:, 1:]
    present = (area > 0).sum(1).cpu().numpy()
    kept = np.minimum(present, most)
    largest = area.argsort(dim=1, descending=True, stable=True)[:, : max(int(kept.max(initial=0)), 0)] + 1
    truth = ids[:, None] == largest[:, :, None, None]
    return truth, kept, present - kept


def pair_cost(logits: Tensor, truth: Tensor, labelled: Tensor, bce: float, dice: float) -> Tensor:
    """Cost [N, K, M] of every pair.

    Args:
        logits: float [N, K, pixels]; truth: bool [N, M, pixels]; labelled: bool [N, pixels].
    """
    counted = labelled[:, None]
    goal = (truth & counted).to(logits.dtype).transpose(1, 2)
    pixels = labelled.sum(1).clamp(min=1).view(-1, 1, 1)
    entropy = ((F.softplus(logits) * counted).sum(2, keepdim=True) - logits @ goal) / pixels
    probability = logits.sigmoid() * counted
    size = probability.sum(2, keepdim=True) + goal.sum(1)[:, None]
    overlap = 1 - (2 * (probability @ goal) + SMOOTH) / (size + SMOOTH)
    return bce * entropy + dice * overlap


def match(cost: Tensor, counts: NDArray[np.int64]) -> Pairs:
    """The cheapest pairing of each image of cost [N, K, M], of which the first counts[n] objects exist."""
    from scipy.optimize import linear_sum_assignment

    matrices = cost.detach().float().nan_to_num(1e6, 1e6, -1e6).cpu().numpy()
    return [linear_sum_assignment(matrix[:, :count]) for matrix, count in zip(matrices, counts, strict=True)]


def _gathered(pairs: Pairs, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Image, channel and object of every pair of the batch."""
    image = np.concatenate([np.full(len(channels), number) for number, (channels, _) in enumerate(pairs)])
    channel = np.concatenate([channels for channels, _ in pairs])
    target = np.concatenate([targets for _, targets in pairs])
    stacked = torch.from_numpy(np.stack((image, channel, target)).astype(np.int64)).to(device)
    return stacked[0], stacked[1], stacked[2]
