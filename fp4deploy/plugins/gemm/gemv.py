"""Weight-only GEMMs with at most 16 rows of activations (GEMV, small-M GEMM): bound by reading the weight.

    out[M, N] = relu(x[M, K] w[N, K]^T + bias[N])        M <= 16, w packed

`cuda/gemv_tma.cu` runs from SM90 on, where K is a multiple of 256 (a row of block scales, K / 16 bytes, is then a
multiple of TMA's 16 bytes). Everything else runs the Triton kernel, `triton/weight_only.py`.

A thread block computes OUTPUTS columns of `out`. Its producer warp lets TMA (the Tensor Memory Accelerator) fill a ring
of stages in shared memory with codes, scales and activations; CONSUMERS groups of four consumer warps multiply. Sixteen
rows of activations in float16 take as many bytes as the packed weight of 57 outputs, and every block needs them. So two
blocks form a thread-block cluster and receive them by multicast where the hardware has it (SM90 to SM110), if at least
half of the multiprocessors are in use. With a frozen weight the kernel is launched as a secondary kernel
(`runtime.pdl`).

`variant` chooses the OUTPUTS that need the fewest waves. The inner design was measured on an H200 (docs/gemm.md); GPUs
with 99 KiB of shared memory a block (SM120, SM121) have fewer stages, and that was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
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

SOURCE, NAME = "gemv_tma.cu", "gemv_tma"
SIGNATURE = "128s128sPPPPiiifi"
MAX_ROWS = 16
WHOLE = 256  # K is a multiple of this
TMA_FROM = 90  # compute capability with TMA, thread-block clusters and mbarriers with transaction counts
MULTICAST = range(TMA_FROM, 120)  # capabilities that deliver one read to several multiprocessors
WIDE = 256  # bytes of codes of a row in a stage
BOX, SCALE_BOX = 128, WIDE // 8  # bytes of a row in a TMA box of codes, of scales
OUTPUTS = (64, 32, 16)  # of a thread block
CONSUMERS = (3, 2, 1)  # groups of four consumer warps; each has at least two stages
MAX_STAGES = 12
START = 1 << 16  # bytes that a multiprocessor could read while a thread block starts and ends


@dataclass(frozen=True)
class Variant:
    """How a GEMM is divided, and the macros that its kernel is compiled with.

    outputs: of a thread block; threads: of a thread block; shared: bytes of its shared memory.
    """

    macros: dict[str, int]
    outputs: int
    threads: int
    shared: int

    def grid(self, outputs: int) -> int:
        """Thread blocks for a weight of `outputs` rows."""
        cluster = self.macros["CLUSTER"]
        return -(-outputs // (self.outputs * cluster)) * cluster


def variant(rows: int, outputs: int, k: int, num_sms: int, shared: int, capability: int) -> Variant:
    """The variant with the fewest waves, weighted by what a thread block reads.

    rows: of the activations, at most 16; outputs, k: of the weight; num_sms: of the GPU; shared:
    bytes of shared memory that a block can have; capability: 90 for SM90.
    """
    compiled_rows = 1 if rows == 1 else 8 if rows <= 8 else MAX_ROWS
    clusters = compiled_rows > 1 and capability in MULTICAST
    found: dict[float, Variant] = {}
    for each in _variants(compiled_rows, shared, outputs, num_sms if clusters else None):
        waves = -(-each.grid(outputs) // num_sms)
        found.setdefault(waves * (each.outputs * k * 9 / 16 + START), each)
    return found[min(found)]


def _variants(rows: int, shared: int, outputs: int, num_sms: int | None) -> Iterator[Variant]:
    """All that fit into shared memory, the largest thread blocks first.

    num_sms: None for no clusters; else clusters of two are formed if blocks occupy half of these multiprocessors.
    """
    for share in OUTPUTS:
        slot = -(-(share * 9 * WIDE // 8 + rows * (4 * WIDE + 16)) // 1024) * 1024
        stages = min(shared // (slot + 16), MAX_STAGES)
        consumers = next((groups for groups in CONSUMERS if stages >= 2 * groups), None)
        if consumers is None:
            continue
        stages -= stages % consumers
        cluster = 2 if num_sms is not None and 2 * -(-outputs // share) >= num_sms else 1
        macros = {"ROWS": rows, "OUTPUTS": share, "CONSUMERS": consumers, "STAGES": stages, "CLUSTER": cluster}
        yield Variant(macros, share, 32 * (4 * consumers + 1), stages * (slot + 16))


def supports(x: torch.Tensor, weight: Nvfp4Tensor) -> bool:
    """Whether the kernel computes `x` [M, K] times this weight [N, K]: shape, alignment, GPU, driver and nvcc."""
    return (
        0 < x.shape[0] <= MAX_ROWS
        and x.shape[1] % WHOLE == 0
        and x.is_contiguous()
        and all(part.is_contiguous() and part.data_ptr() % 16 == 0 for part in (x, weight.codes, weight.scales))
        and cuda_launch.available(x.device)
        and _has_tma(x.device.index)
    )


def launch(x: torch.Tensor, weight: Nvfp4Tensor, bias: torch.Tensor | None, out: torch.Tensor, relu: bool) -> None:
    """relu(x w^T + bias) into `out` [M, N]; bias float32 [N]."""
    (m, k), n = x.shape, weight.shape[0]
    chosen = _chosen(m, n, k, x.device.index)
    macros: Macros = {"DTYPE": CUDA_TYPES[x.dtype], **chosen.macros}
    kernel = cuda_launch.kernel(SOURCE, NAME, SIGNATURE, macros, x.device)
    maps = tuple(tensor_map(kernel.gpu, *box) for box in boxes(weight, chosen))
    values = arguments(maps, x, weight, bias, out, relu)
    code = partial(cuda_launch.machine_code, SOURCE, macros, kernel.device)
    pdl.launch(kernel, code, weight, chosen.grid(n), chosen.threads, values, chosen.shared)


def boxes(weight: Nvfp4Tensor, chosen: Variant) -> tuple[tuple[torch.Tensor, int, int, int], ...]:
    """Arguments of `tensor_map` for codes and scales."""
    return (weight.codes, chosen.outputs, BOX, WIDE // BOX), (weight.scales, chosen.outputs, SCALE_BOX, 1)


def arguments(
    maps: tuple[bytes, ...],
    x: torch.Tensor,
    weight: Nvfp4Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    relu: bool,
) -> tuple[Any, ...]:
    """Arguments of the kernel, in the order of `SIGNATURE`."""
    span = E2M1_MAX * weight.e4m3_max
    (m, k), n = x.shape, weight.shape[0]
    return (*maps, x, weight.amax, bias, out, m, n, k, span, int(relu))


@lru_cache
def _chosen(rows: int, outputs: int, k: int, index: int | None) -> Variant:
    return variant(rows, outputs, k, *_resources(index))


@lru_cache
def _resources(index: int | None) -> tuple[int, int, int]:
    """Multiprocessors, bytes of shared memory a block, compute capability."""
    gpu: Any = torch.cuda.get_device_properties(index)
    return gpu.multi_processor_count, gpu.shared_memory_per_block_optin, Architecture.of_device(index).number


@lru_cache
def _has_tma(index: int | None) -> bool:
    """A GPU with TMA, and a driver that encodes tensor maps (CUDA 12.0)."""
    return _resources(index)[2] >= TMA_FROM and library() is not None
