"""Networks written by hand after their papers, for `benchmarks/architectures.py`: FILE.py:factory.

enet          Paszke et al. 2016: bottlenecks with 5x1 and 1x5 or dilated convolutions, PReLU, max unpooling with
              the indices of the encoder
bisenetv2     Yu et al. 2020: two branches, depthwise expansion, bilateral guided aggregation, pixel shuffle,
              auxiliary heads
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def enet(classes: int) -> nn.Module:
    """ENet for 3-channel images whose sizes are multiples of 8."""
    return ENet(classes)


def bisenetv2(classes: int) -> nn.Module:
    """BiSeNetV2 for 3-channel images whose sizes are multiples of 32."""
    return BiSeNetV2(classes)


class Bottleneck(nn.Module):
    """1x1, 3x3 of a dilation or 5x1 and 1x5, 1x1, added to the input. [N, C, H, W]."""

    def __init__(self, channels: int, dilation: int = 0, relu: bool = False) -> None:
        super().__init__()
        inner = channels // 4
        middle: list[nn.Module] = [nn.Conv2d(inner, inner, 3, padding=dilation, dilation=dilation, bias=False)]
        if not dilation:
            middle = [
                nn.Conv2d(inner, inner, (5, 1), padding=(2, 0), bias=False),
                nn.Conv2d(inner, inner, (1, 5), padding=(0, 2), bias=False),
            ]
        act = [nn.ReLU() if relu else nn.PReLU(each) for each in (inner, inner, channels)]
        self.path = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), act[0],
            *middle, nn.BatchNorm2d(inner), act[1],
            nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels), nn.Dropout2d(0.1),
        )  # fmt: skip
        self.act = act[2]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(x + self.path(x))


class Down(nn.Module):
    """Max pooling, padded with zero channels, beside a strided path; gives the indices too."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        inner = channels // 4
        self.extra = out - channels
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.path = nn.Sequential(
            nn.Conv2d(channels, inner, 2, stride=2, bias=False), nn.BatchNorm2d(inner), nn.PReLU(inner),
            nn.Conv2d(inner, inner, 3, padding=1, bias=False), nn.BatchNorm2d(inner), nn.PReLU(inner),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out), nn.Dropout2d(0.1),
        )  # fmt: skip
        self.act = nn.PReLU(out)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, indices = self.pool(x)
        n, _, height, width = y.shape
        padded = torch.cat([y, torch.zeros(n, self.extra, height, width, device=y.device, dtype=y.dtype)], 1)
        return self.act(padded + self.path(x)), indices


class Up(nn.Module):
    """Max unpooling of a 1x1 beside a transposed convolution."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        inner = channels // 4
        self.skip = nn.Sequential(nn.Conv2d(channels, out, 1, bias=False), nn.BatchNorm2d(out))
        self.unpool = nn.MaxUnpool2d(2)
        self.path = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.ConvTranspose2d(inner, inner, 2, stride=2, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out),
        )  # fmt: skip

    def forward(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.unpool(self.skip(x), indices) + self.path(x))


class ENet(nn.Module):
    """[N, 3, H, W] -> logits [N, classes, H, W]."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.beside = nn.Conv2d(3, 13, 3, stride=2, padding=1, bias=False), nn.MaxPool2d(2)
        self.norm, self.act = nn.BatchNorm2d(16), nn.PReLU(16)
        self.down1, self.down2 = Down(16, 64), Down(64, 128)
        self.stage1 = nn.Sequential(*(Bottleneck(64, 1) for _ in range(4)))
        self.stage2 = nn.Sequential(*(Bottleneck(128, each) for each in 2 * (1, 2, 0, 4, 1, 8, 0, 16)))
        self.up4, self.up5 = Up(128, 64), Up(64, 16)
        self.stage4 = nn.Sequential(Bottleneck(64, 1, relu=True), Bottleneck(64, 1, relu=True))
        self.stage5 = Bottleneck(16, 1, relu=True)
        self.head = nn.ConvTranspose2d(16, classes, 3, stride=2, padding=1, output_padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self.norm(torch.cat([self.first(x), self.beside(x)], 1)))
        x, first = self.down1(x)
        x, second = self.down2(self.stage1(x))
        x = self.stage4(self.up4(self.stage2(x), second))
        y: torch.Tensor = self.head(self.stage5(self.up5(x, first)))
        return y


def conv(i: int, o: int, k: int = 3, s: int = 1, groups: int = 1, relu: bool = True) -> nn.Sequential:
    """Convolution and BatchNorm, and ReLU."""
    layers = [nn.Conv2d(i, o, k, s, k // 2, groups=groups, bias=False), nn.BatchNorm2d(o)]
    return nn.Sequential(*layers, *([nn.ReLU(inplace=True)] if relu else []))


class Expansion(nn.Module):
    """Gather and expansion: 3x3, depthwise to six times the channels, 1x1; at stride 2 with a depthwise shortcut."""

    def __init__(self, i: int, o: int, stride: int = 1) -> None:
        super().__init__()
        wide = 6 * i
        strided = [conv(i, wide, 3, stride, i, relu=False)] if stride > 1 else []
        last = conv(wide if strided else i, wide, 3, 1, wide if strided else i)
        self.main = nn.Sequential(conv(i, i), *strided, last, conv(wide, o, 1, relu=False))
        self.short = nn.Sequential(conv(i, i, 3, 2, i, relu=False), conv(i, o, 1, relu=False)) if strided else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.main(x) + (x if self.short is None else self.short(x)))


class Aggregation(nn.Module):
    """Bilateral guided aggregation of the detail and the semantic branch, each a gate of the other."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.fine = nn.Sequential(conv(c, c, 3, 1, c, relu=False), nn.Conv2d(c, c, 1, bias=False))
        self.coarse = nn.Sequential(conv(c, c, 3, 2, relu=False), nn.AvgPool2d(3, 2, 1))
        self.gate = conv(c, c, relu=False)
        self.meaning = nn.Sequential(conv(c, c, 3, 1, c, relu=False), nn.Conv2d(c, c, 1, bias=False))
        self.up, self.out = nn.Upsample(scale_factor=4), conv(c, c)

    def forward(self, detail: torch.Tensor, semantic: torch.Tensor) -> torch.Tensor:
        fine = self.fine(detail) * torch.sigmoid(self.up(self.gate(semantic)))
        y: torch.Tensor = self.out(fine + self.up(self.coarse(detail) * torch.sigmoid(self.meaning(semantic))))
        return y


class BiSeNetV2(nn.Module):
    """[N, 3, H, W] -> logits [N, classes, H, W]; in training, `auxiliary` keeps the logits of the auxiliary heads."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        widths = [(3, 64, 2), (64, 64, 1), (64, 64, 2), (64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1)]
        self.detail = nn.Sequential(*(conv(i, o, 3, s) for i, o, s in [*widths, widths[-1]]))
        self.first = conv(3, 16, 3, 2)
        self.left, self.right = nn.Sequential(conv(16, 8, 1), conv(8, 16, 3, 2)), nn.MaxPool2d(3, 2, 1)
        self.fuse = conv(32, 16)
        self.stage3 = nn.Sequential(Expansion(16, 32, 2), Expansion(32, 32))
        self.stage4 = nn.Sequential(Expansion(32, 64, 2), Expansion(64, 64))
        self.stage5 = nn.Sequential(Expansion(64, 128, 2), *(Expansion(128, 128) for _ in range(3)))
        self.context_norm, self.context, self.mix = (
            nn.BatchNorm2d(128),
            conv(128, 128, 1),
            nn.Conv2d(128, 128, 3, padding=1),
        )
        self.aggregate = Aggregation(128)
        self.head = self.logits(128, 256, classes, 8)
        self.heads = nn.ModuleList([self.logits(16, 64, classes, 4), self.logits(32, 64, classes, 8)])
        self.auxiliary: list[Any] = []

    @staticmethod
    def logits(i: int, wide: int, classes: int, factor: int) -> nn.Sequential:
        """3x3, 1x1 to the pixels of a patch, pixel shuffle."""
        return nn.Sequential(
            conv(i, wide), nn.Dropout(0.1), nn.Conv2d(wide, classes * factor**2, 1), nn.PixelShuffle(factor)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.first(x)
        stem = self.fuse(torch.cat([self.left(first), self.right(first)], 1))
        third = self.stage3(stem)
        y = self.stage5(self.stage4(third))
        y = self.mix(self.context(self.context_norm(y.mean((2, 3), keepdim=True))) + y)
        if self.training:
            self.auxiliary = [head(each) for head, each in zip(self.heads, (stem, third), strict=True)]
        logits: torch.Tensor = self.head(self.aggregate(self.detail(x), y))
        return logits
