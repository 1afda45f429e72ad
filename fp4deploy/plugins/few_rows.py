"""Weight-only products of a few rows: reading the weight is all that takes time, so they have a kernel of their own.

`cuda/weight_only.cu` holds 16, 32 or 64 rows of the weight in a block and as many pieces of them on their way from
memory as its shared memory takes. Many rows a block read the activations less often, few rows a block leave no
multiprocessor idle: `variant` takes the most rows that still give nearly every multiprocessor a block.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor
from fp4deploy.plugins import driver
from fp4deploy.plugins.library import CUDA_TYPES

FEW_ROWS = 16
PIECE = 128  # elements of a row that a warp takes at once
WARPS = 8
STAGES = 2  # more delay the first piece; measured on an H200
BUSY = 0.9  # of the multiprocessors


def variant(rows: int, outputs: int, processors: int, shared: int) -> tuple[dict[str, int], int]:
    """Macros of the kernel, and its shared memory in bytes.

    rows: of the activations, at most 16; outputs: rows of the weight; processors: multiprocessors of the GPU; shared:
    bytes of shared memory that a block can have.
    """
    tiles = 1 if rows <= 8 else 2
    for bands in (4, 2, 1):
        slot = WARPS * (1152 * bands + 2048 * tiles)
        stages = min(STAGES, shared // slot)
        if bands == 1 or (-(-outputs // (16 * bands)) >= BUSY * processors and stages == STAGES):
            break
    return {"TILES": tiles, "BANDS": bands, "STAGES": stages, "WARPS": WARPS}, stages * slot


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
    macros, shared = variant(m, n, *_resources(x.device.index))
    kernel = driver.kernel(
        "weight_only.cu", "weight_only", "PPPPPPiiifi", {"DTYPE": CUDA_TYPES[x.dtype], **macros}, x.device
    )
    values = (x, weight.codes, weight.scales.view(torch.uint8), weight.amax, bias, out)
    grid = -(-n // (16 * macros["BANDS"]))
    kernel.launch(grid, 32 * WARPS, *values, m, n, k, E2M1_MAX * weight.e4m3_max, int(relu), shared=shared)


@lru_cache
def _resources(index: int | None) -> tuple[int, int]:
    properties: Any = torch.cuda.get_device_properties(index)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin
