"""Cases of convolutions with decoded weights: `decoded_conv_kernel`, `split_sum_kernel`, and the moments of both.

These kernels run before SM100; they are Triton's, so that they compile for later architectures too. As in `gemms` every
partial sum is exact. Moments are sums in an order of the kernel's own: they are compared with float64. The pixels of a
tile that belong to one batch item are a power of two here, so that the mean is a product with its exact reciprocal, on
hardware too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import Sizes, conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.gemm.triton.tiles import NATIVE_FROM, Tile
from fp4deploy.plugins.quantize.statistics import Moments
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, packed
from fp4deploy_emulator.launch import emulate_triton

SMALL = decoded.SMALL
THIN = Tile(128, 16, 32, 4, 3)
NEAR = 2e-6


@dataclass(frozen=True)
class Convolution:
    """A convolution with a decoded weight. amax: of a packed output; transposed: of 2 along each axis.

    image: batch, perhaps depth, height and width; size, stride: of all axes, or of each; transposed: `size` where it
    is of each, else 2.
    """

    channels: tuple[int, ...] = (64,)
    outputs: int = 40
    size: Sizes = 3
    image: tuple[int, ...] = (1, 9, 11)
    stride: Sizes = 1
    dilation: int = 1
    splits: int = 1
    tile: Tile = SMALL
    dtype: torch.dtype = torch.float16
    transposed: bool = False
    amax: float | None = None
    moments: bool = False

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        sources = tuple(
            packed(setting, *self.image, channels, power=8 + i, seed=2 + i, binary=True)
            for i, channels in enumerate(self.channels)
        )
        axes, size = len(self.image) - 1, 2 if self.transposed and isinstance(self.size, int) else self.size
        taps = each(size, axes)
        weight = packed(setting, self.outputs, *taps, sum(self.channels), seed=1, weight=True)
        bias = multiples(setting, self.outputs, seed=7)
        amax = None if self.amax is None else torch.tensor(self.amax)
        padding = tuple(0 if self.transposed else self.dilation * (count // 2) for count in taps)

        def launch(call: Call) -> None:
            outputs = _outputs(call)
            how = (setting.arch, outputs, setting.model, setting.edit, setting.grid, setting.gpu)
            outcome.add(emulate_triton(call, *how))

        y, moments = decoded.conv2d(
            sources,
            decode_weight(weight, self.channels, self.transposed),
            bias,
            self.stride,
            padding,
            self.dilation,
            relu=True,
            dtype=self.dtype,
            out_amax=amax,
            moments=self.moments,
            transposed=self.transposed,
            chosen=decoded.Plan(self.tile, self.splits),
            launch=launch,
        )
        common = (True, self.dtype, amax, torch.float64)
        if self.transposed:
            expected = conv_transpose2d_reference(sources[0], weight, bias, *common)
        else:
            expected = conv2d_reference(sources, weight, bias, self.stride, padding, self.dilation, *common)
        if isinstance(expected, Nvfp4Tensor):
            assert isinstance(y, Nvfp4Tensor)
            outcome.compare_packed(y, expected)
        else:
            assert isinstance(y, torch.Tensor)
            outcome.compare(y, expected)
        if moments is not None and outcome.reference:
            _compare_moments(y, moments, outcome)


def _outputs(call: Call) -> list[torch.Tensor]:
    """What a launch must write whole; moments of a second batch item are written where a tile has one."""
    values = dict(zip((name for name, _ in call.launch.arguments), call.values, strict=True))
    constants = dict(call.launch.constants)
    found = [values["out"]]
    if constants["QUANTIZE"]:
        found.append(values["out_scales"])
    if constants["MOMENTS"]:
        values["moments"].fill_(float("nan"))
    return [out for out in found if isinstance(out, torch.Tensor)]


def _compare_moments(y: torch.Tensor | Nvfp4Tensor, moments: Moments, outcome: Outcome) -> None:
    """Mean and squared deviations of every part, of the rounded output, near those of float64."""
    assert isinstance(y, torch.Tensor)
    n, channels = y.shape[0], y.shape[-1]
    flat = y.double().reshape(-1, channels)
    item = torch.arange(len(flat)) // (len(flat) // n)
    near = []
    for part in range(len(moments.parts)):
        here = slice(part * moments.rows, (part + 1) * moments.rows)
        for index, number in enumerate(item[here].unique()):
            values = flat[here][item[here] == number]
            mean, square = values.mean(0), (values - values.mean(0)).square().sum(0)
            got = moments.parts[part, index].double()
            near.append((got - torch.stack([mean, square])).abs() <= NEAR * torch.stack([values.abs().amax(0), square]))
    outcome.compare(torch.stack(near).byte(), torch.ones(len(near), 2, channels, dtype=torch.uint8))


WEIGHTS, SPLIT = "decoded weights", "split-K"


def before_blackwell(capability: int) -> bool:
    """Whether networks decode weights when they are loaded."""
    return capability < NATIVE_FROM


CASES = tuple(
    Case(name, family, run, before_blackwell)
    for name, family, run in (
        ("decoded weights, 3x3", WEIGHTS, Convolution()),
        ("decoded weights, 16 channels", WEIGHTS, Convolution(channels=(16,), outputs=12, tile=THIN)),
        ("decoded weights, large tile", WEIGHTS, Convolution(channels=(128,), size=1, tile=decoded.LARGE)),
        (
            "decoded weights, two sources, stride 2",
            WEIGHTS,
            Convolution(channels=(64, 128), outputs=72, image=(2, 9, 8), stride=2),
        ),
        (
            "decoded weights, dilation 2, bfloat16",
            WEIGHTS,
            Convolution(channels=(32, 32), outputs=64, image=(1, 8, 9), dilation=2, dtype=torch.bfloat16),
        ),
        (
            "decoded weights, dilation 12, rows of padding",
            WEIGHTS,
            Convolution(image=(1, 24, 12), dilation=12),
        ),
        (
            "decoded weights, two sources, moments",
            WEIGHTS,
            Convolution(channels=(64, 64), size=1, image=(2, 12, 16), moments=True),
        ),
        ("decoded weights, transposed 2x2", WEIGHTS, Convolution(transposed=True, image=(1, 5, 7))),
        ("decoded weights, packed output", WEIGHTS, Convolution(outputs=48, amax=24.0)),
        (
            "decoded weights, volume, stride 2",
            WEIGHTS,
            Convolution(image=(2, 9, 8, 7), stride=2),
        ),
        (
            "decoded weights, volume of thick slices, two taps a step",
            WEIGHTS,
            Convolution(channels=(32, 32), image=(1, 4, 7, 6), stride=(1, 2, 2), amax=24.0, outputs=48),
        ),
        (
            "decoded weights, slices of a volume, moments",
            WEIGHTS,
            Convolution(channels=(32,), size=(1, 3, 3), image=(2, 8, 8, 4), moments=True, dtype=torch.bfloat16),
        ),
        ("decoded weights, transposed 2x2x2", WEIGHTS, Convolution(transposed=True, image=(2, 3, 5, 4))),
        (
            "decoded weights, transposed 1x2x2",
            WEIGHTS,
            Convolution(transposed=True, size=(1, 2, 2), image=(1, 3, 5, 4)),
        ),
        ("split-K, volume, moments", SPLIT, Convolution(splits=3, image=(1, 3, 6, 8), moments=True)),
        ("split-K", SPLIT, Convolution(splits=3)),
        (
            "split-K, two sources, moments",
            SPLIT,
            Convolution(channels=(64, 128), image=(2, 6, 8), splits=4, moments=True),
        ),
        ("split-K, packed output", SPLIT, Convolution(image=(1, 5, 6), splits=2, amax=24.0)),
    )
)
