"""Networks as users write them: convolutions in direct sequence, a feature pyramid, dilated branches."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

SHAPE = (3, 16, 24)


class ConvConv(nn.Module):
    """Convolutions that follow each other directly, one of them called twice, and BatchNorm behind some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.first = nn.Conv2d(16, 32, 3, padding=1)
        self.second = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.strided = nn.Conv2d(32, 48, 3, stride=2, padding=1, bias=False)
        self.last_norm = nn.BatchNorm2d(48)
        self.up = nn.ConvTranspose2d(48, 16, 2, stride=2)
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = self.second(self.second(self.first(x)))
        x = self.last_norm(self.strided(self.pointwise(x)))
        return self.head(torch.relu(self.up(x)))


class FeaturePyramid(nn.Module):
    """FPN: lateral 1x1 convolutions, upsampled sums, and a 3x3 convolution right behind each sum."""

    def __init__(self) -> None:
        super().__init__()
        widths = (16, 32, 48)
        strides = (1, 2, 2)
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.stages = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=stride, padding=1)
            for before, after, stride in zip((16, *widths), widths, strides, strict=False)
        )
        self.lateral = nn.ModuleList(nn.Conv2d(width, 32, 1) for width in widths)
        self.smooth = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in widths)
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, levels = torch.relu(self.stem(x)), []
        for stage in self.stages:
            x = torch.relu(stage(x))
            levels.append(x)
        laterals = [lateral(level) for lateral, level in zip(self.lateral, levels, strict=True)]
        total, size = laterals[-1], levels[0].shape[2:]
        outputs = [self.smooth[-1](total)]
        for lateral, smooth in zip(reversed(laterals[:-1]), self.smooth, strict=False):
            total = lateral + F.interpolate(total, scale_factor=2.0, mode="nearest")
            outputs.append(smooth(total))
        merged = [F.interpolate(output, size, mode="bilinear", align_corners=False) for output in outputs[:-1]]
        return self.head(torch.relu(sum(merged, outputs[-1])))


class DilatedBranches(nn.Module):
    """ASPP: branches of several dilations and a pooled one that read one activation, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.point = nn.Conv2d(32, 16, 1, bias=False)
        self.branches = nn.ModuleList(nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (2, 4))
        self.pooled = nn.Conv2d(32, 16, 1)
        self.project = nn.Conv2d(64, 32, 1, bias=False)
        self.norm = nn.InstanceNorm2d(32, affine=True)
        self.refine = nn.Conv2d(32, 32, 3, padding=1)
        self.head = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.stem(x))
        pooled = self.pooled(F.adaptive_avg_pool2d(x, 1))
        branches = [self.point(x), *(branch(x) for branch in self.branches)]
        branches.append(F.interpolate(pooled, x.shape[2:], mode="bilinear", align_corners=False))
        x = torch.relu(self.norm(self.project(torch.cat(branches, 1))))
        return self.head(torch.relu(self.refine(x)))


NETWORKS: dict[str, type[nn.Module]] = {"conv-conv": ConvConv, "FPN": FeaturePyramid, "ASPP": DilatedBranches}


def random_norms(model: nn.Module, seed: int = 5) -> nn.Module:
    """Give every BatchNorm running statistics that a trained network might have."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.copy_(0.2 * torch.randn(module.running_mean.shape, generator=generator))
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
    return model
