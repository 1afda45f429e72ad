"""Cases of FP16 and BF16 convolutions of small K: `small_k_conv.cu`.

Operands are small multiples of powers of two, so that every partial sum is exact, whatever its order. Moments are
compared with float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.plugins.gemm.convolution import fastest, small_k
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples
from fp4deploy_emulator.cases.cuda import emulated
from fp4deploy_emulator.cases.direct import compare_moments

Pair = tuple[int, int]
FAMILY = "convolutions of small K"
BF16 = torch.bfloat16


@dataclass(frozen=True)
class Convolution:
    """image: N, H, W, C; filters: O, KH, KW; planes: x is an image [N, C, H, W] in FP32, read where it lies."""

    image: tuple[int, int, int, int]
    filters: tuple[int, int, int]
    stride: int = 1
    padding: Pair = (0, 0)
    bias: bool = True
    relu: bool = False
    moments: bool = False
    planes: bool = False
    dtype: torch.dtype = torch.float16

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        n, h, w, channels = self.image
        if self.planes:
            x = multiples(setting, n, channels, h, w, most=8, seed=3).permute(0, 2, 3, 1)
        else:
            x = multiples(setting, *self.image, most=8, seed=3).to(self.dtype)
        weight = multiples(setting, *self.filters, channels, step=0.125, most=8, seed=1).to(self.dtype)
        bias = multiples(setting, self.filters[0], seed=7) if self.bias else None
        how = (x, weight, bias, (self.stride, self.stride), self.padding, self.relu)
        taps, strides = self.filters[1:], (self.stride, self.stride)
        assert small_k.supports(channels, self.filters[0], taps, strides, self.padding, deepest=fastest.DEEPEST)
        assert small_k.is_aligned(x, weight, strides, self.padding)
        with emulated(setting, outcome):
            y, moments = small_k.conv2d(*how, moments=self.moments)
        outcome.compare(y, small_k.conv2d_reference(*how))
        if moments is not None and outcome.reference:
            compare_moments(y, moments, outcome)


def not_finite(setting: Setting, outcome: Outcome) -> None:
    """Inf and NaN reach the outputs whose filter reads them and no other, also where K is padded; ReLU keeps a NaN."""
    x = multiples(setting, 1, 6, 9, 3, most=8, seed=3).half()
    x[0, 1, 2, 0], x[0, 4, 7, 2], x[0, 4, 0, 1] = float("inf"), float("nan"), float("-inf")
    weight = multiples(setting, 16, 3, 3, 3, most=8, seed=1).half()
    for relu in (False, True):
        how = (x, weight, None, (1, 1), (1, 1), relu)
        with emulated(setting, outcome):
            y, _ = small_k.conv2d(*how)
        expected = small_k.conv2d_reference(*how)
        outcome.compare(y.isnan(), expected.isnan())
        outcome.compare(y.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))


CASES = tuple(
    Case(f"small K, {name}", FAMILY, run)
    for name, run in (
        ("3 to 64 channels, moments", Convolution((1, 33, 35, 3), (64, 3, 3), 1, (1, 1), moments=True)),
        (
            "an image in planes, FP32",
            Convolution((2, 18, 40, 3), (16, 3, 3), 1, (1, 1), bias=False, relu=True, moments=True, planes=True),
        ),
        ("7x7, stride 2", Convolution((1, 37, 70, 3), (64, 7, 7), 2, (3, 3), relu=True, moments=True)),
        ("3x3, 16 channels", Convolution((1, 18, 65, 16), (32, 3, 3), 1, (1, 1), moments=True)),
        ("5 channels, 2x3, one output", Convolution((2, 7, 34, 5), (1, 2, 3), 1, (1, 0))),
        ("24 to 100 channels, 1x1", Convolution((1, 5, 37, 24), (100, 1, 1))),
        ("64 to 12 channels, 1x1", Convolution((2, 21, 31, 64), (12, 1, 1))),
        ("48 to 21 channels, 1x1", Convolution((1, 19, 23, 48), (21, 1, 1), bias=False, relu=True)),
        ("32 to 40 channels, 1x1, moments", Convolution((2, 5, 60, 32), (40, 1, 1), moments=True)),
        ("16 to 67 channels, 1x1", Convolution((1, 3, 11, 16), (67, 1, 1), bias=False)),
        ("8 to 70 channels, 3x1, stride 2", Convolution((1, 9, 9, 8), (70, 3, 1), 2, (1, 0))),
        (
            "3 to 64 channels, moments, BF16",
            Convolution((1, 33, 35, 3), (64, 3, 3), 1, (1, 1), moments=True, dtype=BF16),
        ),
        (
            "an image in planes, FP32 to BF16",
            Convolution((1, 9, 40, 3), (20, 3, 3), 2, (1, 1), relu=True, planes=True, dtype=BF16),
        ),
        ("64 to 12 channels, 1x1, BF16", Convolution((1, 21, 31, 64), (12, 1, 1), relu=True, dtype=BF16)),
        ("32 to 16 channels, 3x3, BF16", Convolution((1, 9, 33, 32), (16, 3, 3), 1, (1, 1), bias=False, dtype=BF16)),
        ("Inf and NaN", not_finite),
    )
)
