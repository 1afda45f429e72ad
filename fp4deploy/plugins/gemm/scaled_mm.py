"""GEMM of two packed matrices (W4A4): torch's own FP4 `scaled_mm` where there is one, else this package's kernels.

    backend = "auto"        torch's where GPU, torch and shapes allow it, else the kernels
    backend = "kernels"     `dispatch.matmul`: Triton kernels on a GPU, the reference elsewhere
    backend = "scaled_mm"   torch's, or an error that says what is missing

The keyword takes precedence over FP4DEPLOY_MATMUL. If "auto" tries `scaled_mm` and it refuses, there is a warning.

`torch.nn.functional.scaled_mm` (torch 2.10) hands NVFP4 to cuBLAS on SM100 and later. It wants block scales in the
128x4 layout (`formats.swizzle`), and the global scale A / 6E:

    scale = [E4M3 bytes, swizzled; float32 [1]]     recipe = [BlockWise1x16, TensorWise]     swizzle = [32_4_4, none]

and rows of whole 16 bytes (K, padded to blocks, a multiple of 32), N a multiple of 16, a bias in the dtype of the
output. Scales of an activation are swizzled in every call; a weight cache holds its own (`FP4WeightCache.swizzled`).

**Not run yet**: none of this project's machines has such a GPU. What is passed is checked by torch's own rules for
these arguments, and decoded and multiplied in the tests.
"""

from __future__ import annotations

import os
import warnings
from functools import lru_cache

import torch
import torch.nn.functional as F

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.formats import E2M1_MAX, Nvfp4Tensor, swizzle_scales
from fp4deploy.plugins.gemm import dispatch
from fp4deploy.plugins.gemm.reference import Output
from fp4deploy.plugins.runtime.availability import why

BACKENDS = ("auto", "kernels", "scaled_mm")
VARIABLE = "FP4DEPLOY_MATMUL"
OLDEST_CUDA = (12, 8)


def packed_matmul(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    bias: torch.Tensor | None = None,
    relu: bool = False,
    dtype: torch.dtype = torch.float16,
    out_amax: torch.Tensor | None = None,
    backend: str | None = None,
    b_swizzled: torch.Tensor | None = None,
) -> Output:
    """`dispatch.matmul` of packed operands by the requested backend.

    Raises:
        InputError: operands that do not fit each other or the backend, an unknown backend.
        UnavailableError: "scaled_mm" where torch or the GPU lack it.
        RuntimeError, ValueError: torch's own, for "scaled_mm".
    """
    requested = chosen(backend)
    if requested != "kernels":
        missing = why_unavailable(a.codes.device)
        unfit = missing or why_unfit(a, b, bias, dtype, out_amax)
        if unfit is None:
            try:
                return scaled_matmul(a, b, bias, relu, dtype, b_swizzled)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, ValueError) as error:
                if requested == "scaled_mm":
                    raise
                warnings.warn(
                    f"torch's scaled_mm refused a GEMM ({error}); the kernels compute it instead. {VARIABLE}=kernels "
                    "uses them from the start.",
                    stacklevel=2,
                )
        elif requested == "scaled_mm":
            kind = UnavailableError if missing else InputError
            raise kind(f"torch's scaled_mm cannot compute this GEMM: {unfit}. Take the backend 'auto' or 'kernels'.")
    return dispatch.matmul(a, b, bias, relu, dtype, out_amax)


def chosen(backend: str | None) -> str:
    """The keyword, else FP4DEPLOY_MATMUL, else "auto".

    Raises:
        InputError: another value.
    """
    name = backend if backend is not None else os.environ.get(VARIABLE) or "auto"
    if name not in BACKENDS:
        where = "The backend" if backend is not None else VARIABLE
        raise InputError(f"{where} is '{name}'. Valid: {', '.join(BACKENDS)}.")
    return name


def why_unavailable(device: torch.device) -> str | None:
    """Why torch's FP4 `scaled_mm` does not run on a device; None where it should."""
    return why(device, _lacking)


@lru_cache
def _lacking(index: int) -> str | None:
    names = ("scaled_mm", "ScalingType", "SwizzleType")
    if not all(hasattr(F, name) for name in names) or not hasattr(torch, "float4_e2m1fn_x2"):
        return f"torch {torch.__version__} has no NVFP4 scaled_mm: pip install 'torch>=2.10'"
    if torch.version.hip is not None:
        return "torch is built for ROCm, and its scaled_mm has no NVFP4"
    cuda = torch.version.cuda or "0.0"
    if tuple(int(part) for part in cuda.split(".")[:2]) < OLDEST_CUDA:
        return f"torch is built for CUDA {cuda}, and NVFP4 begins with 12.8"
    present = Architecture.of_device(index)
    return None if present.major >= 10 else f"this GPU is {present}, and FP4 tensor cores begin with sm100"


def why_unfit(
    a: Nvfp4Tensor, b: Nvfp4Tensor, bias: torch.Tensor | None, dtype: torch.dtype, out_amax: torch.Tensor | None
) -> str | None:
    """Why `scaled_mm` cannot take operands that may be right for `dispatch.matmul`; None where it can.

    Wrong operands are refused here too; `dispatch.matmul` then raises the error that explains them.
    """
    if len(a.shape) == 0 or len(b.shape) != 2 or a.shape[-1] != b.shape[-1] or a.amax.numel() * b.amax.numel() != 1:
        return f"operands of shape {tuple(a.shape)} and {tuple(b.shape)} are not [..., K] and [N, K] with one amax each"
    if a.codes.shape[-1] % 16 or b.shape[0] % 16 or a.codes.numel() == 0:
        return f"K must be a multiple of 32, N of 16 and nothing empty; a is {tuple(a.shape)}, b {tuple(b.shape)}"
    if out_amax is not None:
        return "it writes no packed output (out_amax)"
    if dtype not in dispatch.DTYPES:
        return f"the output cannot be {dtype}"
    if bias is not None and (bias.shape != b.shape[:1] or not bias.is_floating_point()):
        return f"a bias of {bias.dtype} {tuple(bias.shape)} is no float [{b.shape[0]}]"
    parts = [part for x in (a, b) for part in (x.codes, x.scales, x.amax)] + ([] if bias is None else [bias])
    if len({part.device for part in parts}) > 1:
        return "operands lie on different devices"
    return "codes are not aligned to 16 bytes" if (a.codes.data_ptr() | b.codes.data_ptr()) % 16 else None


def scaled_matmul(
    a: Nvfp4Tensor,
    b: Nvfp4Tensor,
    bias: torch.Tensor | None,
    relu: bool,
    dtype: torch.dtype,
    b_swizzled: torch.Tensor | None = None,
) -> torch.Tensor:
    """torch's `scaled_mm` of operands that fit; the bias is rounded to `dtype` first, as cuBLAS takes it."""
    rows = a.codes.reshape(-1, a.codes.shape[-1])
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]
    out = F.scaled_mm(
        rows.view(torch.float4_e2m1fn_x2),
        b.codes.contiguous().view(torch.float4_e2m1fn_x2).t(),
        [swizzle_scales(a.scales.reshape(rows.shape[0], -1)), _global_scale(a)],
        recipe,
        [swizzle_scales(b.scales) if b_swizzled is None else b_swizzled, _global_scale(b)],
        recipe,
        swizzle,
        swizzle,
        bias=None if bias is None else bias.to(dtype),
        output_dtype=dtype,
    )
    return (out.relu_() if relu else out).reshape(*a.shape[:-1], b.shape[0])


def _global_scale(x: Nvfp4Tensor) -> torch.Tensor:
    return (x.amax / (E2M1_MAX * x.e4m3_max)).reshape(1)
