"""Kernel bundles without compilers: real plans, and ELF headers in place of machine code, which no GPU would run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from fp4deploy.native import Plan, bundle
from fp4deploy.native.bundle import Code
from fp4deploy.native.plan import CudaKernel
from fp4deploy.packed import PackedFile
from fp4deploy.plugins.aot.compile import signature
from fp4deploy.plugins.aot.spec import Launch
from tests.plugins.aot.minimal_cubin import minimal_cubin


def code(kernel: Launch | CudaKernel) -> Code:
    """Name and parameters as the compiler would give them."""
    if isinstance(kernel, CudaKernel):
        return Code(minimal_cubin(kernel.name, 90, 8, bytes(64)), kernel.name, kernel.signature)
    name = kernel.kernel.partition(":")[2]
    cubin = minimal_cubin(name, 90, kernel.num_warps, bytes(64))
    return Code(cubin, name, signature(tuple(kind for _, kind in kernel.arguments)), 32 * kernel.num_warps, 65536)


def write_plain_bundle(path: Path, file: PackedFile, plans: Sequence[Plan]) -> None:
    """`write_bundle` without compilation."""
    with patch.object(bundle, "compiled", lambda kernels, plan, jobs=None: [code(kernel) for kernel in kernels]):
        bundle.write_bundle(path, file, plans)
