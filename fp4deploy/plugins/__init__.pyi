from .gemm.conv import fp4_conv2d
from .gemm.grouped import fp4_grouped_linear
from .gemm.linear import fp4_cached_linear, fp4_linear, fp4_matmul
from .gemm.weight_cache import FP4WeightCache, fp4_quantize
from .runtime.availability import available, why_unavailable
from .runtime.launch import Kernel, kernel
from .runtime.nvcc import KernelError, compile_cubin

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
