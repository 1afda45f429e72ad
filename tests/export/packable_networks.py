"""Small networks of the kinds that users bring, written by hand; each with the size of its input."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fp4deploy.export.to_packed import pack_model
from fp4deploy.packed import PackedFile, packed_file
from fp4deploy.qat import calibrate, prepare, round_to_deployed


def conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


class Residual(nn.Module):
    """Two convolutions with BatchNorm, added to the input or its projection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.norm2 = conv(outputs, outputs), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        project = nn.Sequential(conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))
        self.project = project if stride > 1 or inputs != outputs else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(self.relu(self.norm1(self.conv1(x)))))
        y += self.project(x)
        return self.relu(y)


class ResNetUNet(nn.Module):
    """A residual encoder, nearest upsampling and concatenated skips."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.stages = nn.ModuleList([Residual(16, 16, 1), Residual(16, 32, 2), Residual(32, 48, 2)])
        self.decoder = nn.ModuleList([self.block(80, 32), self.block(48, 24), self.block(40, 16)])
        self.head = nn.Conv2d(16, 5, 3, padding=1)

    @staticmethod
    def block(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(conv(inputs, outputs), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        skips, y = [first], self.pool(first)
        for stage in self.stages:
            y = stage(y)
            skips.append(y)
        y = skips.pop()
        for block in self.decoder:
            y = block(torch.cat([F.interpolate(y, scale_factor=2.0), skips.pop()], 1))
        return self.head(F.interpolate(y, scale_factor=2.0))


class FPN(nn.Module):
    """A pyramid with lateral 1x1 convolutions, nearest resizing to the size of the next level, and a sum of all."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([conv(3, 16, 3, 2), conv(16, 32, 3, 2), conv(32, 48, 3, 2)])
        self.lateral = nn.ModuleList([conv(16, 32, 1), conv(32, 32, 1), conv(48, 32, 1)])
        self.smooth = nn.ModuleList([conv(32, 16), conv(32, 16), conv(32, 16)])
        self.head = nn.Conv2d(16, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels, y = [], x
        for stage in self.stages:
            y = F.relu(stage(y))
            levels.append(y)
        y = self.lateral[2](levels[2])
        maps = [self.smooth[2](y)]
        for at in (1, 0):
            y = self.lateral[at](levels[at]) + F.interpolate(y, size=levels[at].shape[-2:], mode="nearest")
            maps.append(self.smooth[at](y))
        total = sum(F.interpolate(each, size=maps[-1].shape[-2:], mode="bilinear") for each in maps)
        return F.interpolate(self.head(total), size=x.shape[-2:], mode="bilinear", align_corners=False)


class ASPP(nn.Module):
    """Dilated branches and global pooling, as in DeepLabV3; two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), conv(16, 32, 3, 2), nn.ReLU())
        self.branches = nn.ModuleList(
            [conv(32, 16, 1)] + [nn.Conv2d(32, 16, 3, padding=rate, dilation=rate) for rate in (2, 3)]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(32, 16, 1), nn.ReLU())
        self.project = nn.Sequential(conv(64, 32, 1), nn.BatchNorm2d(32), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Conv2d(32, 5, 1)
        self.auxiliary = nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        size, y = x.shape[-2:], self.stem(x)
        parts = [branch(y) for branch in self.branches]
        parts.append(F.interpolate(self.pooled(y), size=y.shape[-2:], mode="bilinear", align_corners=False))
        out = self.head(self.project(torch.cat(parts, 1)))
        outputs = {"out": out, "aux": self.auxiliary(y)}
        return {
            name: F.interpolate(each, size=size, mode="bilinear", align_corners=False) for name, each in outputs.items()
        }


class Attention(nn.Module):
    """Self-attention over pixels, keys and values from a strided convolution, as in SegFormer."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.reduce = nn.Conv2d(channels, channels, 2, 2)
        self.norm = nn.LayerNorm(channels)
        self.query, self.both = nn.Linear(channels, channels), nn.Linear(channels, 2 * channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x: torch.Tensor, height: int, width: int) -> torch.Tensor:
        b, n, c = x.shape
        q = self.query(x).reshape(b, n, self.heads, c // self.heads).permute(0, 2, 1, 3)
        small = self.reduce(x.transpose(1, 2).reshape(b, c, height, width)).flatten(2).transpose(1, 2)
        k, v = self.both(self.norm(small)).reshape(b, -1, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = torch.softmax(q @ k.transpose(-2, -1) * (c // self.heads) ** -0.5, dim=-1)
        return self.out((scores @ v).transpose(1, 2).reshape(b, n, c))


class SegFormer(nn.Module):
    """One attention block with a mix-FFN and a linear decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm1 = nn.Conv2d(3, 32, 7, 4, 3), nn.LayerNorm(32)
        self.attention, self.norm2 = Attention(32, 2), nn.LayerNorm(32)
        self.first, self.depthwise, self.second = nn.Linear(32, 64), conv(64, 64, 3, 1, 64), nn.Linear(64, 32)
        self.decode, self.head = nn.Linear(32, 32), nn.Conv2d(32, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(x)
        b, c, h, w = y.shape
        t = y.flatten(2).transpose(1, 2)
        t = t + self.attention(self.norm1(t), h, w)
        z = self.first(self.norm2(t)).transpose(1, 2).reshape(b, 64, h, w)
        t = t + self.second(F.gelu(self.depthwise(z)).flatten(2).transpose(1, 2))
        y = self.decode(t).transpose(1, 2).reshape(b, c, h, w)
        return F.interpolate(self.head(y), scale_factor=4.0, mode="bilinear", align_corners=False)


class InstanceNormUNet(nn.Module):
    """InstanceNorm and LeakyReLU, strided convolutions down, transposed ones up, as in nnU-Net."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 16, 1), self.block(16, 32, 2), self.block(32, 48, 2)])
        self.up = nn.ModuleList([nn.ConvTranspose2d(48, 32, 2, 2), nn.ConvTranspose2d(32, 16, 2, 2)])
        self.decoder = nn.ModuleList([self.block(64, 32, 1), self.block(32, 16, 1)])
        self.head = nn.Conv2d(16, 5, 1)

    @staticmethod
    def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, step in ((inputs, stride), (outputs, 1)):
            layers += [nn.Conv2d(before, outputs, 3, step, 1), nn.InstanceNorm2d(outputs, affine=True), nn.LeakyReLU()]
        return nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
        x = skips.pop()
        for up, block in zip(self.up, self.decoder, strict=True):
            x = block(torch.cat([up(x), skips.pop()], 1))
        return self.head(x)


class VolumeUNet(nn.Module):
    """The same over volumes of thick slices: the first level halves height and width alone, by filters of 1x3x3."""

    def __init__(self) -> None:
        super().__init__()
        flat, cube = (1, 2, 2), (2, 2, 2)
        self.down = nn.ModuleList([self.block(3, 16, 1), self.block(16, 32, flat), self.block(32, 48, cube)])
        self.up = nn.ModuleList([nn.ConvTranspose3d(48, 32, cube, cube), nn.ConvTranspose3d(32, 16, flat, flat)])
        self.decoder = nn.ModuleList([self.block(64, 32, 1), self.block(32, 16, 1)])
        self.head = nn.Conv3d(16, 5, 1)

    @staticmethod
    def block(inputs: int, outputs: int, stride: Any) -> nn.Sequential:
        taps, around = ((3, 3, 3), (1, 1, 1)) if inputs > 16 else ((1, 3, 3), (0, 1, 1))
        layers: list[nn.Module] = []
        for before, step in ((inputs, stride), (outputs, 1)):
            layers += [nn.Conv3d(before, outputs, taps, step, around), nn.InstanceNorm3d(outputs, affine=True)]
            layers += [nn.LeakyReLU()]
        return nn.Sequential(*layers)

    forward = InstanceNormUNet.forward


class Gate(nn.Module):
    """Squeeze-excitation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, 16, 1), nn.Conv2d(16, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))
        return gate * x


class MobileNet(nn.Module):
    """Inverted residuals with depthwise convolutions, gates and Hardswish; pixel shuffle at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, 16, 3, 2), nn.BatchNorm2d(16), nn.Hardswish(inplace=True))
        self.blocks = nn.ModuleList([self.block(16, 5, 2), self.block(16, 3, 1)])
        self.head = nn.Conv2d(16, 5 * 16, 1)

    @staticmethod
    def block(channels: int, kernel: int, stride: int) -> nn.Sequential:
        wide = 2 * channels
        return nn.Sequential(
            conv(channels, wide, 1), nn.BatchNorm2d(wide), nn.Hardswish(inplace=True),
            conv(wide, wide, kernel, stride, wide), nn.BatchNorm2d(wide), nn.ReLU6(inplace=True), Gate(wide),
            conv(wide, channels, 1), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.stem(x))
        x = x + self.blocks[1](x)
        return F.pixel_shuffle(self.head(x), 4)


class Bottleneck(nn.Module):
    """ENet's: reduced, convolved along one axis and then the other, or dilated, expanded, added."""

    def __init__(self, channels: int, dilation: int = 0) -> None:
        super().__init__()
        inner = channels // 2
        middle = [nn.Conv2d(inner, inner, 3, padding=dilation, dilation=dilation)] if dilation else [
            nn.Conv2d(inner, inner, (5, 1), padding=(2, 0)), nn.Conv2d(inner, inner, (1, 5), padding=(0, 2))
        ]  # fmt: skip
        norms = (nn.BatchNorm2d(inner), nn.ReLU())
        self.path = nn.Sequential(
            conv(channels, inner, 1), *norms, *middle, conv(inner, channels, 1), nn.Dropout2d(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.leaky_relu(x + self.path(x), 0.1)


class ENet(nn.Module):
    """Asymmetric and dilated bottlenecks, max unpooling with the indices of the encoder.

    What it computes on the way it keeps for a loss, as some networks do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = conv(3, 32)
        self.pool, self.unpool = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)
        self.stage = nn.Sequential(Bottleneck(32), Bottleneck(32, 2), Bottleneck(32, 4))
        self.skip, self.up = conv(32, 32, 1), nn.ConvTranspose2d(32, 32, 2, stride=2)
        self.head = conv(32, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).relu()
        size = y.shape
        y, indices = self.pool(y)
        y = self.stage(y)
        self.kept = [y.sigmoid()]
        return self.head(self.up(y) + self.unpool(self.skip(y), indices, output_size=size))


class EightBits(nn.Module):
    """Every kind of layer that multiplies, in groups as well, of channels that are no whole blocks."""

    def __init__(self, groups: tuple[int, int] = (4, 2)) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.wide = nn.Conv2d(24, 24, 3, padding=1)
        self.body = nn.Conv2d(24, 20, 3, padding=2, stride=2, dilation=2, groups=groups[0])
        self.up = nn.ConvTranspose2d(20, 12, 3, stride=2, padding=1, output_padding=1, groups=groups[1])
        self.point = nn.Linear(12, 18)
        self.head = nn.Conv2d(18, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.body(self.wide(self.stem(x).relu()).relu()).relu())
        return self.head(self.point(y.movedim(1, -1)).relu().movedim(-1, 1))


class Mixed(nn.Module):
    """Every kind of layer that has W4A8, of channels that are no whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.body = nn.Conv2d(24, 40, 3, padding=1, stride=2)
        self.skip = nn.Conv2d(64, 64, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(40, 40, 2, stride=2)
        self.point = nn.Linear(64, 48)
        self.head = nn.Conv2d(48, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x).relu()
        y = torch.cat([first, self.up(self.body(first).relu())], 1)
        y = self.skip(y).relu()
        return self.head(self.point(y.movedim(1, -1)).movedim(-1, 1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet encoder": (ResNetUNet, (32, 48)),
    "FPN": (FPN, (32, 40)),
    "ASPP": (ASPP, (32, 40)),
    "SegFormer block": (SegFormer, (32, 48)),
    "InstanceNorm UNet": (InstanceNormUNet, (24, 32)),
    "InstanceNorm UNet, volumes": (VolumeUNet, (4, 8, 24)),
    "MobileNet": (MobileNet, (32, 32)),
    "ENet": (ENet, (32, 48)),
}


# Networks whose layers quantise what they read -> the module, and how it is prepared.
OWN_QUANTIZERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "W4A8": (Mixed, {"recipe": "w4a8_qat"}),
    **{
        form.upper(): (EightBits, {"include": ["wide", "body", "up", "point"], form: ["body", "up", "point"]})
        for form in ("fp8", "int8")
    },
}


def with_own_quantizers(name: str) -> nn.Module:
    """One of `OWN_QUANTIZERS`, calibrated on images of 16 x 16."""
    torch.manual_seed(0)
    factory, options = OWN_QUANTIZERS[name]
    model = prepare(factory(), **options)
    calibrate(model, [torch.randn(2, 3, 16, 16) for _ in range(2)])
    round_to_deployed(model.eval())
    return model


def deployed(model: nn.Module, example: torch.Tensor, recipe: str | None = "nvfp4_qat") -> nn.Module:
    """Running statistics and affine parameters that are not trivial, calibrated, rounded to what is deployed."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.train()(torch.randn(example.shape, generator=generator))
    model.eval()
    if recipe:
        prepare(model, recipe)
        calibrate(model, [example])
    round_to_deployed(model)
    return model


@cache
def packed_network(name: str, dynamic_size: bool = False) -> tuple[PackedFile, torch.Tensor]:
    """One of `NETWORKS`, of a fixed size or of any, packed once for all tests of a process, and an input."""
    torch.manual_seed(0)
    factory, size = NETWORKS[name]
    x = torch.randn(2, 3, *size)
    return packed_file(Path("own.fp4"), None, *pack_model(deployed(factory(), x), x, dynamic_size=dynamic_size)), x
