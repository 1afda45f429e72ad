"""Transforms of images that have one class as a whole: the picture of another transform, and the class, int64 []."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fp4deploy.data.augmentation.transforms import EvalTransform, TrainTransform
from fp4deploy.data.sample import Sample


class LabelEvalTransform(EvalTransform):
    """As `EvalTransform`, with the class of the image as its label."""

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], class int64 [])."""
        return super().compact(_plain(sample), epoch, index)[0], _label(sample)


class LabelTrainTransform(TrainTransform):
    """As `TrainTransform`, with the class of the image as its label."""

    def compact(self, sample: Sample, epoch: int = 0, index: int = 0) -> tuple[Tensor, Tensor]:
        """(Image uint8 [H, W, 3], class int64 [])."""
        return super().compact(_plain(sample), epoch, index)[0], _label(sample)


def _plain(sample: Sample) -> Sample:
    """The sample with a mask that is cheap to cut: it is not looked at."""
    return replace(sample, mask=np.zeros(sample.image.shape[:2], np.uint8))


def _label(sample: Sample) -> Tensor:
    return torch.tensor(int(sample.mask[0, 0]))
