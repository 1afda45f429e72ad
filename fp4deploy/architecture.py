"""GPU architectures: one type for every way in which tools write a compute capability.

| who | writes compute capability 12.0 as | here |
|---|---|---|
| torch, the driver | (12, 0) | `Architecture(12, 0)`, `.capability` |
| the command line, ledgers, reports | `sm120` | `str(...)` |
| Triton, files of compiled Triton kernels | `sm_120` | `.triton_name` |
| nvcc | `sm_120a` | `.nvcc_target` |
| choices that depend on the generation | 120 | `.number` |

From compute capability 9.0 on nvcc gets the suffix "a" (architecture-specific features): `wgmma` and the FP4
conversions exist only there. Such code runs on no other compute capability, which is true of every cubin.

FP4 tensor cores come in two forms that do not run each other's code. 10.x and 11.x have `tcgen05` instructions, which
multiply from shared memory into tensor memory; 12.x have `mma.sync` on registers, and less shared memory.

Sources: CUDA C++ Programming Guide, technical specifications per compute capability; PTX ISA, target notes of
`tcgen05.mma` and `mma`. The shared memory of 10.7 is the limit that ptxas of CUDA 13.4 states.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fp4deploy.errors import InputError


@dataclass(frozen=True, order=True)
class Architecture:
    """A GPU architecture, by its compute capability; older ones compare as smaller."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"sm{self.number}"

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability as torch gives it: (12, 0)."""
        return self.major, self.minor

    @property
    def number(self) -> int:
        """Compute capability as one number: 120."""
        return 10 * self.major + self.minor

    @property
    def triton_name(self) -> str:
        """Name in Triton, in `.kernel` files and in their folders: "sm_120"."""
        return f"sm_{self.number}"

    @property
    def nvcc_target(self) -> str:
        """Target of nvcc, with the features of this architecture alone from 9.0 on: "sm_89", "sm_120a"."""
        return f"sm_{self.number}{'a' if self.major >= 9 else ''}"

    @property
    def tensor_memory(self) -> bool:
        """Whether it has tensor memory and the `tcgen05` instructions: 10.x and 11.x."""
        return self.major in (10, 11)

    @classmethod
    def find(cls, text: str) -> Architecture | None:
        """Read "sm120", "sm_120", "sm_120a", "120" or "12.0", in either case; None for anything else."""
        found = re.fullmatch(r"(?:sm_?)?(\d{1,2})(?:(\d)|\.(\d))a?", text.strip().lower(), re.ASCII)
        return cls(int(found[1]), int(found[2] or found[3])) if found else None

    @classmethod
    def parse(cls, text: str, valid: Sequence[Architecture] = ()) -> Architecture:
        """As `find`, and one of `valid`, where any are given.

        Raises:
            InputError: it is none; the message lists the valid ones.
        """
        found = cls.find(text)
        if found is None or (valid and found not in valid):
            names = [str(each) for each in valid] or ["sm80", "sm_80", "8.0", "and so on"]
            raise InputError(f"'{text}' is not a supported GPU architecture. Valid: {', '.join(names)}.")
        return found

    @classmethod
    def of_device(cls, index: int | None = None) -> Architecture:
        """The architecture of a CUDA device that torch sees (default: its current one)."""
        import torch

        return cls(*torch.cuda.get_device_capability(index))


@dataclass(frozen=True)
class Hardware:
    """An architecture that Triton kernels are compiled for.

    gpus: products that have it.
    shared_kib: KiB of shared memory that a block can have.
    by_default: compiled where all architectures are requested; the others only by name.
    """

    gpus: str
    shared_kib: int
    by_default: bool = True


HARDWARE = {
    Architecture(8, 0): Hardware("A100", 163),
    Architecture(8, 6): Hardware("RTX 30", 99, by_default=False),
    Architecture(8, 7): Hardware("Jetson Orin", 163, by_default=False),
    Architecture(8, 9): Hardware("RTX 40, L40", 99),
    Architecture(9, 0): Hardware("H100, H200", 227),
    Architecture(10, 0): Hardware("B200, GB200", 227),
    Architecture(10, 3): Hardware("B300, GB300", 227),
    Architecture(10, 7): Hardware("Rubin", 227),
    Architecture(11, 0): Hardware("Jetson Thor", 227),
    Architecture(12, 0): Hardware("RTX 50, RTX PRO Blackwell", 99),
    Architecture(12, 1): Hardware("GB10 (DGX Spark)", 99),
}
