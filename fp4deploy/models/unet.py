"""The UNet that every precision shares.

    level   0     1     2     3     4          channels = int(scale * {64, 128, 256, 512, 1024})
    encoder B  -> B  -> B  -> B  -> B          B = (conv 3x3, GroupNorm 8, ReLU) twice, max pooling 2x2 between levels
    decoder B <-  B <-  B <-  B <--'           <- = transposed convolution 2x2 stride 2, then [skip, up] concatenated
    head    conv 1x1 -> logits

Volumes go through the same network over three spatial axes; a pooling, and the transposed convolution that undoes it,
then leaves out axes whose voxels are thick or few (`volumes.poolings`).

One class serves FP16 and NVFP4: `qat.prepare` changes layers in place and keeps every parameter's name, so that an FP16
checkpoint loads into the NVFP4 model name by name. GroupNorm rather than BatchNorm: no running statistics to
re-estimate after quantisation, and the same arithmetic in training and in the engine.

With `digits` the encoder reads the image in the multi-term FP4 encoding (`input_encoding`), 13 channels instead of 3,
so that its first convolution can run in FP4 as well; everything after it is the same.

Source of the architecture: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image
Segmentation", 2015 (padding kept "same" here, so that the logits have the size of the image).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import fx, nn

from fp4deploy.errors import InputError
from fp4deploy.models.input_encoding import ENCODED_CHANNELS, IMAGE_CHANNELS, encode_input, expand_weight
from fp4deploy.models.volumes import IMAGES, NetworkInput, poolings

WIDTHS = (64, 128, 256, 512, 1024)
GROUPS = 8
LEVELS = len(WIDTHS) - 1  # poolings
STRIDE = 2**LEVELS
fx.wrap("encode_input")  # one node of a symbolic trace: it asks for the type of the image


CONVOLUTION: dict[int, Any] = {2: nn.Conv2d, 3: nn.Conv3d}  # by the number of spatial axes
TRANSPOSED: dict[int, Any] = {2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
POOLING: dict[int, Any] = {2: nn.MaxPool2d, 3: nn.MaxPool3d}


class Block(nn.Module):
    """(conv 3x3, GroupNorm, ReLU) twice; [N, in, H, W] -> [N, out, H, W], or with a D in front of H."""

    def __init__(self, in_channels: int, out_channels: int, axes: int = 2) -> None:
        super().__init__()
        convolution = CONVOLUTION[axes]
        self.conv1 = convolution(in_channels, out_channels, 3, padding=1)
        self.norm1 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = convolution(out_channels, out_channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(x)))


class UNet(nn.Module):
    """Semantic segmentation UNet: image [N, in_channels, H, W] -> logits [N, classes, H, W].

    H and W must be multiples of 16 (four poolings). With `digits` the first convolution reads the encoded image
    [N, 13, H, W], and starts as the same function of the image as that of a UNet of the same seed without `digits`.

    Args:
        strides: of the four poolings, along each spatial axis; by default 2 along height and width.

    Raises:
        InputError: `scale` gives a width that GroupNorm's 8 groups do not divide; `digits` with other than 3 channels.
    """

    output_layers: tuple[str, ...] = ("head",)

    def __init__(
        self,
        classes: int,
        scale: float = 1.0,
        in_channels: int = IMAGE_CHANNELS,
        digits: bool = False,
        strides: Sequence[tuple[int, ...]] = ((2, 2),) * LEVELS,
    ) -> None:
        super().__init__()
        widths, axes = channel_widths(scale), len(strides[0])
        if digits and in_channels != IMAGE_CHANNELS:
            raise InputError(f"The FP4 input encoding takes RGB images, and this UNet reads {in_channels} channels.")
        self.classes, self.scale, self.digits, self.axes = classes, scale, digits, axes
        self.encoder = nn.ModuleList(
            Block(before, after, axes) for before, after in zip((in_channels, *widths[:-1]), widths, strict=True)
        )
        pools = [POOLING[axes](stride) for stride in strides]
        self.pool = pools[0] if len(set(strides)) == 1 else nn.ModuleList(pools)
        downwards = list(reversed(widths))
        self.up = nn.ModuleList(
            TRANSPOSED[axes](deep, shallow, stride, stride=stride)
            for (deep, shallow), stride in zip(pairwise(downwards), reversed(strides), strict=True)
        )
        self.decoder = nn.ModuleList(Block(2 * width, width, axes) for width in downwards[1:])
        self.head = CONVOLUTION[axes](widths[0], classes, 1)
        if digits:  # after everything has drawn its weights
            first = cast(Block, self.encoder[0]).conv1
            first.in_channels, first.weight = ENCODED_CHANNELS, nn.Parameter(expand_weight(first.weight.detach()))

    def read_image(self, x: torch.Tensor) -> torch.Tensor:
        """What the first convolution reads: the image itself [N, 3, H, W], or encoded [N, 13, H, W]."""
        return encode_input(x).to(next(self.head.parameters()).dtype) if self.digits else x

    def pooled(self, x: torch.Tensor, level: int) -> torch.Tensor:
        """What a level of the encoder reads of the level above."""
        if level == 0:
            return x
        pool = self.pool[level - 1] if isinstance(self.pool, nn.ModuleList) else self.pool
        return cast(torch.Tensor, pool(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read_image(x)
        skips: list[torch.Tensor] = []
        for level, block in enumerate(self.encoder):
            x = block(self.pooled(x, level))
            skips.append(x)
        x = skips.pop()
        for up, block in zip(self.up, self.decoder, strict=True):
            x = block(torch.cat([skips.pop(), up(x)], dim=1))
        return self.head(x)


def channel_widths(scale: float) -> tuple[int, ...]:
    """Channels of the five levels, int(scale * {64, ..., 1024}).

    Raises:
        InputError: a width is not a positive multiple of GroupNorm's 8 groups.
    """
    widths = tuple(int(scale * width) for width in WIDTHS)
    if any(width < GROUPS or width % GROUPS for width in widths):
        raise InputError(
            f"A UNet of scale {scale:g} would have {', '.join(map(str, widths))} channels, and GroupNorm needs "
            f"multiples of {GROUPS}. Valid scales are multiples of 0.125, such as 0.25 and 1.0."
        )
    return widths


def build_unet(classes: int, scale: float = 1.0, digits: bool = False, inputs: NetworkInput = IMAGES) -> UNet:
    """Build a freshly initialised UNet.

    Args:
        inputs: what it reads; of volumes the poolings follow its size and spacing.
    """
    if classes < 1:
        raise InputError(f"A model needs at least one class, not {classes}.")
    return UNet(classes, scale, inputs.channels, digits, poolings(inputs, LEVELS))
