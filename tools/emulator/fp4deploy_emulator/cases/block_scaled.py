"""Cases of convolutions by block-scaled mma.sync: `block_scaled_conv.cu`. As in `gemms` every partial sum is exact."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.plugins.gemm.convolution.block_scaled import SMALL, TALL, WIDE, Tile, Variant
from fp4deploy.plugins.gemm.reference import conv2d_reference, output_sizes
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, packed
from fp4deploy_emulator.cases.cuda import emulated

FAMILY = "block-scaled convolution"
SMS = {SMALL: 1 << 20, WIDE: 1, TALL: 1}  # multiprocessors of a GPU for which the tile is chosen


@dataclass(frozen=True)
class Convolution:
    """A convolution of these tiles. amax: of a packed output; zeros: the source that is 0."""

    channels: tuple[int, ...] = (64,)
    outputs: int = 72
    taps: tuple[int, int] = (3, 3)
    image: tuple[int, int, int] = (1, 9, 17)
    stride: int = 1
    padding: tuple[int, int] = (1, 1)
    dilation: int = 1
    dtype: torch.dtype = torch.float16
    relu: bool = True
    bias: bool = True
    amax: float | None = None
    tile: Tile = SMALL
    zeros: int | None = None

    def variant(self) -> Variant:
        """What the kernel is compiled for."""
        sizes = output_sizes(self.image[1:], self.taps, self.stride, self.padding, self.dilation)
        pixels = (self.image[0], sizes[0], sizes[1])
        if (self.taps, self.stride, self.padding) == ((1, 1), 1, (0, 0)):
            pixels = (1, 1, self.image[0] * self.image[1] * self.image[2])
        channels = tuple(-(-count // 16) * 16 for count in self.channels)
        geometry = (self.taps, self.stride, self.dilation)
        return block_scaled.variant(channels, self.outputs, *geometry, pixels, SMS[self.tile])

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        sources = tuple(
            packed(setting, *self.image, channels, power=8 + i, seed=2 + i, binary=True)
            for i, channels in enumerate(self.channels)
        )
        if self.zeros is not None:
            for part in sources[self.zeros].as_bytes:
                part.zero_()
        weight = packed(setting, self.outputs, *self.taps, sum(self.channels), seed=1, weight=True)
        bias = multiples(setting, self.outputs, seed=7) if self.bias else None
        amax = None if self.amax is None else torch.tensor(self.amax)
        place = (self.stride, self.padding, self.dilation, self.relu, self.dtype, amax)
        with emulated(setting, outcome):
            y = block_scaled.conv2d(sources, weight, bias, *place, chosen=self.variant())
        expected = conv2d_reference(sources, weight, bias, *place, torch.float64)
        if isinstance(expected, Nvfp4Tensor):
            assert isinstance(y, Nvfp4Tensor)
            outcome.compare_packed(y, expected)
        else:
            assert isinstance(y, torch.Tensor)
            outcome.compare(y, expected)


def has_instruction(capability: int) -> bool:
    """Whether the kernel runs on an architecture."""
    return capability in block_scaled.ARCHITECTURES


CASES = tuple(
    Case(f"block-scaled convolution, {name}", FAMILY, run, has_instruction)
    for name, run in (
        ("3x3", Convolution(channels=(128,), image=(1, 9, 9))),
        ("3x3, 128 outputs", Convolution(channels=(128,), outputs=130, image=(1, 10, 18), tile=WIDE)),
        ("3x3, 64 outputs", Convolution(outputs=63, image=(1, 5, 18), tile=TALL, relu=False, dtype=torch.bfloat16)),
        ("one pixel", Convolution(outputs=8, image=(1, 1, 1), bias=False)),
        ("1x1", Convolution(channels=(192,), taps=(1, 1), padding=(0, 0), image=(2, 5, 7), tile=WIDE)),
        ("1x1, stride 2", Convolution(taps=(1, 1), padding=(0, 0), image=(2, 5, 9), stride=2)),
        ("3x3, stride 2", Convolution(image=(2, 9, 8), stride=2, relu=False)),
        ("3x3, stride 2, 128 outputs", Convolution(outputs=128, image=(1, 9, 8), stride=2, tile=WIDE)),
        ("3x3, dilation 2", Convolution(channels=(128,), image=(1, 8, 9), padding=(2, 2), dilation=2)),
        ("3x3, dilation 9", Convolution(image=(1, 8, 9), padding=(9, 9), dilation=9, outputs=16)),
        ("3x3, 20 channels, 5 outputs", Convolution(channels=(20,), outputs=5, image=(1, 7, 5))),
        ("3x3, 96 channels, packed output", Convolution(channels=(96,), outputs=40, amax=24.0)),
        ("3x3, packed output", Convolution(channels=(64,), outputs=136, image=(1, 8, 9), amax=24.0, tile=WIDE)),
        ("3x3, two sources", Convolution(channels=(64, 128), image=(1, 8, 9))),
        ("3x3, two sources of 32 and 80", Convolution(channels=(32, 80), image=(1, 8, 9), padding=(1, 0))),
        ("3x3, zeros and a source", Convolution(channels=(64, 64), image=(1, 4, 9), zeros=0)),
        ("3x3, a source and zeros", Convolution(channels=(64, 64), image=(1, 4, 9), zeros=1, bias=False)),
        ("5x1", Convolution(taps=(5, 1), padding=(2, 0), image=(1, 6, 9), outputs=24)),
        ("1x3, dilation 2, stride 2", Convolution(taps=(1, 3), padding=(0, 2), image=(1, 5, 9), stride=2, dilation=2)),
        ("2x2", Convolution(channels=(256,), taps=(2, 2), padding=(0, 1), image=(1, 5, 6), outputs=8)),
        ("5x5, 48 channels", Convolution(channels=(48,), taps=(5, 5), padding=(2, 2), image=(1, 6, 7), outputs=17)),
    )
)
