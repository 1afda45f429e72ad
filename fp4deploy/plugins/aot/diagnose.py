"""Diagnostics of a compiled kernel: the matrix instruction it uses, its register spills and its shared memory.

None of these shows in results. Where a tile has no FP4 instruction, Triton decodes the operands to FP16 and multiplies
those; a spilled register costs a round trip to local memory in the innermost loop. Both give correct numbers, slowly.
Too much shared memory fails only at the launch, on a GPU that the machine that compiles may not have.
"""

from __future__ import annotations

import json
from typing import Any

from fp4deploy.architecture import HARDWARE, Architecture
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime import cubin

WGMMA_ROWS = 64  # of one wgmma, which is a warpgroup's
MAX_SPILLS = 64  # bytes a thread: the two-source tile on sm_90 spills less than this, and is the fastest measured
MAX_SPILLS_UNEVEN = 256  # where K is not a multiple of the tile's depth (EVEN is false), and loads are masked


def diagnostics(compiled: Compiled) -> list[str]:
    """What is wrong with a kernel, a sentence each; empty where nothing is."""
    return [text for text in (_instruction(compiled), _spills(compiled), _shared(compiled)) if text]


def constants(compiled: Compiled) -> dict[str, Any]:
    """The values of a kernel's constexpr parameters."""
    return dict(json.loads(compiled.launch)["constants"])  # noqa: TID251  of this process


def _instruction(compiled: Compiled) -> str:
    found = ", ".join(compiled.instructions) or "no matrix instruction"
    values = constants(compiled)
    if values.get("NATIVE"):
        native = [cubin.NATIVE in name for name in compiled.instructions]
        return "" if native and all(native) else f"asked for {cubin.NATIVE} and got {found}"
    expected = _decoded(Architecture.parse(compiled.arch), values.get("BN" if values.get("SWAP") else "BM", WGMMA_ROWS))
    return "" if any(name.startswith(expected) for name in compiled.instructions) else f"no {expected[0]} but {found}"


def _decoded(arch: Architecture, rows: int) -> tuple[str, ...]:
    """The FP16 instructions that a kernel which decodes its operands may use, the expected one first."""
    if arch.tensor_memory:
        return "tcgen05.mma", "mma.sync"
    return ("wgmma.mma_async",) if arch.major == 9 and rows >= WGMMA_ROWS else ("mma.sync",)


def _spills(compiled: Compiled) -> str:
    limit = MAX_SPILLS if constants(compiled).get("EVEN", True) else MAX_SPILLS_UNEVEN
    return "" if compiled.spills <= limit else f"{compiled.spills} bytes a thread spilled"


def _shared(compiled: Compiled) -> str:
    limit = 1024 * HARDWARE[Architecture.parse(compiled.arch)].shared_kib
    return f"{compiled.shared} bytes of shared memory, and {limit} is the most" if compiled.shared > limit else ""
