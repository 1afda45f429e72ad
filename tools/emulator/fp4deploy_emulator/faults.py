"""What stops an emulated kernel: an instruction that is not implemented, or a hazard.

A hazard is a mistake that a GPU need not report: it may compute the right bytes today and wrong ones after a change of
timing, of the compiler or of the neighbouring allocation.

| kind | meaning |
|---|---|
| `race` | two threads, or a thread and an asynchronous copy, touch a byte of shared memory with no order between them |
| `unwaited copy` | shared memory is accessed while an asynchronous copy into it has not been waited for |
| `out of bounds` | an access outside of every tensor, or outside of the shared memory of the block |
| `misaligned` | an address that is no multiple of the size of the access |
| `uninitialised` | a register or a byte of memory is read before anything was written to it |
| `barrier` | a barrier, an mbarrier or a warp-wide instruction is used in a way that the PTX ISA leaves undefined |
| `deadlock` | every thread waits |
| `trap` | the kernel stops itself: what its compiler took to be impossible happened |
"""

from __future__ import annotations

from fp4deploy.errors import Fp4DeployError, GateError


class Fault(Fp4DeployError):
    """Base; the message ends with the line of PTX."""


class UnknownInstruction(Fault):
    """PTX that the emulator does not implement."""


class Hazard(Fault, GateError):
    """See the module's table; `kind` is its first column."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
