"""CUDA kernels that give the bytes of `fp4deploy.formats`: sources in `cuda/`, the compiler, the launching driver.

Nothing here is needed to train, export or measure: where kernels cannot run (`why_unavailable`) or
`FP4DEPLOY_KERNELS=off` is set, the torch reference does the same work, slower.
"""

from fp4deploy.plugins.compiler import KernelError, compile_cubin
from fp4deploy.plugins.driver import Kernel, available, kernel, why_unavailable

__all__ = ["Kernel", "KernelError", "available", "compile_cubin", "kernel", "why_unavailable"]
