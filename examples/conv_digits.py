"""A small convolutional network on scikit-learn's digits: FP32 and every recipe.

    python examples/conv_digits.py                                    all recipes, 5 seeds
    python examples/conv_digits.py --recipes nvfp4_train --seeds 1    one of them, once

    stem 3x3, 1 -> 16    conv 3x3, 16 -> 32    down 3x3 stride 2, 32 -> 64    mean over pixels    head, 64 -> 10

Each convolution is followed by GroupNorm and ReLU. Quantised are conv and down; stem reads the image and head writes
the logits, and both stay in FP32 unless --all-layers is given. The weight gradients contract over pixels: 64 of them
after conv, 16 after down, so that MXFP4's blocks of 32 are half padding there.
"""

from __future__ import annotations

import torch
from digits import Settings, main
from torch import nn

CLASSES, GROUPS = 10, 4


class ConvNet(nn.Module):
    """Image [N, 1, 8, 8] -> logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(GROUPS, 16)
        self.conv, self.norm2 = nn.Conv2d(16, 32, 3, padding=1), nn.GroupNorm(GROUPS, 32)
        self.down, self.norm3 = nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GroupNorm(GROUPS, 64)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.stem(x)))
        x = torch.relu(self.norm2(self.conv(x)))
        x = torch.relu(self.norm3(self.down(x)))
        return self.head(x.mean((2, 3)))


SETTINGS = Settings(epochs=10)

if __name__ == "__main__":
    main("conv", ConvNet, SETTINGS)
