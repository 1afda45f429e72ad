"""The shipped kernels on small tensors, and what the reference says must come out.

A case runs the host code that launches a kernel, executes the PTX that the compiler made for an architecture, and
compares every byte of the outputs with `formats` and `plugins.gemm.reference`. The tensors are chosen so that every
partial sum is exact: global scales are powers of two, and magnitudes are close enough to each other. Then the order of
the sum and the rounding of the accumulator change nothing, and there is one right answer. (What they change otherwise
is shown in docs/numerics.md.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.graph.sizes import each
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.gemm.arguments import gemm_call, weight_only_call
from fp4deploy.plugins.gemm.reference import (
    Sizes,
    conv2d_reference,
    conv_transpose2d_reference,
    matmul_reference,
    output_sizes,
)
from fp4deploy_emulator.cases.case import Case, Outcome, Setting, multiples, packed
from fp4deploy_emulator.launch import emulate_triton

HALF, BFLOAT = torch.float16, torch.bfloat16


def _emulate(setting: Setting, outcome: Outcome, call: Call, outputs: Sequence[torch.Tensor]) -> None:
    outcome.add(emulate_triton(call, setting.arch, outputs, setting.model, setting.edit, setting.grid, setting.gpu))


@dataclass(frozen=True)
class Operands:
    """Tensors of a GEMM; `amax` and `scales` of a packed output."""

    sources: tuple[Nvfp4Tensor, ...]
    weight: Nvfp4Tensor
    bias: torch.Tensor | None
    amax: torch.Tensor | None
    out: torch.Tensor
    scales: torch.Tensor | None

    @property
    def outputs(self) -> list[torch.Tensor]:
        """What the kernel writes."""
        return [self.out] if self.scales is None else [self.out, self.scales]


@dataclass(frozen=True)
class Gemm:
    """A linear layer or convolution; `size` = 0 is linear, of all rows of the image. amax: of a packed output.

    image: batch, perhaps depth, height and width; size, stride, padding: of all axes, or of each.
    """

    channels: tuple[int, ...] = (64,)
    outputs: int = 40
    size: Sizes = 3
    image: tuple[int, ...] = (1, 9, 11)
    stride: Sizes = 1
    padding: Sizes = 1
    dilation: int = 1
    relu: bool = True
    bias: bool = True
    dtype: torch.dtype = HALF
    transposed: bool = False
    amax: float | None = None

    @property
    def taps(self) -> tuple[int, ...]:
        """Of the filter, along each axis."""
        return each(self.size, len(self.image) - 1)

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        sources = tuple(packed(setting, *self.image, c, power=8 + i, seed=2 + i) for i, c in enumerate(self.channels))
        taps = self.taps if self.size else ()
        weight = packed(setting, self.outputs, *taps, sum(self.channels), seed=1, weight=True)
        bias = multiples(setting, self.outputs, seed=7) if self.bias else None
        amax = None if self.amax is None else torch.tensor(self.amax)
        expected = self._expected(sources, weight, bias, amax)
        out, scales = _output(expected, self.dtype)
        self.launch(setting, outcome, Operands(sources, weight, bias, amax, out, scales))
        if isinstance(expected, Nvfp4Tensor):
            assert scales is not None
            outcome.compare(out, expected.codes)
            outcome.compare(scales, expected.scales.view(torch.uint8))
        else:
            outcome.compare(out, expected)

    def launch(self, setting: Setting, outcome: Outcome, of: Operands) -> None:
        """As the operators do."""
        extent, pixels = self.image, self.image
        geometry: dict[str, Any] = {}
        if not self.size:
            extent = pixels = (1, 1, math.prod(self.image))
        elif self.transposed:
            geometry = {"transposed": True, "taps": (1,) * len(self.taps)}
        else:
            sizes = output_sizes(self.image[1:], self.taps, self.stride, self.padding, self.dilation)
            pixels = (self.image[0], *sizes)
            geometry = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "taps": self.taps}
        call = gemm_call(
            *(of.sources, of.weight, of.bias, extent, pixels, of.out, of.scales, of.amax, self.dtype),
            setting.capability,
            relu=self.relu,
            **geometry,
        )
        _emulate(setting, outcome, call, of.outputs)

    def _expected(
        self,
        sources: tuple[Nvfp4Tensor, ...],
        weight: Nvfp4Tensor,
        bias: torch.Tensor | None,
        amax: torch.Tensor | None,
    ) -> torch.Tensor | Nvfp4Tensor:
        common: dict[str, Any] = {
            "bias": bias,
            "relu": self.relu,
            "dtype": self.dtype,
            "out_amax": amax,
            "accumulate": torch.float64,
        }
        if not self.size:
            return matmul_reference(sources[0], weight, **common)
        if self.transposed:
            return conv_transpose2d_reference(sources[0], weight, **common)
        geometry: dict[str, Any] = {"stride": self.stride, "padding": self.padding, "dilation": self.dilation}
        return conv2d_reference(sources, weight, **geometry, **common)


def _output(expected: torch.Tensor | Nvfp4Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    if isinstance(expected, Nvfp4Tensor):
        return torch.empty_like(expected.codes), torch.empty(expected.scales.shape, dtype=torch.uint8)
    return torch.empty(expected.shape, dtype=dtype), None


@dataclass(frozen=True)
class WeightOnly:
    """Activations in 16 bits, weight in NVFP4 (W4A16)."""

    rows: int
    k: int
    outputs: int = 40
    dtype: torch.dtype = HALF

    def __call__(self, setting: Setting, outcome: Outcome) -> None:
        """Launch, execute, compare."""
        x = multiples(setting, self.rows, self.k, most=8, seed=3).to(self.dtype)
        weight, bias = (
            packed(setting, self.outputs, self.k, seed=1, weight=True),
            multiples(setting, self.outputs, seed=7),
        )
        out = torch.empty(self.rows, self.outputs, dtype=self.dtype)
        _emulate(setting, outcome, weight_only_call(x, weight, bias, out, setting.capability, True), [out])
        expected = matmul_reference(x, weight, bias, True, self.dtype, accumulate=torch.float64)
        assert isinstance(expected, torch.Tensor)
        outcome.compare(out, expected)


CASES = (
    Case("linear", "linear", Gemm(size=0, image=(1, 1, 70), channels=(192,))),
    Case("linear, K of no whole step", "linear", Gemm(size=0, image=(1, 1, 33), channels=(72,), bias=False)),
    Case("linear, bfloat16", "linear", Gemm(size=0, image=(1, 1, 20), channels=(128,), dtype=BFLOAT, outputs=17)),
    Case("conv 3x3", "conv", Gemm()),
    Case("conv 3x3, stride 2", "conv", Gemm(stride=2, image=(2, 9, 8), channels=(48,), relu=False)),
    Case("conv 3x3, dilation 2", "conv", Gemm(dilation=2, padding=2, image=(1, 8, 9), channels=(128,))),
    Case("conv 3x3, two blocks along M and N", "conv", Gemm(image=(1, 12, 12), outputs=72, channels=(32,))),
    Case("conv 3x3, 16 channels", "several taps", Gemm(channels=(16,))),
    Case("conv 3x3, 32 channels, 128 pixels", "several taps", Gemm(channels=(32,), image=(1, 10, 13))),
    Case("conv 3x3, two sources", "two sources", Gemm(channels=(64, 64))),
    Case("conv 3x3, two sources of different depth", "two sources", Gemm(channels=(32, 80))),
    Case("transposed 2x2", "transposed", Gemm(transposed=True, size=2, image=(1, 5, 7))),
    Case(
        "transposed 2x2, 24 outputs",
        "transposed",
        Gemm(transposed=True, size=2, image=(1, 3, 4), outputs=24, channels=(96,)),
    ),
    Case("conv 3x3, packed output", "packed output", Gemm(amax=24.0)),
    Case("linear, packed output", "packed output", Gemm(size=0, image=(1, 1, 40), amax=30.0, channels=(64,))),
    Case("transposed 2x2, packed output", "packed output", Gemm(transposed=True, size=2, image=(1, 4, 4), amax=9.0)),
    Case("conv 3x3x3", "volumes", Gemm(image=(1, 3, 4, 5))),
    Case("conv 3x3x3, 16 channels", "volumes", Gemm(image=(2, 2, 4, 3), channels=(16,), outputs=17)),
    Case("conv 3x3x3, 20 channels, stride 2", "volumes", Gemm(image=(1, 5, 4, 3), channels=(20,), stride=2)),
    Case("conv 3x3x3, depth 1, two sources", "volumes", Gemm(image=(2, 1, 5, 6), channels=(32, 32), relu=False)),
    Case("conv 3x3x3, one voxel, packed output", "volumes", Gemm(image=(1, 1, 1, 1), outputs=33, amax=24.0)),
    Case(
        "conv 3x3x3, stride 2x1x2, two sources of different depth",
        "volumes",
        Gemm(image=(1, 3, 3, 5), channels=(32, 80), stride=(2, 1, 2)),
    ),
    Case("conv 1x3x3, a batch of planes", "volumes", Gemm(image=(2, 3, 5, 4), size=(1, 3, 3), padding=(0, 1, 1))),
    Case(
        "conv 1x3x3, stride 1x2x2, packed output",
        "volumes",
        Gemm(image=(1, 3, 5, 7), size=(1, 3, 3), padding=(0, 1, 1), stride=(1, 2, 2), amax=12.0),
    ),
    Case(
        "conv 1x3x3, stride 2x2x1",
        "volumes",
        Gemm(image=(2, 5, 6, 5), size=(1, 3, 3), padding=(0, 1, 1), stride=(2, 2, 1), channels=(48,)),
    ),
    Case("conv 3x1x1", "volumes", Gemm(image=(1, 4, 3, 5), size=(3, 1, 1), padding=(1, 0, 0), dtype=BFLOAT)),
    Case("conv 1x1x1, stride 2", "volumes", Gemm(image=(2, 3, 5, 5), size=1, padding=0, stride=2, bias=False)),
    Case("conv 3x1, stride 2x1", "volumes", Gemm(image=(2, 7, 6), size=(3, 1), padding=(1, 0), stride=(2, 1))),
    Case("transposed 2x2x2", "volumes", Gemm(transposed=True, size=2, image=(2, 2, 3, 4), outputs=24)),
    Case(
        "transposed 1x2x2, packed output",
        "volumes",
        Gemm(transposed=True, size=(1, 2, 2), image=(1, 3, 3, 3), amax=9.0),
    ),
    Case(
        "transposed 2x1x2",
        "volumes",
        Gemm(transposed=True, size=(2, 1, 2), image=(1, 3, 2, 5), channels=(17,), outputs=5),
    ),
    Case("W4A16, 1 row", "W4A16", WeightOnly(1, 512)),
    Case("W4A16, 100 rows", "W4A16", WeightOnly(100, 96, dtype=BFLOAT)),
    Case("W4A16, K = 36", "W4A16", WeightOnly(3, 36)),
)
