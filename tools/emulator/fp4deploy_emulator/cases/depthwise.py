"""Cases of depthwise convolutions: `depthwise_conv.cu`.

Operands are small multiples of powers of two, so that every partial sum is exact, whatever its order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.plugins.gemm.convolution import depthwise
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples
from fp4deploy_emulator.cases.cuda import emulated

Pair = tuple[int, int]


@dataclass(frozen=True)
class Convolution:
    """image: N, H, W, C; piece: rows and columns of a thread."""

    image: tuple[int, int, int, int]
    taps: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    bias: bool = True
    relu: bool = False
    dtype: torch.dtype = torch.float16
    piece: Pair | None = None

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare; Inf and NaN reach the results that read them, and a NaN stays one behind ReLU."""
        channels = self.image[-1]
        x = multiples(setting, *self.image, most=8, seed=3).to(self.dtype)
        x[0, 0, 0, 0], x[-1, -1, -1, -1] = float("inf"), float("nan")
        weight = multiples(setting, channels, 1, *self.taps, step=0.125, most=8, seed=1).to(self.dtype)
        bias = multiples(setting, channels, seed=7) if self.bias else None
        places = (self.stride, self.padding, self.dilation)
        assert depthwise.supports(weight, *places, channels)
        with emulated(setting, outcome):
            y = depthwise.conv2d(x, weight, bias, *places, self.relu, self.piece)
        expected = depthwise.conv2d_reference(x, weight, bias, *places, self.relu)
        outcome.compare(y.isnan(), expected.isnan())
        outcome.compare(y.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))


CASES = tuple(
    Case(f"depthwise, {name}", "depthwise convolutions", run)
    for name, run in (
        ("7x7", Convolution((2, 11, 13, 96), (7, 7), padding=(3, 3), piece=(2, 8))),
        ("7x7, four rows", Convolution((1, 9, 17, 32), (7, 7), padding=(3, 3), relu=True, piece=(4, 8))),
        ("3x3, 6 channels", Convolution((3, 5, 4, 6), (3, 3), padding=(1, 1), bias=False)),
        (
            "5x5, stride 2, BF16",
            Convolution((1, 12, 9, 70), (5, 5), (2, 2), (2, 2), dtype=torch.bfloat16, piece=(2, 4)),
        ),
        ("3x3, dilation 3", Convolution((1, 10, 11, 34), (3, 3), padding=(3, 3), dilation=(3, 3), piece=(1, 8))),
        ("1x4, strides 3 and 1", Convolution((2, 8, 10, 134), (1, 4), (3, 1), (0, 2), piece=(2, 4))),
    )
)
