"""Weight-only products of a few rows: reading the weight is all that takes time, so they have a kernel of their own.

`cuda/weight_only.cu` gives a block some rows of the weight and a part of K, which the blocks of a cluster divide among
themselves: sixteen rows of activations as they are weigh as much as the packed weight of 64 rows, so that blocks of 128
rows and half of K read half of it. `variant` takes the rows a block that keep the multiprocessors busy in the fewest
turns; how a warp works was measured on an H200, where clusters of four leave multiprocessors idle.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins import driver
from fp4deploy.plugins.compiler import Macros
from fp4deploy.plugins.library import CUDA_TYPES

FEW_ROWS = 16
PIECE = 128  # elements of a row that a warp takes at once
SHAPES = {1: (2, 1, 1), 8: (2, 1, 2), FEW_ROWS: (1, 2, 2)}  # by rows held: bands, depth, blocks of a cluster
STAGES = 2  # turns of a warp on their way; more delay the first
CLUSTERED = 90  # compute capability that has clusters
START = 1 << 16  # bytes that a multiprocessor could read while a block begins and ends


@dataclass(frozen=True)
class Variant:
    """How a product is divided, and with which macros the kernel is compiled.

    outputs: rows of the weight of a block; room: pieces of the activations that it holds; shared: bytes.
    """

    macros: dict[str, int]
    outputs: int
    room: int
    shared: int

    def grid(self, outputs: int) -> int:
        """Blocks for a weight of `outputs` rows."""
        return -(-outputs // self.outputs) * self.macros["CLUSTER"]


def variant(rows: int, outputs: int, k: int, processors: int, shared: int, capability: int) -> Variant:
    """The variant of a product.

    rows: of the activations, at most 16; outputs, k: of the weight; processors: multiprocessors of the GPU; shared:
    bytes of shared memory that a block can have; capability: 90 for SM90.
    """
    held = 1 if rows == 1 else 8 if rows <= 8 else FEW_ROWS
    bands, depth, cluster = SHAPES[held]
    depth = depth if k % (depth * PIECE) == 0 else 1
    cluster = cluster if capability >= CLUSTERED else 1
    found: dict[float, Variant] = {}
    for warps, share in product((16, 8), (256, 128, 64, 32, 16)):  # share: outputs of a block, if K were not divided
        split = 16 * bands * warps // (share * cluster)
        ring = warps * STAGES * 1152 * bands * depth
        piece = 256 * held * depth
        room = min((shared - ring) // piece, -(-k // (PIECE * depth * cluster)) + split - 1) // max(split, 1) * split
        if not 1 <= split <= warps or room < split:
            continue
        macros = {"ROWS": held, "BANDS": bands, "DEPTH": depth, "STAGES": STAGES}
        macros |= {"WARPS": warps, "SPLIT": split, "CLUSTER": cluster}
        each = Variant(macros, share * cluster, room, ring + room * piece)
        cost = -(-each.grid(outputs) // processors) * (share * k * 9 / 16 + START)
        found.setdefault(cost, each)
    return found[min(found)]


def takes(x: torch.Tensor, weight: Nvfp4Tensor) -> bool:
    """True if the kernel computes `x` [M, K] times this weight [N, K]: few rows of whole pieces, aligned, on a GPU."""
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
    macros: Macros = {"DTYPE": CUDA_TYPES[x.dtype], **chosen.macros}
    kernel = driver.kernel("weight_only.cu", "weight_only", "PPPPPPiiiifi", macros, x.device)
    values = (x, weight.codes, weight.scales.view(torch.uint8), weight.amax, bias, out)
    sizes = (m, n, k, chosen.room, E2M1_MAX * weight.e4m3_max, int(relu))
    kernel.launch(chosen.grid(n), 32 * chosen.macros["WARPS"], *values, *sizes, shared=chosen.shared)


@lru_cache
def _chosen(rows: int, outputs: int, k: int, index: int | None) -> Variant:
    return variant(rows, outputs, k, *_resources(index))


@lru_cache
def _resources(index: int | None) -> tuple[int, int, int]:
    properties: Any = torch.cuda.get_device_properties(index)
    shared = properties.shared_memory_per_block_optin
    return properties.multi_processor_count, shared, 10 * properties.major + properties.minor
