"""The boxes of one image, from a model's output (`models.boxes`) to pixels of the original image.

1. Scores of every class at every place; those above the threshold are candidates, the highest `CANDIDATES` of them.
2. Their boxes in pixels of the input, from prior and distances.
3. Non-maximum suppression: in the order of the scores, a box is kept unless one of its class that is kept overlaps it
   by an IoU above `nms`. It ends with `max_detections` boxes.
4. From the input to the image (`data.augmentation.letterbox`), cut at its border.

NMS comes before the border is cut, as in the ONNX file that holds the decoding, which does not know the image's size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.data.augmentation.letterbox import letterbox
from fp4deploy.models.boxes import DetectionHead

FoundBoxes = tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]  # boxes [K, 4], classes [K], scores [K]
CANDIDATES = 10_000  # of an image; a limit for outputs without sense
CHUNK = 256  # boxes that are compared with the kept ones at a time


@dataclass(frozen=True)
class Detections:
    """Objects of one image, the highest score first.

    boxes: float32 [K, 4], left, top, right, bottom in pixels of the image. classes: int64 [K], from 1; 0 is background.
    scores: float32 [K], 0 to 1.
    """

    boxes: NDArray[np.float32]
    classes: NDArray[np.int64]
    scores: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.scores)

    def above(self, score: float) -> Detections:
        """Those with at least this score."""
        kept = int((self.scores >= score).sum())
        return Detections(self.boxes[:kept], self.classes[:kept], self.scores[:kept])


@torch.inference_mode()
def decode_boxes(outputs: Tensor, head: DetectionHead, target: tuple[int, int], size: tuple[int, int]) -> Detections:
    """Read the boxes of one image.

    Args:
        outputs: [channels, places] on any device, any float dtype; places with NaN or Inf have no box.
        target: height and width of the network's input in pixels.
        size: height and width of the original image in pixels.
    """
    boxes, classes, scores = candidates(outputs, head, target)
    kept = suppress(boxes, classes, head.nms, head.max_detections)
    return in_image((boxes[kept], classes[kept] + 1, scores[kept]), head, target, size)


def in_image(found: FoundBoxes, head: DetectionHead, target: tuple[int, int], size: tuple[int, int]) -> Detections:
    """Boxes after suppression, in pixels of the input, as those of the image; the best `max_detections`."""
    boxes, classes, scores = found
    order = np.argsort(-scores, kind="stable")[: head.max_detections]
    height, width = size
    edges = letterbox(size, target).to_image(boxes[order]).clip(0, [width, height, width, height]).astype(np.float32)
    whole = (edges[:, 2:] > edges[:, :2]).all(1)
    return Detections(edges[whole], classes[order][whole], scores[order][whole])


def candidates(outputs: Tensor, head: DetectionHead, target: tuple[int, int]) -> FoundBoxes:
    """Boxes [K, 4] in pixels of the input, classes [K] from 0, scores [K] above the threshold, descending."""
    outputs = outputs.float()
    outputs = outputs.where(outputs.isfinite().all(0), -torch.inf)
    scores = head.scores(outputs)
    scores, order = scores.flatten().topk(min(CANDIDATES, scores.numel()))
    kept = scores > head.threshold
    scores, order = scores[kept], order[kept]
    count = outputs.shape[1]
    place = order % count
    x, y, width, height = head.priors(*target, device=outputs.device)[:, place]
    sizes = torch.stack((width, height, width, height))
    left, top, right, bottom = (head.distances(outputs)[:, place] * sizes).unbind()
    boxes = torch.stack((x - left, y - top, x + right, y + bottom), 1)
    return boxes.cpu().numpy(), (order // count).cpu().numpy(), scores.cpu().numpy()


def suppress(boxes: NDArray[np.float32], classes: NDArray[np.int64], nms: float, most: int) -> NDArray[np.int64]:
    """Places of the boxes [K, 4] that are kept, which are in the order of their scores; at most `most`.

    Boxes are taken `CHUNK` at a time: those that a kept box overlaps leave all at once, and the rest is compared among
    itself. The result is that of taking one box after the other.
    """
    kept = np.empty(0, np.int64)
    for start in range(0, len(boxes), CHUNK):
        part = np.arange(start, min(start + CHUNK, len(boxes)))
        part = part[~_overlapping(boxes, classes, kept, part, nms).any(0)]
        hits = np.triu(_overlapping(boxes, classes, part, part, nms), 1)
        alive = np.ones(len(part), bool)
        for place in range(len(part)):
            if alive[place]:
                alive &= ~hits[place]
        kept = np.concatenate((kept, part[alive]))
        if len(kept) >= most:
            break
    return kept[:most]


def _overlapping(
    boxes: NDArray[np.float32],
    classes: NDArray[np.int64],
    first: NDArray[np.int64],
    second: NDArray[np.int64],
    nms: float,
) -> NDArray[np.bool_]:
    """Which boxes of one class have an IoU above `nms`, bool [first, second]."""
    found: NDArray[np.bool_] = iou(boxes[first], boxes[second]) > nms
    return found & (classes[first][:, None] == classes[second])


def iou(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.floating]:
    """IoU [K, M] of boxes [K, 4] and [M, 4] (left, top, right, bottom); 0 where neither has an area."""
    corner = np.maximum(first[:, None, :2], second[None, :, :2])
    sides = np.clip(np.minimum(first[:, None, 2:], second[None, :, 2:]) - corner, 0, None)
    shared = sides[..., 0] * sides[..., 1]
    areas = [(each[:, 2] - each[:, 0]) * (each[:, 3] - each[:, 1]) for each in (first, second)]
    union = areas[0][:, None] + areas[1][None] - shared
    found: NDArray[np.floating] = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    return found
