"""Whether a compiled kernel is what was asked for: the right instruction, nothing spilled, and a place on the GPU.

Nothing of it shows in results. A tile for which there is no FP4 instruction is decoded to FP16 and multiplied as such;
a spilled register is a trip to memory in the innermost loop; both are right, and slow. Too much shared memory is
refused at the launch, on a GPU that may not be there when the kernels are made.
"""

from __future__ import annotations

import json
from typing import Any

from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime import cubin

# KiB of shared memory a block can have; CUDA C++ Programming Guide, technical specifications per compute capability.
SHARED_KIB = {
    "sm_80": 163, "sm_86": 99, "sm_87": 163, "sm_89": 99, "sm_90": 227,
    "sm_100": 227, "sm_103": 227, "sm_120": 99, "sm_121": 99,
}  # fmt: skip
# What multiplies FP16 where a kernel decodes; wgmma needs 64 rows, which is a warp group's.
DECODED = {"sm_90": ("wgmma.mma_async",), "sm_100": ("tcgen05.mma", "mma.sync"), "sm_103": ("tcgen05.mma", "mma.sync")}
WGMMA_ROWS = 64
TOLERATED = 64  # bytes of spills a thread: the tile for two sources on sm_90 spills less, and is the fastest measured
TOLERATED_UNEVEN = 256  # where rows are no whole steps of the tile (EVEN is false) and their ends are checked


def complaints(compiled: Compiled) -> list[str]:
    """What is wrong with a kernel, in words; empty where it is as it should be."""
    return [text for text in (_instruction(compiled), _spills(compiled), _shared(compiled)) if text]


def constants(compiled: Compiled) -> dict[str, Any]:
    """The constexpr values that a kernel was compiled with."""
    return dict(json.loads(compiled.launch)["constants"])


def _instruction(compiled: Compiled) -> str:
    found = ", ".join(compiled.instructions) or "no matrix instruction"
    values = constants(compiled)
    if values.get("NATIVE"):
        native = [cubin.NATIVE in name for name in compiled.instructions]
        return "" if native and all(native) else f"asked for {cubin.NATIVE} and got {found}"
    wanted = DECODED.get(compiled.arch, ("mma.sync",))
    rows = values.get("BN" if values.get("SWAP") else "BM", WGMMA_ROWS)
    if compiled.arch == "sm_90" and rows < WGMMA_ROWS:
        wanted = ("mma.sync",)
    return "" if any(name.startswith(wanted) for name in compiled.instructions) else f"no {wanted[0]} but {found}"


def _spills(compiled: Compiled) -> str:
    limit = TOLERATED if constants(compiled).get("EVEN", True) else TOLERATED_UNEVEN
    return "" if compiled.spills <= limit else f"{compiled.spills} bytes a thread spilled"


def _shared(compiled: Compiled) -> str:
    limit = 1024 * SHARED_KIB[compiled.arch]
    return f"{compiled.shared} bytes of shared memory, and {limit} is the most" if compiled.shared > limit else ""
