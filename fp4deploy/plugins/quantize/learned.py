"""The gradient of a learned amax for feature maps that the kernels of `channels_last` quantise.

| operation | of what | before quantisation |
|---|---|---|
| `group_norm_relu_damax` | `group_norm_relu` | relu(a x + b), computed again |
| `pool_damax` | `pool` | the 2x2 maximum, found again |
| `concat_damax` | `concat` | its inputs |

`qat.learned` has the definition. Each reads the two feature maps once, or nothing where the largest value does not
exceed the amax: then no block saturates and the gradient is 0. The kernels are in `cuda/learned.cu`; sums are added in
a fixed order. Feature maps are as in `channels_last`; `amax` and `largest` are float32 [1], the result is float32 [].
"""

from __future__ import annotations

import torch

from fp4deploy.plugins.quantize.channels_last import chunks_of
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, LIBRARY, THREADS

LIBRARY.define("group_norm_relu_damax(Tensor x, Tensor dy, Tensor ab, Tensor amax, Tensor? largest) -> Tensor")
LIBRARY.define("pool_damax(Tensor y, Tensor dpooled, Tensor amax, Tensor? largest) -> Tensor")
LIBRARY.define("concat_damax(Tensor a, Tensor b, Tensor gradient, Tensor amax, Tensor? largest) -> Tensor")


@torch.library.impl(LIBRARY, "group_norm_relu_damax", "CUDA")
def _group_norm_relu_damax(
    x: torch.Tensor, dy: torch.Tensor, ab: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    n, c, h, w = x.shape
    dy = dy.contiguous(memory_format=torch.channels_last)
    chunks, per_chunk = chunks_of(h * w, c, n)
    partial = torch.empty((n, chunks), dtype=torch.float32, device=x.device)
    sums = kernel("learned.cu", "normalized", "PPPPPPqiq", {"DTYPE": CUDA_TYPES[x.dtype]}, x.device)
    sums.launch((chunks, n), THREADS, x, dy, ab, amax, largest, partial, h * w, c, per_chunk)
    return _gradient(partial, amax, x.numel())


@torch.library.impl(LIBRARY, "pool_damax", "CUDA")
def _pool_damax(
    y: torch.Tensor, dpooled: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    n, c, h, w = dpooled.shape
    dpooled = dpooled.contiguous(memory_format=torch.channels_last)
    chunks, per_chunk = chunks_of(h * w, c, n)
    partial = torch.empty((n, chunks), dtype=torch.float32, device=y.device)
    sums = kernel("learned.cu", "pooled", "PPPPPiqiq", {"DTYPE": CUDA_TYPES[y.dtype]}, y.device)
    sums.launch((chunks, n), THREADS, y, dpooled, amax, largest, partial, w, h * w, c, per_chunk)
    return _gradient(partial, amax, dpooled.numel())


@torch.library.impl(LIBRARY, "concat_damax", "CUDA")
def _concat_damax(
    a: torch.Tensor, b: torch.Tensor, gradient: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    n, c, h, w = gradient.shape
    gradient, b = (each.contiguous(memory_format=torch.channels_last) for each in (gradient, b))
    chunks, per_chunk = chunks_of(n * h * w, c, 1)
    partial = torch.empty((1, chunks), dtype=torch.float32, device=a.device)
    sums = kernel("learned.cu", "joined", "PPPPPPqiiq", {"DTYPE": CUDA_TYPES[a.dtype]}, a.device)
    sums.launch(chunks, THREADS, a, b, gradient, amax, largest, partial, n * h * w, a.shape[1], b.shape[1], per_chunk)
    return _gradient(partial, amax, gradient.numel())


def _gradient(partial: torch.Tensor, amax: torch.Tensor, elements: int) -> torch.Tensor:
    return partial.sum() / (amax.reshape(()) * elements**0.5)


for _operator in ("group_norm_relu_damax", "pool_damax", "concat_damax"):

    @torch.library.register_fake(f"fp4deploy::{_operator}", lib=LIBRARY)
    def _(x, *rest):  # type: ignore[no-untyped-def]
        return torch.empty((), dtype=torch.float32, device=x.device)
