"""Every Triton GEMM kernel that can be launched on an architecture, for ahead-of-time (AOT) compilation.

A variant is a tile and what else changes the code: dtype, epilogue, taps, sources, and whether a row is whole steps of
the tile. The list covers what networks use: filters of 1, 3, 5 and 7, with and without bias and ReLU, and over volumes
those of 1x1x1, 1x3x3 and 3x3x3, in float16.
"""

from __future__ import annotations

import math
from itertools import product

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.arguments import gemm_call, weight_only_call
from fp4deploy.plugins.gemm.triton.tiles import tiles

DTYPES = (torch.float16, torch.bfloat16)
SIZES, BOOLS = (1, 3, 5, 7), (False, True)
SIZE = 8  # of an image, along each axis
VOLUMES = ((3, 3, 3), (1, 3, 3), (1, 1, 1))  # filters
VOLUME_STRIDE = (2, 1, 1)  # along the depth alone: without one filters of depth 1 are those of images
# Whole steps of every tile, of tiles with a small BK, of none; unaligned rows; two and four taps a step.
CHANNELS = (256, 64, 96, 48, 32, 16)


Shape = tuple[tuple[Nvfp4Tensor, ...], Nvfp4Tensor, bool]


def all_variants(arch: str) -> list[Launch]:
    """The launches of an architecture such as "sm_90", each once."""
    capability = Architecture.parse(arch).number
    found: dict[Launch, None] = {}
    for launch in (*_gemms(capability), *_weight_only(capability), *_volumes(capability)):
        found.setdefault(launch)
    return list(found)


def _gemms(capability: int) -> list[Launch]:
    launches = []
    facts = product(product(DTYPES, CHANNELS, SIZES), product(BOOLS, BOOLS, BOOLS))
    for (dtype, channels, size), (bias, relu, packed) in facts:
        if size > 3 and (relu or packed or dtype != torch.float16):
            continue
        x, taps = _feature_map(channels), (size, size)
        shapes: list[Shape] = [((x,), _filter(channels, taps), False)]
        if size == 3:
            shapes.append(((x, x), _filter(2 * channels, taps), False))
        if size == 1:
            shapes.append(((x,), _filter(channels, (2, 2)), True))
        for shape in shapes:
            launches += of_shape(shape, dtype, bias, relu, packed, capability)
    return launches


def _volumes(capability: int) -> list[Launch]:
    launches = []
    for channels, (bias, relu, packed) in product(CHANNELS, product(BOOLS, BOOLS, BOOLS)):
        x = _feature_map(channels)
        shapes: list[Shape] = [((x,), _filter(channels, taps), False) for taps in VOLUMES]
        shapes.append(((x, x), _filter(2 * channels, VOLUMES[0]), False))
        shapes.append(((x,), _filter(channels, (2, 2, 2)), True))
        for shape in shapes:
            launches += of_shape(shape, torch.float16, bias, relu, packed, capability, VOLUME_STRIDE)
    return launches


def of_shape(
    shape: Shape,
    dtype: torch.dtype,
    bias: bool,
    relu: bool,
    packed: bool,
    capability: int,
    stride: int | tuple[int, ...] = 1,
    padding: int | tuple[int, ...] = 0,
) -> list[Launch]:
    """With each tile that is chosen for these sources and this filter."""
    sources, weight, transposed = shape
    x, taps = sources[0], weight.shape[1:-1]
    out = torch.empty(0, dtype=torch.uint8 if packed else dtype)
    scales, amax = (out, x.amax) if packed else (None, None)
    image, one = (1, *(SIZE,) * len(taps)), (1,) * len(taps)
    depth = math.gcd(*(each.codes.shape[-1] for each in sources))
    launches = []
    for tile in tiles(capability, packed, transposed, len(sources) == 2, 1 if transposed else math.prod(taps), depth):
        call = gemm_call(
            *(sources, weight, torch.zeros(16) if bias else None, image, image, out, scales, amax, dtype),
            *(capability, one if transposed else taps, stride, padding, 1, relu, transposed, tile),
        )
        launches.append(call.launch)
    return launches


def _weight_only(capability: int) -> list[Launch]:
    forms = product((512, 96, 36), DTYPES, product(BOOLS, BOOLS))
    return [launch for k, dtype, flags in forms for launch in of_rows(k, dtype, *flags, capability)]


def of_rows(k: int, dtype: torch.dtype, bias: bool, relu: bool, capability: int) -> list[Launch]:
    """Of a linear layer whose activation is not packed, for few rows and for many."""
    launches = []
    for rows in (1, 100):
        x, out = torch.empty(rows, k, dtype=dtype), torch.empty(0, dtype=dtype)
        bias_values = torch.zeros(16) if bias else None
        launches.append(weight_only_call(x, empty_packed(16, k), bias_values, out, capability, relu).launch)
    return launches


def empty_packed(*shape: int) -> Nvfp4Tensor:
    blocks = -(-shape[-1] // 16)
    codes = torch.empty((*shape[:-1], 8 * blocks), dtype=torch.uint8)
    scales = torch.empty((*shape[:-1], blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4Tensor(codes, scales, torch.ones(()), torch.Size(shape))


def _feature_map(channels: int) -> Nvfp4Tensor:
    return empty_packed(1, 1, 1, channels)


def _filter(channels: int, taps: tuple[int, ...]) -> Nvfp4Tensor:
    return empty_packed(16, *taps, channels)
