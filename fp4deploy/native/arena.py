"""One block of memory for buffers that live from one launch to another: offsets without overlap in time and space.

Buffers are placed from large to small, each at the lowest offset where no buffer that lives at the same time lies. That
is not optimal (the problem is NP-hard), and needs no search.
"""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 256  # bytes; what cuMemAlloc gives, and kernels ask for at most 16


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `size` bytes that is written by launch `first` and read until launch `last`."""

    size: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        """Whether both live at one time."""
        return self.first <= other.last and other.first <= self.last


def place(buffers: list[Lifetime]) -> tuple[list[int], int]:
    """The offset of each buffer, and the bytes of all."""
    offsets = [0] * len(buffers)
    placed: list[int] = []
    total = 0
    for number in sorted(range(len(buffers)), key=lambda each: (-buffers[each].size, buffers[each].first, each)):
        buffer = buffers[number]
        taken = sorted((offsets[each], each) for each in placed if buffers[each].meets(buffer))
        at = 0
        for start, each in taken:
            if start - at >= buffer.size:
                break
            at = max(at, _aligned(start + buffers[each].size))
        offsets[number] = at
        placed.append(number)
        total = max(total, _aligned(at + buffer.size))
    return offsets, total


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
