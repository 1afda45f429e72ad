"""Semantic segmentation of volumes: a network over a whole volume, and its scores at the volume's own spacing.

A volume comes at the spacing of the model. The network is applied in overlapping windows (`data.tiles`), its outputs
are resampled to the voxels of the file, and the most likely class of each is compared with the mask that was drawn, so
that a coarser spacing does not make a score better.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fp4deploy.data.sample import IGNORE
from fp4deploy.data.tiles import sliding_window
from fp4deploy.data.volumes.dataset import VolumeDataset
from fp4deploy.data.volumes.resample import most_likely
from fp4deploy.metrics import SegmentationScore, VolumeScores, hausdorff95
from fp4deploy.models.card import ModelCard
from fp4deploy.tasks.protocol import Gather, readable

Network = Callable[[NDArray[np.float32]], NDArray[np.float32]]


def applied(card: ModelCard, network: Network, inputs: NDArray[np.float32]) -> NDArray[np.float32]:
    """Outputs of a batch: of images [N, 3, H, W] by one call; of a volume [1, C, D, H, W] of any size by windows."""
    if card.volume is None:
        return network(inputs)
    (volume,) = inputs
    return np.concatenate([band for _, band in sliding_window(volume, card.size, network)], axis=1)[None]


def applied_by_torch(card: ModelCard, network: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """`applied` of a module on its device; the outputs of windows are joined on the CPU."""
    if card.volume is None:
        return readable(network(inputs))

    def call(tiles: NDArray[np.float32]) -> NDArray[np.float32]:
        found = readable(network(torch.from_numpy(tiles).to(inputs.device)))
        outputs: NDArray[np.float32] = found.float().cpu().numpy()
        return outputs

    return torch.from_numpy(applied(card, call, inputs.cpu().numpy()))


class VolumeEvaluation:
    """Collects the most likely class of each voxel, volume by volume.

    matches: measure distances, too, which takes longer than counting. counts: int64 [volumes, classes, 3], voxels in
    both, in the truth and in the prediction.
    """

    matches = True

    def __init__(self, dataset: VolumeDataset) -> None:
        self._dataset, self._names = dataset, dataset.class_names
        self._score = SegmentationScore(len(self._names), self._names)
        self._found: dict[int, NDArray[np.float64]] = {}  # index -> counts and distance of each class [classes, 4]

    def update(self, outputs: Tensor, labels: Tensor, gather: Gather | None = None) -> None:
        """Logits [1, classes, D, H, W] of one volume, and its index in the dataset, int64 [1]."""
        truth, grid = self._dataset.truth(int(labels[0]))
        predicted = most_likely(outputs[0].numpy(), truth.shape)
        confusion = self._confusion(predicted, truth)
        counts = torch.stack([confusion.diag(), confusion.sum(1), confusion.sum(0)], -1)
        away = torch.tensor(
            self._distances(predicted, truth, grid.spacing) if self.matches else [-1.0] * len(self._names)
        )
        found = confusion[None], torch.cat([counts, away[:, None].double()], -1)[None], labels
        if gather is not None:
            found = gather(tuple(each.to(labels.device) for each in found))
        for matrix, row, index in zip(*(each.cpu() for each in found), strict=True):
            self._score.add(matrix)
            self._found[int(index)] = row.numpy()

    def compute(self) -> VolumeScores:
        """mIoU over all voxels, Dice and distances by volume."""
        pooled, found = self._score.compute(), np.stack([self._found[index] for index in sorted(self._found)])
        hit, truth, predicted, away = np.moveaxis(found, -1, 0)
        dice = np.divide(2 * hit, truth + predicted, out=np.full(hit.shape, np.nan), where=truth + predicted > 0)
        distances = np.where(away >= 0, away, np.nan)
        return VolumeScores(
            pooled.miou, pooled.per_class, pooled.pixel_accuracy, *map(self._by_class, (dice, distances))
        )

    def counts(self) -> tuple[list[str], NDArray[np.int64]]:
        """Names of the volumes, and int64 [volumes, classes, 3]: voxels in both, in the truth, in the prediction."""
        places = sorted(self._found)
        found = np.stack([self._found[place][:, :3] for place in places]).astype(np.int64)
        return [self._dataset.cases[place].name for place in places], found

    def details(self) -> dict[str, object]:
        """Nothing."""
        return {}

    def _by_class(self, values: NDArray[np.float64]) -> dict[str, float | None]:
        """Mean over the volumes that have a value, of each class but the background."""
        columns = values.T[1:]
        known = [column[~np.isnan(column)] for column in columns]
        return {
            name: float(each.mean()) if len(each) else None for name, each in zip(self._names[1:], known, strict=True)
        }

    def _confusion(self, predicted: NDArray[np.uint8], truth: NDArray[np.uint8]) -> Tensor:
        count, known = len(self._names), truth != IGNORE
        pairs = truth[known].astype(np.int64) * count + predicted[known]
        return torch.from_numpy(np.bincount(pairs, minlength=count * count).reshape(count, count)).double()

    def _distances(self, predicted: NDArray[np.uint8], truth: NDArray[np.uint8], spacing: Any) -> list[float]:
        """Of each class in mm; -1 where there is none, as of the background."""
        predicted = np.where(truth == IGNORE, IGNORE, predicted)
        found = [hausdorff95(predicted == number, truth == number, spacing) for number in range(1, len(self._names))]
        return [-1.0, *(-1.0 if each is None else each for each in found)]
