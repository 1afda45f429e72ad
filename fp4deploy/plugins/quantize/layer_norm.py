"""LayerNorm of rows with the quantisation of its output: one kernel (`cuda/layer_norm.cu`) that reads every row once.

A compiler makes two of it, as the amax of a block needs the moments of the whole row, and a transformer has two or
three of them a block.
"""

from __future__ import annotations

import torch

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins.runtime.fallback import Fallback
from fp4deploy.plugins.runtime.launch import kernel, num_sms
from fp4deploy.plugins.runtime.pdl import launch_secondary
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS

VECTOR, LANES = 8, 32  # channels of a thread at once, threads that can have a row
MAX_WIDTH = 2048  # of a row, 64 values a thread: more would not stay in registers

fallback = Fallback("LayerNorm layers of compiled networks", "torch's compiler")


def supports(width: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel runs on a device, and takes rows of so many channels."""
    fits = dtype in (torch.float16, torch.bfloat16) and width % NVFP4_BLOCK == 0 and width <= MAX_WIDTH
    return fits and fallback.runs(device)


def layer_norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    amax: torch.Tensor,
    eps: float,
    unit: float,
    plain: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x + other, its LayerNorm over the last axis, that in NVFP4 and decoded), of the dtype of `x`.

    Args:
        x, other: float16 or bfloat16 [..., C], contiguous, on a GPU; the first result is x itself without `other`.
        weight, bias: float32 [C].
        amax: float32 [], the global amax that the norm is quantised with.
        unit: what one unit of E2M1 times its block scale is written as; 0 for the contract's value.
        plain: whether the second result is asked for; else it is of no elements.

    Raises:
        UnavailableError: the kernel does not compile or launch here.
    """
    width = x.shape[-1]
    lanes, steps = _division(width)
    rows = x.numel() // width
    total = x if other is None else torch.empty_like(x)
    normed = torch.empty_like(x) if plain else x.new_empty(0)
    values = torch.empty_like(x)
    macros: dict[str, str | int] = {"DTYPE": CUDA_TYPES[x.dtype], "LANES": lanes, "STEPS": steps}
    run = kernel("layer_norm.cu", "layer_norm", "PPPPPPPPiffq", macros, x.device)
    given = (x, other, weight, bias, amax, None if other is None else total, normed if plain else None, values)
    if rows:
        threads = _threads(rows * lanes, num_sms(x.device))
        launch_secondary(run, -(-rows * lanes // threads), threads, *given, width, eps, unit, rows)
    return total, normed, values


def _threads(count: int, sms: int) -> int:
    """Of a block, for so many in all: few rows are spread over the multiprocessors."""
    threads = THREADS
    while threads > LANES and count < threads * sms:
        threads //= 2
    return threads


def _division(width: int) -> tuple[int, int]:
    """Threads of a row, and how often each has eight channels."""
    vectors = width // VECTOR
    lanes = min(LANES, 1 << (vectors - 1).bit_length())
    return lanes, -(-vectors // lanes)
