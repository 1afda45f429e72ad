"""Cases of direct convolutions of few channels: `direct_conv.cu`.

As in `gemms` every partial sum is exact, so that the order of the sum does not matter. Moments are compared with
float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import direct
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import conv2d_reference
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, packed
from fp4deploy_emulator.cases.cuda import emulated
from fp4deploy_emulator.cases.decoded import NEAR, before_blackwell

FAMILY = "direct convolution"


@dataclass(frozen=True)
class Convolution:
    """A direct convolution. amax: of a packed output."""

    channels: tuple[int, ...] = (16,)
    outputs: int = 16
    size: int = 3
    image: tuple[int, int, int] = (1, 18, 35)
    dtype: torch.dtype = torch.float16
    relu: bool = True
    bias: bool = True
    amax: float | None = None
    moments: bool = False

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        sources = tuple(
            packed(setting, *self.image, channels, power=8 + i, seed=2 + i, binary=True)
            for i, channels in enumerate(self.channels)
        )
        weight = packed(setting, self.outputs, self.size, self.size, sum(self.channels), seed=1, weight=True)
        bias = multiples(setting, self.outputs, seed=7) if self.bias else None
        amax = None if self.amax is None else torch.tensor(self.amax)
        padding = self.size // 2
        with emulated(setting, outcome):
            y, moments = direct.conv2d(
                *(sources, decode_weight(weight, self.channels), bias, (padding, padding), self.relu),
                *(self.dtype, amax, self.moments),
            )
        common = (self.relu, self.dtype, amax, torch.float64)
        expected = conv2d_reference(sources, weight, bias, 1, padding, 1, *common)
        if isinstance(expected, Nvfp4Tensor):
            assert isinstance(y, Nvfp4Tensor)
            outcome.compare_packed(y, expected)
            return
        assert isinstance(y, torch.Tensor)
        outcome.compare(y, expected)
        if moments is not None and outcome.reference:
            compare_moments(y, moments, outcome)


def compare_moments(y: torch.Tensor, moments: Moments, outcome: Outcome) -> None:
    """Mean and squared deviations of every tile or run of pixels of an item, of the rounded output, near float64's."""
    (height, width), near, y = moments.tile, [], y.flatten(0, -4)  # slices of volumes
    if not width:
        y, height, width = y.flatten(1, 2)[:, None], 1, moments.rows
    tiles = [
        y[item, top : top + height, left : left + width].flatten(0, 1).double()
        for item in range(len(y))
        for top in range(0, y.shape[1], height)
        for left in range(0, y.shape[2], width)
    ]
    for values, part in zip(tiles, moments.parts, strict=True):
        mean, square = values.mean(0), (values - values.mean(0)).square().sum(0)
        room = NEAR * torch.stack([values.abs().amax(0), square])
        near.append((part[0].double() - torch.stack([mean, square])).abs() <= room)
    outcome.compare(torch.stack(near).byte(), torch.ones(len(near), 2, y.shape[-1], dtype=torch.uint8))


CASES = tuple(
    Case(f"direct convolution, {name}", FAMILY, run, before_blackwell)
    for name, run in (
        ("16 channels, moments", Convolution(image=(2, 18, 35), moments=True, bias=False, relu=False)),
        ("two sources of 16", Convolution(channels=(16, 16), outputs=32, image=(1, 5, 7), moments=True)),
        ("32 channels, 1x1, bfloat16", Convolution(channels=(32,), outputs=48, size=1, dtype=torch.bfloat16)),
        ("two sources of 32", Convolution(channels=(32, 32), outputs=32, image=(2, 9, 33), moments=True)),
        ("packed output", Convolution(channels=(16,), outputs=48, image=(1, 3, 34), amax=24.0)),
    )
)
