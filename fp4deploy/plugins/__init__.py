"""CUDA kernels that give the bytes of `fp4deploy.formats`: sources in `cuda/`, the compiler, the launching driver.

Nothing here is needed to train, export or measure: where kernels cannot run (`why_unavailable`) or
`FP4DEPLOY_KERNELS=off` is set, the torch reference does the same work, slower.

Each name is imported at first use, so that the compilers (`runtime.nvcc`, `aot`) and their workers start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fp4deploy.plugins.gemm.conv import fp4_conv2d
    from fp4deploy.plugins.gemm.grouped import fp4_grouped_linear
    from fp4deploy.plugins.gemm.linear import fp4_cached_linear, fp4_linear, fp4_matmul
    from fp4deploy.plugins.gemm.weight_cache import FP4WeightCache, fp4_quantize
    from fp4deploy.plugins.runtime.availability import available, why_unavailable
    from fp4deploy.plugins.runtime.launch import Kernel, kernel
    from fp4deploy.plugins.runtime.nvcc import KernelError, compile_cubin

__all__ = [
    "FP4WeightCache",
    "Kernel",
    "KernelError",
    "available",
    "compile_cubin",
    "fp4_cached_linear",
    "fp4_conv2d",
    "fp4_grouped_linear",
    "fp4_linear",
    "fp4_matmul",
    "fp4_quantize",
    "kernel",
    "why_unavailable",
]

_HOMES = {
    "FP4WeightCache": "gemm.weight_cache",
    "Kernel": "runtime.launch",
    "KernelError": "runtime.nvcc",
    "available": "runtime.availability",
    "compile_cubin": "runtime.nvcc",
    "fp4_cached_linear": "gemm.linear",
    "fp4_grouped_linear": "gemm.grouped",
    "fp4_conv2d": "gemm.conv",
    "fp4_linear": "gemm.linear",
    "fp4_matmul": "gemm.linear",
    "fp4_quantize": "gemm.weight_cache",
    "kernel": "runtime.launch",
    "why_unavailable": "runtime.availability",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found
