"""Networks of three convolutions, for properties that do not depend on the network."""

from __future__ import annotations

import torch
from torch import nn

SPEC = "tests.train.small_network:Small"
NORMED = "tests.train.small_network:Normed"


class Small(nn.Module):
    """[N, 3, H, W] -> [N, classes, H, W]; a plain recipe quantises `body`."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.body = nn.Conv2d(16, 16, 3, padding=1)
        self.head = nn.Conv2d(16, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(torch.relu(self.stem(x)))))


class Normed(Small):
    """The same with a batch norm after `body`."""

    def __init__(self, classes: int) -> None:
        super().__init__(classes)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.norm(self.body(torch.relu(self.stem(x))))))
