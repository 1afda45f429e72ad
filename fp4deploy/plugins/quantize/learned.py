"""The gradient of a learned amax for feature maps that the kernels of `channels_last` quantise.

| operation | of what | before quantisation |
|---|---|---|
| `group_norm_relu_damax` | `group_norm_relu` | relu(a x + b), computed again |
| `pool_damax` | `pool` | the 2x2 maximum, found again |
| `concat_damax` | `concat` | its inputs, the second with its bias |

`qat.operators.learned` has the definition. Each reads the two feature maps once, or nothing where the largest value
does not exceed the amax: then no block saturates and the gradient is 0. The kernels are in `cuda/learned.cu`; sums are
added in a fixed order. Feature maps are as in `channels_last`; `amax` and `largest` are float32 [1], the result is
float32 [].
"""

from __future__ import annotations

import torch

from fp4deploy.plugins.quantize.channels_last import chunks_of
from fp4deploy.plugins.runtime.launch import kernel
from fp4deploy.plugins.runtime.torch_library import CUDA_TYPES, THREADS, operator, scalar


@operator("group_norm_relu_damax(Tensor x, Tensor dy, Tensor ab, Tensor amax, Tensor? largest) -> Tensor", scalar)
def _group_norm_relu_damax(
    x: torch.Tensor, dy: torch.Tensor, ab: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    n, c, h, w = x.shape
    dy = dy.contiguous(memory_format=torch.channels_last)
    return _gradient("normalized", "PPPPPPqiq", dy, (x, dy, ab), (h * w, c), n, amax, largest)


@operator("pool_damax(Tensor y, Tensor dpooled, Tensor amax, Tensor? largest) -> Tensor", scalar)
def _pool_damax(
    y: torch.Tensor, dpooled: torch.Tensor, amax: torch.Tensor, largest: torch.Tensor | None
) -> torch.Tensor:
    n, c, h, w = dpooled.shape
    dpooled = dpooled.contiguous(memory_format=torch.channels_last)
    return _gradient("pooled", "PPPPPiqiq", dpooled, (y, dpooled), (w, h * w, c), n, amax, largest)


@operator(
    "concat_damax(Tensor a, Tensor b, Tensor gradient, Tensor amax, Tensor? largest, Tensor? bias=None) -> Tensor",
    scalar,
)
def _concat_damax(
    a: torch.Tensor,
    b: torch.Tensor,
    gradient: torch.Tensor,
    amax: torch.Tensor,
    largest: torch.Tensor | None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    n, _, h, w = gradient.shape
    gradient, b = (each.contiguous(memory_format=torch.channels_last) for each in (gradient, b))
    maps, sizes = (a, b, gradient, bias), (n * h * w, a.shape[1], b.shape[1])
    return _gradient("joined", "PPPPPPPqiiq", gradient, maps, sizes, 1, amax, largest, bias is not None)


def _gradient(
    function: str,
    signature: str,
    gradient: torch.Tensor,
    maps: tuple[torch.Tensor | None, ...],
    sizes: tuple[int, ...],
    batch: int,
    amax: torch.Tensor,
    largest: torch.Tensor | None,
    biased: bool = False,
) -> torch.Tensor:
    """Let a kernel of `learned.cu` sum over `maps` in chunks, and add the chunks.

    sizes: its integers, before the pixels of a chunk. batch: in how many parts the pixels are chunked.
    """
    channels = gradient.shape[1]
    chunks, per_chunk = chunks_of(gradient.numel() // channels // batch, channels, batch)
    partial = torch.empty((batch, chunks), dtype=torch.float32, device=gradient.device)
    macros: dict[str, str | int] = {"DTYPE": CUDA_TYPES[gradient.dtype], **({"BIASED": 1} if biased else {})}
    sums = kernel("learned.cu", function, signature, macros, gradient.device)
    sums.launch((chunks, batch), THREADS, *maps, amax, largest, partial, *sizes, per_chunk)
    return partial.sum() / (amax.reshape(()) * gradient.numel() ** 0.5)
