"""Weight-only products of a few rows: reading the weight is all that takes time, so they have kernels of their own.

**From SM90 on** `cuda/weight_stream.cu` gives a block some rows of the weight and lets warps that do nothing else copy
long runs of them, as many bytes ahead of the multiplying warps as shared memory holds. The activations count as well:
sixteen rows as they are weigh as much as the packed weight of 57, and each block needs all of them. Blocks beside each
other, which multiply different rows of the weight, therefore read them together where the hardware can write one read
to two multiprocessors at once (SM90 to SM110), and where enough blocks read at the same time for this to matter. In a
row of products each begins to read its weight while the one in front ends (`behind`).

**Before** `cuda/weight_only.cu` lets each warp copy what it multiplies, a piece ahead.

`variant` takes the rows a block that keep the multiprocessors busy in the fewest turns. How a block works inside was
measured on an H200 (docs/products.md); on GPUs with 99 KiB of shared memory (SM120, SM121) its stages are narrower, and
that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins import behind, driver
from fp4deploy.plugins.compiler import Macros
from fp4deploy.plugins.library import CUDA_TYPES

FEW_ROWS = 16
PIECE = 128  # elements of a row that a warp takes at once
STREAMS = 90  # compute capability that has bulk copies, clusters and barriers that count bytes
MULTICAST = range(STREAMS, 120)  # capabilities that write one read to several multiprocessors
SHAPES = {1: (2, 1), 8: (2, 1), FEW_ROWS: (1, 2)}  # weight_only: by rows held, bands and depth
STAGES = 2  # weight_only: turns of a warp on their way; more delay the first
RINGS = (2, 8)  # weight_stream: stages of the weight, at least and at most
FACING = 2  # and of the activations
MULTIPLIED = 64 * 16 * 8  # bytes of codes that the eight multiplying warps take at least from a stage, 16 rows each
THREADS = 32 * (8 + 4 + 1)  # they, and those that copy weight and activations
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
    if capability >= STREAMS:
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
    """Variants of weight_stream, the widest stages first.

    sharing: None, or the multiprocessors: blocks share the activations if they occupy half of them.
    """
    for wide, share in product((512, 256), (64, 32, 16)):
        slot = share * (9 * wide // 8 + 80) + 16
        facing = FACING * (held * (4 * wide + 16) + 16)
        stages = min((shared - facing) // slot, RINGS[1])
        if stages < RINGS[0] or wide * share < MULTIPLIED:
            continue
        cluster = 2 if sharing is not None and 2 * -(-outputs // share) >= sharing else 1
        macros = {"ROWS": held, "WIDE": wide, "OUTPUTS": share, "STAGES": stages, "CLUSTER": cluster}
        yield Variant("weight_stream", macros, share, THREADS, stages * slot + facing)


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
        and driver.available(x.device)
    )


def launch(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, out: torch.Tensor, relu: bool) -> None:
    """relu(x w^T + bias) into `out` [M, N]; bias float32 [N]."""
    (m, k), n = x.shape, weight.shape[0]
    chosen = _chosen(m, n, k, x.device.index)
    room, signature = ((), "PPPPPPiiifi") if chosen.room is None else ((chosen.room,), "PPPPPPiiiifi")
    macros: Macros = {"DTYPE": CUDA_TYPES[x.dtype], **chosen.macros}
    source = f"{chosen.name}.cu"
    kernel = driver.kernel(source, chosen.name, signature, macros, x.device)
    values = (x, weight.codes, weight.scales.view(torch.uint8), weight.amax, bias, out)
    sizes = (m, n, k, *room, E2M1_MAX * weight.e4m3_max, int(relu))
    grid, block, shared = chosen.grid(n), chosen.threads, chosen.shared
    if chosen.room is None:
        code = partial(driver.machine_code, source, macros, kernel.device)
        behind.launch(kernel, code, weight, grid, block, (*values, *sizes), shared)
    else:
        kernel.launch(grid, block, *values, *sizes, shared=shared)


@lru_cache
def _chosen(rows: int, outputs: int, k: int, index: int | None) -> Variant:
    return variant(rows, outputs, k, *_resources(index))


@lru_cache
def _resources(index: int | None) -> tuple[int, int, int]:
    properties: Any = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_block_optin
    return properties.multi_processor_count, shared, 10 * properties.major + properties.minor
