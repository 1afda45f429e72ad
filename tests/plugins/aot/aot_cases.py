"""Launches of the example kernels, and where compiled ones come from in the tests."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fp4deploy.plugins.aot.spec import Launch

HERE = Path(__file__).parent
KERNELS = "aot_example.kernels"
ENVIRONMENT = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[2]), os.environ.get("PYTHONPATH", "")])}
BLOCK_TRITON = "import sys; sys.modules['triton'] = None\n"

SCALE = Launch(
    f"{KERNELS}:scale_kernel",
    (("x", "*fp32"), ("out", "*fp32"), ("n", "i32"), ("factor", "fp32")),
    (("BLOCK", 1024),),
    ("x", "out"),
)


def product(native: bool, bm: int = 128, bn: int = 128, bk: int = 128, warps: int = 8) -> Launch:
    """A tile of a GEMM, in FP4 or in FP16."""
    kind = "*u8" if native else "*fp16"
    arguments = (("a", kind), ("a_scales", "*u8"), ("b", kind), ("b_scales", "*u8"), ("out", "*fp32"), ("K", "i32"))
    constants = (("BM", bm), ("BN", bn), ("BK", bk), ("NATIVE", native))
    return Launch(f"{KERNELS}:matmul_kernel", arguments, constants, tuple(name for name, _ in arguments), warps, 2)


def environment(cache: Path, shipped: Path | None = None) -> dict[str, str]:
    """Environment of a process that imports the example kernels and uses these folders."""
    kept = {name: value for name, value in os.environ.items() if name not in ("FP4DEPLOY_KERNEL_PATH", "PYTHONPATH")}
    folder = {"FP4DEPLOY_KERNEL_PATH": str(shipped)} if shipped else {}
    return {**kept, **ENVIRONMENT, **folder, "FP4DEPLOY_CACHE": str(cache)}


if str(HERE) not in sys.path:  # for workers and for find_spec
    sys.path.insert(0, str(HERE))
