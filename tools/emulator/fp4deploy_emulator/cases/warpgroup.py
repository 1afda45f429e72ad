"""Cases of convolutions by wgmma: `warpgroup_conv.cu`, on SM90 alone.

As in `gemms` every partial sum is exact, so that the order of the sum does not matter. Moments are compared with
float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.gemm.convolution import warpgroup
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, packed
from fp4deploy_emulator.cases.cuda import emulated
from fp4deploy_emulator.cases.direct import compare_moments

FAMILY = "warpgroup convolution"


@dataclass(frozen=True)
class Convolution:
    """A convolution by wgmma.

    joint, height, splits: of the variant; stages: fewer than shared memory has room for; image: batch, perhaps depth,
    height and width; amax: of a packed output; transposed: of 2 along each axis.
    """

    joint: bool
    height: int
    splits: int = 1
    stages: int | None = None
    channels: tuple[int, ...] = (64,)
    outputs: int = 64
    size: int = 3
    dilation: int = 1
    image: tuple[int, ...] = (1, 5, 11)
    dtype: torch.dtype = torch.float16
    transposed: bool = False
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
        taps = (2 if self.transposed else self.size,) * (len(self.image) - 1)
        weight = packed(setting, self.outputs, *taps, sum(self.channels), seed=1, weight=True)
        bias = multiples(setting, self.outputs, seed=7) if self.bias else None
        amax = None if self.amax is None else torch.tensor(self.amax)
        padding = (0 if self.transposed else self.size // 2 * self.dilation,) * len(taps)
        pairs = warpgroup.pairs(self.channels, self.outputs, taps, self.transposed)
        decoded = decode_weight(weight, self.channels, self.transposed, pairs)
        assert warpgroup.supports(self.channels, self.outputs, taps, 1, self.dilation, self.transposed)
        shape = warpgroup.shape_of(sources, decoded, padding, self.dilation, self.transposed, amax is not None)
        chosen = warpgroup.fitted(shape, self.joint, self.height, self.splits, 1)
        assert chosen is not None
        if self.stages is not None:
            chosen = replace(chosen, stages=self.stages, resident=False)
        with emulated(setting, outcome, (decoded.planes if decoded.pairs is None else decoded.pairs,)):
            y, scales, moments = warpgroup.conv2d(
                *(sources, decoded, bias, padding, self.dilation, self.relu, self.dtype, amax),
                *(self.moments, self.transposed, chosen),
            )
        common = (self.relu, self.dtype, amax, torch.float64)
        if self.transposed:
            expected = conv_transpose2d_reference(sources[0], weight, bias, *common)
        else:
            expected = conv2d_reference(sources, weight, bias, 1, padding, self.dilation, *common)
        if isinstance(expected, Nvfp4Tensor):
            assert scales is not None
            outcome.compare(y, expected.codes)
            outcome.compare(scales, expected.scales.view(torch.uint8))
            return
        outcome.compare(y.sum(0).to(self.dtype) if self.splits > 1 else y, expected)
        if moments is not None and outcome.reference:
            compare_moments(y, moments, outcome)


CASES = tuple(
    Case(f"warpgroup convolution, {name}", FAMILY, run, lambda capability: capability == warpgroup.SM)
    for name, run in (
        ("joint, moments", Convolution(True, 8, outputs=128, image=(2, 9, 11), moments=True, stages=3)),
        ("two sources", Convolution(False, 4, channels=(128, 64), image=(1, 6, 19), relu=False, stages=4)),
        ("all weights stay", Convolution(False, 4, image=(1, 9, 9), moments=True, dtype=torch.bfloat16)),
        ("divided channels", Convolution(True, 4, 2, channels=(64, 128), outputs=128, image=(2, 4, 9), bias=False,
                                         relu=False)),
        ("1x1, packed output", Convolution(True, 12, outputs=128, size=1, channels=(128,), amax=24.0)),
        ("1x1, two sources", Convolution(True, 20, outputs=128, size=1, channels=(192, 64), image=(1, 21, 9))),
        ("dilation 2, packed output", Convolution(False, 8, dilation=2, image=(1, 8, 17), amax=24.0)),
        ("transposed 2x2", Convolution(False, 8, channels=(128,), transposed=True, image=(1, 5, 20))),
        ("transposed, packed output", Convolution(True, 4, outputs=128, transposed=True, image=(2, 3, 5), amax=24.0)),
        ("height 24, moments", Convolution(True, 24, outputs=128, size=1, image=(1, 25, 9), moments=True)),
        ("volume, moments", Convolution(True, 4, outputs=128, image=(2, 2, 5, 9), moments=True, stages=5)),
        ("volume, two sources, divided", Convolution(False, 4, 2, channels=(64, 128), image=(1, 4, 4, 17),
                                                     bias=False, relu=False)),
        ("pairs of slices", Convolution(False, 4, channels=(32,), outputs=32, image=(2, 5, 6, 9), moments=True)),
        ("pairs, two sources, packed", Convolution(False, 8, channels=(32, 32), outputs=32, image=(1, 3, 9, 5),
                                                   amax=24.0, stages=6)),
        ("pairs of inputs", Convolution(False, 4, channels=(96,), image=(1, 4, 3, 7), dtype=torch.bfloat16)),
        ("pairs of outputs", Convolution(False, 4, outputs=96, image=(1, 3, 5, 8), moments=True, relu=False)),
        ("transposed 2x2x2", Convolution(True, 4, outputs=128, transposed=True, image=(2, 2, 3, 5))),
        ("transposed, pairs, packed", Convolution(False, 4, outputs=32, transposed=True, image=(1, 3, 5, 9),
                                                  amax=24.0)),
    )
)  # fmt: skip
