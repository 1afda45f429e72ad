"""Every Triton GEMM kernel that can be launched on an architecture, for ahead-of-time (AOT) compilation.

A variant is a tile and what else changes the code: dtype, epilogue, taps, sources, and whether a row is whole steps of
the tile. The list covers what networks use: filters of 1, 3, 5 and 7, with and without bias and ReLU.
"""

from __future__ import annotations

from itertools import product

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.arguments import gemm_call, weight_only_call
from fp4deploy.plugins.gemm.triton.tiles import tiles

DTYPES = (torch.float16, torch.bfloat16)
SIZES, SIZE, BOOLS = (1, 3, 5, 7), (1, 8, 8), (False, True)
# Whole steps of every tile, of tiles with a small BK, of none; unaligned rows; two and four taps a step.
CHANNELS = (256, 64, 96, 48, 32, 16)


Shape = tuple[tuple[Nvfp4Tensor, ...], Nvfp4Tensor, bool]


def all_variants(arch: str) -> list[Launch]:
    """The launches of an architecture such as "sm_90", each once."""
    capability = Architecture.parse(arch).number
    found: dict[Launch, None] = {}
    for launch in (*_gemms(capability), *_weight_only(capability)):
        found.setdefault(launch)
    return list(found)


def _gemms(capability: int) -> list[Launch]:
    launches = []
    facts = product(product(DTYPES, CHANNELS, SIZES), product(BOOLS, BOOLS, BOOLS))
    for (dtype, channels, size), (bias, relu, packed) in facts:
        if size > 3 and (relu or packed or dtype != torch.float16):
            continue
        x, weight = _feature_map(channels), _filter(channels, size)
        shapes: list[Shape] = [((x,), weight, False)]
        if size == 3:
            shapes.append(((x, x), _filter(2 * channels, size), False))
        if size == 1:
            shapes.append(((x,), _filter(channels, 2), True))
        for sources, filters, transposed in shapes:
            out = torch.empty(0, dtype=torch.uint8 if packed else dtype)
            scales, amax = (out, x.amax) if packed else (None, None)
            taps = (1, 1) if transposed else (size, size)
            for tile in tiles(capability, packed, transposed, len(sources) == 2, taps[0] * taps[1], x.codes.shape[-1]):
                call = gemm_call(
                    *(sources, filters, torch.zeros(16) if bias else None, SIZE, SIZE, out, scales, amax, dtype),
                    *(capability, taps, 1, 0, 1, relu, transposed, tile),
                )
                launches.append(call.launch)
    return launches


def _weight_only(capability: int) -> list[Launch]:
    launches = []
    for (rows, k), dtype, (bias, relu) in product(product((1, 100), (512, 96, 36)), DTYPES, product(BOOLS, BOOLS)):
        x, out = torch.empty(rows, k, dtype=dtype), torch.empty(0, dtype=dtype)
        bias_values = torch.zeros(16) if bias else None
        launches.append(weight_only_call(x, _packed(16, k), bias_values, out, capability, relu).launch)
    return launches


def _packed(*shape: int) -> Nvfp4Tensor:
    blocks = -(-shape[-1] // 16)
    codes = torch.empty((*shape[:-1], 8 * blocks), dtype=torch.uint8)
    scales = torch.empty((*shape[:-1], blocks), dtype=torch.uint8).view(torch.float8_e4m3fn)
    return Nvfp4Tensor(codes, scales, torch.ones(()), torch.Size(shape))


def _feature_map(channels: int) -> Nvfp4Tensor:
    return _packed(1, 1, 1, channels)


def _filter(channels: int, size: int) -> Nvfp4Tensor:
    return _packed(16, size, size, channels)
