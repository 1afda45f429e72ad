"""Weight-only products of a few rows: reading the weight is all that takes time, so they have kernels of their own.

**From SM90 on** `cuda/gemv_tma.cu` gives a block some rows of the weight and lets the copy engine read them in
boxes (`tensor_map`), as many bytes ahead of the multiplying warps as shared memory holds. The activations count as
well: sixteen rows as they are weigh as much as the packed weight of 57, and each block needs all of them. Blocks beside
each other, which multiply different rows of the weight, therefore read them together where the hardware can write one
read to two multiprocessors at once (SM90 to SM110), and where enough blocks read at the same time for this to matter.
In a row of products each begins to read its weight while the one in front ends (`behind`).

**Before**, and where K is not a multiple of 256, so that rows of scales are not aligned to the engine's 16 bytes,
`cuda/weight_only.cu` lets each warp copy what it multiplies, a piece ahead.

`variant` takes the rows a block that keep the multiprocessors busy in the fewest turns. How a block works inside was
measured on an H200 (docs/products.md); on GPUs with 99 KiB of shared memory (SM120, SM121) it has fewer stages, and
that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins.runtime import launch as cuda_launch
from fp4deploy.plugins.runtime import pdl
from fp4deploy.plugins.runtime.context import library
from fp4deploy.plugins.runtime.nvcc import Macros
from fp4deploy.plugins.runtime.tma import tensor_map
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES

FEW_ROWS = 16
PIECE = 128  # elements of a row that a warp takes at once
STREAMS = 90  # compute capability that has bulk copies, clusters and barriers that count bytes
MULTICAST = range(STREAMS, 120)  # capabilities that write one read to several multiprocessors
SHAPES = {1: (2, 1), 8: (2, 1), FEW_ROWS: (1, 2)}  # weight_only: by rows held, bands and depth
STAGES = 2  # weight_only: turns of a warp on their way; more delay the first
WHOLE = 256  # gemv_tma: K is a multiple of this
WIDE = 256  # bytes of codes of a row in a stage
BOX, SCALE_BOX = 128, WIDE // 8  # bytes of a row in a box of codes, of scales
SHARES = (64, 32, 16)  # rows of the weight of a block
TEAMS = (3, 2, 1)  # of four warps, of which each has two stages at least
MOST_STAGES = 12
START = 1 << 16  # bytes that a multiprocessor could read while a block begins and ends


@dataclass(frozen=True)
class Variant:
    """How a product is divided, and with which macros its kernel is compiled.

    outputs: rows of the weight of a block; threads: of a block; shared: bytes; room: pieces of the activations that a
    block of weight_only holds.
    """

    name: str
    macros: dict[str, int]
    outputs: int
    threads: int
    shared: int
    room: int | None = None

    def grid(self, outputs: int) -> int:
        """Blocks for a weight of `outputs` rows."""
        cluster = self.macros.get("CLUSTER", 1)
        return -(-outputs // (self.outputs * cluster)) * cluster


def variant(rows: int, outputs: int, k: int, processors: int, shared: int, capability: int) -> Variant:
    """The variant of a product.

    rows: of the activations, at most 16; outputs, k: of the weight; processors: multiprocessors of the GPU; shared:
    bytes of shared memory that a block can have; capability: 90 for SM90.
    """
    held = 1 if rows == 1 else 8 if rows <= 8 else FEW_ROWS
    if capability >= STREAMS and k % WHOLE == 0:
        sharing = held > 1 and capability in MULTICAST
        possible = _streams(held, shared, outputs, processors if sharing else None)
    else:
        possible = _whole_rows(held, k, shared)
    found: dict[float, Variant] = {}
    for each in possible:
        cost = -(-each.grid(outputs) // processors) * (each.outputs * k * 9 / 16 + START)
        found.setdefault(cost, each)
    return found[min(found)]


def _streams(held: int, shared: int, outputs: int, sharing: int | None) -> Iterator[Variant]:
    """Variants of gemv_tma, the largest blocks first.

    sharing: None, or the multiprocessors: blocks share the activations if they occupy half of them.
    """
    for share in SHARES:
        slot = -(-(share * 9 * WIDE // 8 + held * (4 * WIDE + 16)) // 1024) * 1024
        stages = min(shared // (slot + 16), MOST_STAGES)
        teams = next((teams for teams in TEAMS if stages >= 2 * teams), None)
        if teams is None:
            continue
        stages -= stages % teams
        cluster = 2 if sharing is not None and 2 * -(-outputs // share) >= sharing else 1
        macros = {"ROWS": held, "OUTPUTS": share, "TEAMS": teams, "STAGES": stages, "CLUSTER": cluster}
        yield Variant("gemv_tma", macros, share, 32 * (4 * teams + 1), stages * (slot + 16))


def _whole_rows(held: int, k: int, shared: int) -> Iterator[Variant]:
    """Variants of weight_only, the most warps first."""
    bands, depth = SHAPES[held]
    depth = depth if k % (depth * PIECE) == 0 else 1
    for warps, share in product((16, 8), (256, 128, 64, 32, 16)):
        split = 16 * bands * warps // share
        ring = warps * STAGES * 1152 * bands * depth
        piece = 256 * held * depth
        room = min((shared - ring) // piece, -(-k // (PIECE * depth)) + split - 1) // max(split, 1) * split
        if not 1 <= split <= warps or room < split:
            continue
        macros = {"ROWS": held, "BANDS": bands, "DEPTH": depth, "STAGES": STAGES, "WARPS": warps, "SPLIT": split}
        yield Variant("weight_only", macros, share, 32 * warps, ring + room * piece, room)


def takes(x: torch.Tensor, weight: Nvfp4Tensor) -> bool:
    """True if a kernel computes `x` [M, K] times this weight [N, K]: few rows of whole pieces, aligned, on a GPU."""
    return (
        0 < x.shape[0] <= FEW_ROWS
        and x.shape[1] % PIECE == 0
        and x.is_contiguous()
        and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in (x, weight.codes, weight.scales))
        and cuda_launch.available(x.device)
    )


def launch(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, out: torch.Tensor, relu: bool) -> None:
    """relu(x w^T + bias) into `out` [M, N]; bias float32 [N]."""
    (m, k), n = x.shape, weight.shape[0]
    chosen = _chosen(m, n, k, x.device.index)
    macros: Macros = {"DTYPE": CUDA_TYPES[x.dtype], **chosen.macros}
    source, span = f"{chosen.name}.cu", E2M1_MAX * weight.e4m3_max
    grid, block, shared = chosen.grid(n), chosen.threads, chosen.shared
    if chosen.room is None:
        kernel = cuda_launch.kernel(source, chosen.name, "128s128sPPPPiiifi", macros, x.device)
        maps = (
            tensor_map(kernel.gpu, weight.codes, chosen.outputs, BOX, WIDE // BOX),
            tensor_map(kernel.gpu, weight.scales, chosen.outputs, SCALE_BOX),
        )
        values: tuple[Any, ...] = (*maps, x, weight.amax, bias, out, m, n, k, span, int(relu))
        pdl.launch(
            kernel,
            partial(cuda_launch.machine_code, source, macros, kernel.device),
            weight,
            grid,
            block,
            values,
            shared,
        )
    else:
        kernel = cuda_launch.kernel(source, chosen.name, "PPPPPPiiiifi", macros, x.device)
        values = (x, weight.codes, weight.scales, weight.amax, bias, out, m, n, k, chosen.room, span, int(relu))
        kernel.launch(grid, block, *values, shared=shared)


@lru_cache
def _chosen(rows: int, outputs: int, k: int, index: int | None) -> Variant:
    return variant(rows, outputs, k, *_resources(index))


@lru_cache
def _resources(index: int | None) -> tuple[int, int, int]:
    properties: Any = torch.cuda.get_device_properties(index)
    shared, capability = properties.shared_memory_per_block_optin, Architecture.of_device(index).number
    # A driver without tensor maps runs what older GPUs run.
    return (
        properties.multi_processor_count,
        shared,
        capability if library() is not None else min(capability, STREAMS - 1),
    )
