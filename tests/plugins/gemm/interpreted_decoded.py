"""Decoded-weight kernels in Triton's interpreter (`tests.plugins.interpreter`): how each case compares with float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from unittest import mock

import torch

from fp4deploy.formats import Nvfp4Tensor, quantize_nvfp4
from fp4deploy.plugins.gemm.arguments import just_in_time
from fp4deploy.plugins.gemm.convolution import decoded
from fp4deploy.plugins.gemm.convolution.decoded_weight import decode_weight
from fp4deploy.plugins.gemm.reference import conv2d_reference, conv_transpose2d_reference
from fp4deploy.plugins.gemm.triton.tiles import Tile
from fp4deploy.plugins.quantize.statistics import Moments

TINY = Tile(32, 32, 32, 4, 1)


@dataclass(frozen=True)
class Case:
    """A convolution of one or two feature maps or volumes."""

    size: tuple[int, ...]
    channels: tuple[int, ...]
    outputs: int
    k: int = 3
    stride: int = 1
    padding: int = 1
    dilation: int = 1
    splits: int = 1
    packed: bool = False
    transposed: bool = False
    moments: bool = True
    tile: Tile = TINY


CASES = {
    "one source": Case((1, 6, 7), (64,), 48),
    "two sources": Case((1, 6, 7), (64, 128), 32),
    "two batch items in a tile": Case((2, 6, 7), (64,), 32),
    "four taps a step": Case((1, 6, 7), (16,), 20),
    "two taps a step, two sources": Case((2, 8, 8), (32, 32), 32),
    "stride and dilation": Case((1, 13, 12), (64,), 32, stride=2, padding=2, dilation=2),
    "rows of padding": Case((2, 20, 9), (64,), 32, padding=8, dilation=8),
    "rows of padding, stride": Case((1, 27, 13), (64,), 32, stride=2, padding=12, dilation=12),
    "rows of padding, splits of two sources": Case((2, 17, 9), (64, 128), 32, padding=7, dilation=7, splits=4),
    "1x1": Case((1, 8, 8), (128,), 32, k=1, padding=0),
    "step of 64 bytes": Case((1, 6, 7), (128,), 32, tile=Tile(32, 32, 64, 4, 1)),
    "packed output": Case((1, 6, 7), (64,), 48, k=1, padding=0, packed=True, moments=False),
    "transposed": Case((2, 4, 5), (64,), 32, k=2, padding=0, transposed=True, moments=False),
    "transposed, packed": Case((1, 4, 5), (64,), 32, k=2, padding=0, transposed=True, packed=True, moments=False),
    "three splits": Case((1, 6, 7), (64,), 48, splits=3),
    "splits of two sources": Case((2, 6, 7), (64, 128), 32, splits=4),
    "more splits than steps of a source": Case((1, 8, 8), (32, 32), 32, splits=7),
    "volumes": Case((2, 3, 4, 5), (64,), 48),
    "volumes, four taps a step, splits": Case((1, 4, 4, 4), (16,), 20, splits=2),
    "volumes, transposed, packed": Case(
        (1, 2, 3, 4), (64,), 32, k=2, padding=0, transposed=True, packed=True, moments=False
    ),
    "splits, packed output": Case((1, 6, 7), (128,), 48, k=1, padding=0, splits=2, packed=True, moments=False),
}


def run(case: Case) -> dict[str, float]:
    """Errors of output, moments and packed bytes; bias and ReLU in every case."""
    torch.manual_seed(0)
    sources = tuple(
        quantize_nvfp4(torch.randn(*case.size, c) * scale, amax=torch.tensor(amax))
        for c, scale, amax in zip(case.channels, (1.0, 3.0), (4.0, 9.0), strict=False)
    )
    taps = (case.k,) * (len(case.size) - 1)
    weight = quantize_nvfp4(torch.randn(case.outputs, *taps, sum(case.channels)))
    bias, amax = torch.randn(case.outputs), torch.tensor(9.0) if case.packed else None
    if case.transposed:
        exact = conv_transpose2d_reference(sources[0], weight, bias, True, torch.float64, None, torch.float64)
    else:
        geometry = (case.stride, case.padding, case.dilation)
        exact = conv2d_reference(sources, weight, bias, *geometry, True, torch.float64, None, torch.float64)
    assert isinstance(exact, torch.Tensor)
    calls = []
    found, moments = decoded.conv2d(
        sources, decode_weight(weight, case.channels, case.transposed), bias, case.stride, case.padding, case.dilation,
        True, torch.float16, amax, case.moments, case.transposed, decoded.Plan(case.tile, case.splits),
        launch=lambda call: calls.append(just_in_time(call)), asm=False,
    )  # fmt: skip
    result = {"launches": len(calls), "error": 0.0, "differing": 0, "moments": 0.0}
    if isinstance(found, Nvfp4Tensor):
        plain, _ = decoded.conv2d(
            sources, decode_weight(weight, case.channels, case.transposed), bias, case.stride, case.padding,
            case.dilation, True, torch.float16, None, False, case.transposed, decoded.Plan(case.tile, case.splits),
            launch=just_in_time, asm=False,
        )  # fmt: skip
        expected = quantize_nvfp4(plain, amax=amax)
        bytes_ = ((found.codes, expected.codes), (found.scales, expected.scales))
        result["differing"] = sum(int((a.view(torch.uint8) != b.view(torch.uint8)).sum()) for a, b in bytes_)
        found = plain
    if case.dilation > 2:  # rows of padding are left out; with them there are the same bits
        with mock.patch.object(decoded, "leaves_out_rows", return_value=False):
            whole, _ = decoded.conv2d(
                sources, decode_weight(weight, case.channels), bias, case.stride, case.padding, case.dilation, True,
                chosen=decoded.Plan(case.tile, case.splits), launch=just_in_time, asm=False,
            )  # fmt: skip
        assert decoded.leaves_out_rows(case.tile, (case.k, case.k), found.shape[2], case.dilation)
        result["differing"] = int((whole != found).sum())
    result["error"] = float((found.double() - exact).norm() / exact.norm())
    if case.moments:
        result["moments"] = moments_error(found, moments)
    return result


def moments_error(y: torch.Tensor, moments: Moments | None) -> float:
    """Largest difference of the combined moments from those of the feature map itself, relative to its deviation."""
    if moments is None:
        return math.inf
    n, pixels, channels = y.shape[0], math.prod(y.shape[1:-1]), y.shape[-1]
    flat = y.reshape(n, pixels, channels).double()
    worst = 0.0
    for item in range(n):
        total, square = torch.zeros(channels).double(), torch.zeros(channels).double()
        first, last = item * pixels // moments.rows, ((item + 1) * pixels - 1) // moments.rows
        for tile in range(first, last + 1):
            low, high = max(tile * moments.rows, item * pixels), min((tile + 1) * moments.rows, (item + 1) * pixels)
            mean, deviation = moments.parts[tile, item - tile * moments.rows // pixels].double()
            total += (high - low) * mean
            square += deviation + (high - low) * mean * mean
        mean = total / pixels
        variance = square / pixels - mean * mean
        exact = flat[item].var(0, correction=0)
        worst = max(worst, float(((mean - flat[item].mean(0)).abs() / exact.sqrt()).max()))
        worst = max(worst, float(((variance - exact).abs() / exact).max()))
    return worst


def results() -> dict[str, dict[str, float]]:
    """What was found in every case."""
    return {name: run(case) for name, case in CASES.items()}
