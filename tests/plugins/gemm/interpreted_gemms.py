"""The GEMM kernels in Triton's interpreter (`tests.plugins.interpreter`): how each case compares with float64.

Every output lies between guards, and both are poisoned: an element that is not written, or is written where it should
not be, shows. The interpreter's time is that of steps of K, however large: cases of the epilogue have one step, and
cases of the main loop have no packed output.

The interpreter cannot multiply bfloat16 matrices and truncates what it converts to bfloat16; weight-only GEMMs of
that type are tested on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fp4deploy.formats import FourOverSix, Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.arguments import gemm_call, just_in_time, weight_only_call
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference, matmul_reference
from fp4deploy.plugins.gemm.triton.tiles import MIDDLE, SMALL, SMALL_M, TALL, Tile

GUARD = 512
TINY = Tile(32, 32, 32, 4, 1)  # several tiles even for small outputs
DEPTH = Tile(32, 64, 64, 4, 1)
SM90 = 90
AMAXES = (9.0,)
MANY_AMAXES = (9.0, 0.3, 1e4, 0.0, 1e-38, 3e38)  # others are refused


@dataclass(frozen=True)
class Conv:
    """A convolution of feature maps of the given size, `channels` for each source."""

    size: tuple[int, int, int]
    channels: tuple[int, ...]
    outputs: int
    k: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    bias: bool = True
    relu: bool = True
    dtype: torch.dtype = torch.float16
    tile: Tile = TINY
    scales: tuple[float, ...] = (1.0, 3.0)  # of the sources
    amax: tuple[float | None, ...] = (None, None)  # of the sources, None is their own
    weight: dict[str, Any] = field(default_factory=dict)
    out_amax: tuple[float, ...] = ()  # of packed outputs


ONE = {"k": 1, "padding": 0}
CONVOLUTIONS = {
    "one block, many amax": Conv((1, 3, 5), (16,), 16, **ONE, out_amax=MANY_AMAXES),
    "channels 3": Conv((2, 6, 5), (3,), 20, bias=False, relu=False),
    "channels 13, digits": Conv((1, 5, 6), (13,), 33, amax=(6.0, None), bias=False, relu=False, out_amax=AMAXES),
    "channels 17": Conv((2, 6, 5), (17,), 20, stride=2),
    "channels 20, 33 outputs": Conv((1, 6, 8), (20,), 33, **ONE, relu=False, out_amax=(9.0, 0.0)),
    "channels 80": Conv((1, 5, 6), (80,), 17, bias=False),
    "channels 64 and 64": Conv((2, 3, 4), (64, 64), 40, k=2),
    "channels 16 and 16, four taps a step": Conv((2, 5, 4), (16, 16), 24),
    "channels 32 and 32, two taps a step": Conv((1, 6, 7), (32, 32), 20, stride=2, dilation=2, padding=2),
    "channels 16, dilation 2": Conv((1, 9, 8), (16,), 20, padding=2, dilation=2, relu=False),
    "channels 32, even size": Conv((1, 6, 8), (32,), 33, k=2, padding=1),
    "no padding": Conv((1, 7, 8), (32,), 24, padding=0, relu=False),
    "padding beyond the filter": Conv((1, 3, 3), (16,), 8, padding=4),
    "dilation 2": Conv((1, 6, 5), (48,), 20, k=5, padding=4, dilation=2),
    "stride and dilation 2": Conv((2, 9, 11), (32,), 16, stride=2, padding=2, dilation=2),
    "stride 3 of a 1x1 filter": Conv((3, 7, 8), (32,), 50, k=1, stride=3, padding=0),
    "7x7": Conv((1, 5, 6), (16,), 5, k=7, padding=3),
    "one pixel": Conv((1, 1, 1), (64,), 10, **ONE, out_amax=AMAXES),
    "one pixel, 3x3": Conv((1, 1, 1), (20,), 10),
    "one output channel": Conv((1, 4, 4), (16,), 1, out_amax=AMAXES),
    "two sources with a tail": Conv((2, 4, 4), (16, 20), 40, k=2, out_amax=AMAXES),
    "two sources, the second small": Conv((1, 4, 5), (32, 16), 16, **ONE, scales=(1.0, 1e-6)),
    "two sources, the first small": Conv((1, 4, 5), (32, 16), 16, **ONE, scales=(1e-6, 1.0)),
    "first source zero": Conv((1, 4, 5), (32, 32), 16, **ONE, scales=(0.0, 1.0)),
    "second source zero": Conv((1, 4, 5), (32, 32), 16, **ONE, scales=(1.0, 0.0)),
    "both sources zero": Conv((1, 4, 5), (32, 32), 16, **ONE, scales=(0.0, 0.0), out_amax=AMAXES),
    "second amax nearly zero": Conv((1, 4, 5), (32, 32), 16, **ONE, scales=(1.0, 0.0), amax=(None, 1e-30)),
    "saturated": Conv((1, 5, 5), (32,), 16, **ONE, amax=(0.5, None)),
    "4/6 weights": Conv((1, 5, 5), (32,), 16, **ONE, weight={"four_over_six": FourOverSix()}),
    "bfloat16": Conv((1, 5, 7), (40,), 37, **ONE, dtype=torch.bfloat16, out_amax=AMAXES),
    "its own tile": Conv((2, 9, 9), (64,), 70, k=2, tile=MIDDLE),
    "small tile": Conv((1, 9, 9), (48,), 65, k=2, tile=SMALL, out_amax=AMAXES),
    "deep tile": Conv((1, 5, 9), (160,), 33, k=2, tile=DEPTH),
}
TRANSPOSED = {
    "up, channels 40 to 21": ((2, 3, 5), 40, 21, torch.float16),
    "up, channels 64 to 32": ((1, 4, 3), 64, 32, torch.float16),
    "up, channels 17 to 1": ((1, 1, 1), 17, 1, torch.float16),
    "up, channels 32 to 48, bfloat16": ((3, 2, 2), 32, 48, torch.bfloat16),
}
MATRICES = {
    "matmul 1 x 16 x 1": (1, 16, 1),
    "matmul 3 x 17 x 5": (3, 17, 5),
    "matmul 70 x 100 x 33": (70, 100, 33),
    "matmul 33 x 256 x 64": (33, 256, 64),
}
ROWS = {
    f"weight-only {m} x {k} x {n}, {'few' if tile is SMALL_M else 'many'} rows": (m, k, n, tile)
    for m, k, n, tile in ((1, 16, 1, SMALL_M), (3, 100, 70, SMALL_M), (17, 256, 64, SMALL_M), (70, 100, 33, TALL))
}
BROKEN = "a NaN block"


def names() -> list[str]:
    return [*CONVOLUTIONS, *TRANSPOSED, *MATRICES, *ROWS, BROKEN]


class Guarded:
    """An output between guards, all of it poisoned."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        count = math.prod(shape)
        self.poison = math.nan if dtype.is_floating_point else 77
        self.whole = torch.full((count + 2 * GUARD,), self.poison, dtype=dtype)
        self.inner = self.whole[GUARD : GUARD + count].view(shape)

    def intact(self) -> bool:
        guards = torch.cat([self.whole[:GUARD], self.whole[-GUARD:]])
        return bool(guards.isnan().all() if guards.is_floating_point() else (guards == self.poison).all())


def results() -> dict[str, dict[str, Any]]:
    """What was found in every case."""
    found = {name: convolution(case) for name, case in CONVOLUTIONS.items()}
    found |= {name: transposed(*case) for name, case in TRANSPOSED.items()}
    found |= {name: matrix(*case) for name, case in MATRICES.items()}
    found |= {name: weight_only(*case) for name, case in ROWS.items()}
    return found | {BROKEN: broken()}


def convolution(case: Conv) -> dict[str, Any]:
    torch.manual_seed(0)
    sources = tuple(
        quantize_nvfp4(scale * torch.randn(*case.size, channels), amax=amax)
        for channels, scale, amax in zip(case.channels, case.scales, case.amax, strict=False)
    )
    weight = quantize_nvfp4(torch.randn(case.outputs, case.k, case.k, sum(case.channels)), **case.weight)
    bias = torch.randn(case.outputs) if case.bias else None
    geometry = {"stride": case.stride, "padding": case.padding, "dilation": case.dilation, "relu": case.relu}
    expected = conv2d_reference(sources, weight, bias, dtype=torch.float64, accumulate=torch.float64, **geometry)
    assert isinstance(expected, torch.Tensor)
    pixels = (case.size[0], expected.shape[1], expected.shape[2])

    def run(out: torch.Tensor, scales: torch.Tensor | None, amax: torch.Tensor | None) -> None:
        options = {**geometry, "taps": (case.k, case.k), "tile": case.tile, "asm": False}
        just_in_time(
            gemm_call(sources, weight, bias, case.size, pixels, out, scales, amax, case.dtype, SM90, **options)
        )

    return compare(run, expected, case.dtype, case.out_amax)


def transposed(size: tuple[int, int, int], channels: int, outputs: int, dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    source = quantize_nvfp4(torch.randn(*size, channels))
    weight, bias = quantize_nvfp4(torch.randn(outputs, 2, 2, channels)), torch.randn(outputs)
    expected = conv_transpose2d_reference(source, weight, bias, dtype=torch.float64, accumulate=torch.float64)
    assert isinstance(expected, torch.Tensor)

    def run(out: torch.Tensor, scales: torch.Tensor | None, amax: torch.Tensor | None) -> None:
        arguments = ((source,), weight, bias, size, size, out, scales, amax, dtype, SM90)
        just_in_time(gemm_call(*arguments, transposed=True, tile=TINY, asm=False))

    return compare(run, expected, dtype, AMAXES)


def matrix(m: int, k: int, n: int) -> dict[str, Any]:
    torch.manual_seed(0)
    a, b, bias = quantize_nvfp4(torch.randn(m, k)), quantize_nvfp4(torch.randn(n, k)), torch.randn(n)
    expected = matmul_reference(a, b, bias, dtype=torch.float64, accumulate=torch.float64)
    assert isinstance(expected, torch.Tensor)

    def run(out: torch.Tensor, scales: torch.Tensor | None, amax: torch.Tensor | None) -> None:
        arguments = ((a,), b, bias, (1, 1, m), (1, 1, m), out, scales, amax, torch.float16, SM90)
        just_in_time(gemm_call(*arguments, tile=TINY, asm=False))

    return compare(run, expected, torch.float16, AMAXES)


def weight_only(m: int, k: int, n: int, tile: Tile) -> dict[str, Any]:
    torch.manual_seed(0)
    x, b, bias = torch.randn(m, k).half(), quantize_nvfp4(torch.randn(n, k)), torch.randn(n)
    expected = matmul_reference(x, b, bias, relu=True, dtype=torch.float64, accumulate=torch.float64)
    assert isinstance(expected, torch.Tensor)

    def run(out: torch.Tensor, scales: torch.Tensor | None, amax: torch.Tensor | None) -> None:
        just_in_time(weight_only_call(x, b, bias, out, SM90, relu=True, tile=tile, asm=False))

    return compare(run, expected, torch.float16, ())


def broken() -> dict[str, Any]:
    """A NaN in one element breaks the pixels whose window holds it, and no other."""
    torch.manual_seed(0)
    x = torch.randn(1, 6, 7, 32)
    x[0, 3, 3, 5] = math.nan
    source, weight = quantize_nvfp4(x), quantize_nvfp4(torch.randn(16, 3, 3, 32))
    out = Guarded((1, 6, 7, 16), torch.float16)
    codes, scales = Guarded((1, 6, 7, 8), torch.uint8), Guarded((1, 6, 7, 1), torch.uint8)
    for target, target_scales, amax in ((out.inner, None, None), (codes.inner, scales.inner, torch.tensor(50.0))):
        arguments = ((source,), weight, None, (1, 6, 7), (1, 6, 7), target, target_scales, amax, torch.float16, SM90)
        just_in_time(gemm_call(*arguments, taps=(3, 3), padding=1, relu=True, tile=TINY, asm=False))
    window = torch.zeros(6, 7, dtype=torch.bool)
    window[2:5, 2:5] = True
    return {
        "error": 0.0 if torch.equal(out.inner.isnan().any(-1)[0], window) else math.inf,
        "intact": out.intact() and codes.intact() and scales.intact(),
        "differing": differing(out.inner, codes.inner, scales.inner, torch.tensor(50.0)),
    }


def compare(
    run: Callable[..., None], expected: torch.Tensor, dtype: torch.dtype, amaxes: tuple[float, ...]
) -> dict[str, Any]:
    """The relative error of the plain output, and the bytes of packed ones that differ from quantising it."""
    out = Guarded(tuple(expected.shape), dtype)
    run(out.inner, None, None)
    norm = expected.norm()
    error = (out.inner.double() - expected).norm() / (norm if norm else 1.0)
    found: dict[str, Any] = {"error": float(error), "intact": out.intact(), "differing": 0}
    blocks = -(-expected.shape[-1] // 16)
    for value in amaxes:
        codes = Guarded((*expected.shape[:-1], 8 * blocks), torch.uint8)
        scales = Guarded((*expected.shape[:-1], blocks), torch.uint8)
        amax = torch.tensor(value)
        run(codes.inner, scales.inner, amax)
        found["intact"] &= codes.intact() and scales.intact()
        found["differing"] += differing(out.inner, codes.inner, scales.inner, amax)
    return found


def differing(plain: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, amax: torch.Tensor) -> int:
    """How many bytes differ from those of quantising `plain`."""
    expected: Nvfp4Tensor = quantize_nvfp4(plain, amax=amax)
    return int((codes != expected.codes).sum() + (scales != expected.scales.view(torch.uint8)).sum())
