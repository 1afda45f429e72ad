"""A plain decoder for any backbone that gives a pyramid of feature maps, such as timm's with `features_only`.

    backbone    f_0 [N, C_0, H/2, W/2], f_1 [N, C_1, H/4, W/4], ...      strides as the backbone has them
    decoder     x = f_last; for each shallower f: x = B(concat(f, upsample(x to the size of f)))
    head        conv 1x1 -> logits at the stride of f_0; the caller resizes them (`models.output`)

B is (conv 3x3, GroupNorm, ReLU) once, of one width at all levels. Sizes are taken from the feature maps, so that any
image size that the backbone takes is fine. It is the UNet's decoder without tuning: a baseline, not a proposal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

GROUPS = 8


class PyramidSegmenter(nn.Module):
    """Backbone and decoder: [N, 3, H, W] -> [N, classes, H/s, W/s], s the stride of the shallowest features.

    Args:
        backbone: gives a list of feature maps, shallow to deep.
        channels: of those feature maps.
        width: channels of the decoder, a multiple of 16 for whole FP4 blocks.
    """

    def __init__(self, backbone: nn.Module, channels: Sequence[int], classes: int, width: int = 64) -> None:
        super().__init__()
        self.backbone = backbone
        inputs = [channels[-1], *[width] * (len(channels) - 2)]
        self.decoder = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(deep + shallow, width, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, width), nn.ReLU()
            )
            for deep, shallow in zip(inputs, reversed(channels[:-1]), strict=True)
        )
        self.head = nn.Conv2d(width if len(channels) > 1 else channels[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: Any = self.backbone(x)
        *shallower, out = features
        for feature, block in zip(reversed(shallower), self.decoder, strict=True):
            out = block(torch.cat([feature, F.interpolate(out, feature.shape[2:], mode="nearest")], 1))
        logits: torch.Tensor = self.head(out)
        return logits
