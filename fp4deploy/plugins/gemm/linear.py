"""Linear layers and matrix multiplication in NVFP4: the public functions.

    cache = fp4_quantize(weight, bias)               once
    y = fp4_cached_linear(x, cache)                  x W^T + b, as torch.nn.functional.linear; x float16 or bfloat16
    y = fp4_linear(x, weight, bias)                  both in one call, the same bits: for weights that change
    c = fp4_matmul(a, b)                             a b^T, both packed: the contracted axis is the last of both

Operands: `fp4_cached_linear` and `fp4_linear` keep activations as they are (W4A16) unless `input_amax` says
how to pack them (W4A4); `fp4_matmul` packs what is not packed yet, each operand with its own two levels of scale.
Nothing here has a gradient (`operands.refuse_gradients`).
"""

from __future__ import annotations

import torch

from fp4deploy.errors import InputError
from fp4deploy.formats import FourOverSix, Nvfp4Tensor
from fp4deploy.plugins.gemm.operands import InputAmax, output_dtype, pack, refuse_gradients, scalar
from fp4deploy.plugins.gemm.reference import Output
from fp4deploy.plugins.gemm.scaled_mm import packed_matmul
from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize


def fp4_cached_linear(
    x: torch.Tensor | Nvfp4Tensor,
    cache: FP4WeightCache,
    input_amax: InputAmax = None,
    relu: bool = False,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    out_amax: float | torch.Tensor | None = None,
) -> Output:
    """relu(x W^T + bias) with a weight packed before; `FP4WeightCache.forward`.

    >>> cache = fp4_quantize(torch.eye(32))
    >>> fp4_cached_linear(torch.full((2, 32), 1.5).half(), cache).shape
    torch.Size([2, 32])
    """
    if not isinstance(cache, FP4WeightCache):
        raise InputError(f"The cache is a {type(cache).__name__}: make one with fp4_quantize(weight, bias).")
    return cache.forward(x, input_amax, relu, dtype, backend, out_amax)


def fp4_linear(
    x: torch.Tensor | Nvfp4Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    input_amax: InputAmax = None,
    relu: bool = False,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
    four_over_six: FourOverSix | None = None,
    out_amax: float | torch.Tensor | None = None,
) -> Output:
    """`fp4_quantize` and `fp4_cached_linear` in one call, with their bits.

    Raises:
        InputError: as these, and where an operand requires a gradient.

    >>> fp4_linear(torch.full((1, 32), 1.5).half(), torch.eye(32))[0, :4]
    tensor([1.5000, 1.5000, 1.5000, 1.5000], dtype=torch.float16)
    """
    refuse_gradients(x, weight, bias)
    return fp4_quantize(weight, bias, four_over_six).forward(x, input_amax, relu, dtype, backend, out_amax)


def fp4_matmul(
    a: torch.Tensor | Nvfp4Tensor,
    b: torch.Tensor | Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype | None = None,
    out_amax: float | torch.Tensor | None = None,
    backend: str | None = None,
) -> Output:
    """relu(a b^T + bias), both operands in NVFP4; what is a tensor is packed with its own amax.

    Args:
        a: [..., K].
        b: [N, K], the contracted axis last as in `torch.nn.functional.linear`; of a matrix [K, N] give `b.mT`.
        bias: [N].
        dtype: of the output, float16 or bfloat16; by default that of `a`, float16 where it has none of these.
        out_amax: pack the output with this amax, for the next layer.
        backend: see `scaled_matmul`.

    Returns:
        [..., N], or packed in blocks along N.

    Raises:
        InputError: shapes, dtypes, devices or options do not fit; an operand requires a gradient.

    >>> fp4_matmul(torch.full((2, 32), 2.0), torch.full((4, 32), 0.5))[0]
    tensor([32., 32., 32., 32.], dtype=torch.float16)
    """
    refuse_gradients(a, b, bias)
    for name, x, fits in (("a", a, lambda axes: axes >= 1), ("b", b, lambda axes: axes == 2)):
        if not isinstance(x, (torch.Tensor, Nvfp4Tensor)) or not fits(len(x.shape)):
            shape = tuple(x.shape) if isinstance(x, (torch.Tensor, Nvfp4Tensor)) else type(x).__name__
            raise InputError(f"{name} is {shape}; fp4_matmul takes a [..., K] and b [N, K], tensors or packed.")
    if a.shape[-1] != b.shape[-1]:
        raise InputError(
            f"a is {tuple(a.shape)} and b {tuple(b.shape)}: fp4_matmul contracts the last axis of both, a b^T. "
            "Of a matrix [K, N] give b.mT."
        )
    left, right = (x if isinstance(x, Nvfp4Tensor) else pack(x, "dynamic") for x in (a, b))
    amax = None if out_amax is None else scalar(out_amax, left.codes.device, "out_amax")
    return packed_matmul(left, right, bias, relu, output_dtype(a, dtype), amax, backend)
