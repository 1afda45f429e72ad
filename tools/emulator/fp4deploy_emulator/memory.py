"""Global memory of an emulated launch: the tensors of the caller, at the addresses that they have.

Only what was added can be accessed, byte by byte: an address beside a tensor is a hazard, also where the process owns
the memory. Bytes of tensors that were added as outputs must be written before they are read. Two thread blocks that
write different values to one byte have no order between them, which is a race.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard

Array = NDArray[Any]
NOBODY = -1


@dataclass
class Range:
    """The bytes of one tensor; `written`: which are defined (None: all), `writer`: the block that wrote each last."""

    start: int
    content: Array
    owner: Any = field(repr=False)
    written: Array | None = None
    writer: Array | None = None


class GlobalMemory:
    """Tensors by address."""

    def __init__(self) -> None:
        self.ranges: list[Range] = []
        self.starts = np.zeros(0, np.uint64)
        self.ends = np.zeros(0, np.uint64)

    def add(self, tensor: Any, output: bool = False) -> int:
        """Make a torch tensor accessible; `output`: its content is undefined. Returns its address."""
        start, size = int(tensor.data_ptr()), extent(tensor)
        known = next((each for each in self.ranges if each.start == start), None)
        if known is not None and known.content.size >= size:
            return start
        if size:
            content = np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(start)), np.uint8)
            self.ranges = [each for each in self.ranges if each.start != start]
            self.ranges.append(Range(start, content, tensor, np.zeros(size, bool) if output else None))
            self.ranges.sort(key=lambda each: each.start)
            self.starts = np.array([each.start for each in self.ranges], np.uint64)
            self.ends = np.array([each.start + each.content.size for each in self.ranges], np.uint64)
        return start

    def begin(self) -> None:
        """Forget who wrote what: a launch begins, and what came before is finished."""
        for each in self.ranges:
            each.writer = None

    def unwritten(self) -> int:
        """Bytes of outputs that nothing was written to."""
        return sum(int((~each.written).sum()) for each in self.ranges if each.written is not None)

    def read(self, addresses: Array, size: int) -> Array:
        """uint8 [n, size] at each of `addresses`, uint64 [n]."""
        out = np.empty((addresses.size, size), np.uint8)
        for each, chosen, at in self._places(addresses, size):
            if each.written is not None and not each.written[at].all():
                raise Hazard("uninitialised", "global memory is read before it was written")
            out[chosen] = each.content[at]
        return out

    def write(self, addresses: Array, values: Array, blocks: Array) -> None:
        """uint8 [n, size] to each address; `blocks` [n] are the thread blocks that write."""
        for each, chosen, at in self._places(addresses, values.shape[1]):
            if each.writer is None:
                each.writer = np.full(each.content.size, NOBODY, np.int32)
            who, mine, new = each.writer[at], blocks[chosen][:, None], values[chosen]
            if ((who != NOBODY) & (who != mine) & (each.content[at] != new)).any():
                raise Hazard("race", "two thread blocks write different values to one byte of global memory")
            each.writer[at] = mine
            each.content[at] = new
            if each.written is not None:
                each.written[at] = True

    def replace(self, addresses: Array, values: Array) -> None:
        """As `write`, by an atomic operation, which has an order with every other."""
        for each, chosen, at in self._places(addresses, values.shape[1]):
            each.content[at] = values[chosen]
            if each.writer is not None:
                each.writer[at] = NOBODY
            if each.written is not None:
                each.written[at] = True

    def _places(self, addresses: Array, size: int) -> list[tuple[Range, Array, Array]]:
        """(range, which of the addresses, positions [n, size])."""
        if not addresses.size:
            return []
        if (addresses % np.uint64(size)).any():
            bad = int(addresses[np.flatnonzero(addresses % np.uint64(size))[0]])
            raise Hazard("misaligned", f"{size} bytes of global memory at {bad:#x}")
        found = np.searchsorted(self.starts, addresses, "right").astype(np.int64) - 1
        outside = (found < 0) | (addresses + np.uint64(size) > self.ends[found])
        if not self.ranges or outside.any():
            bad = int(addresses[np.flatnonzero(outside)[0]]) if self.ranges else 0
            raise Hazard("out of bounds", f"{size} bytes of global memory at {bad:#x}{self._nearest(bad)}")
        offsets = np.arange(size)
        places = []
        for which in np.unique(found):
            chosen = np.flatnonzero(found == which)
            at = (addresses[chosen] - self.starts[which]).astype(np.int64)
            places.append((self.ranges[which], chosen, at[:, None] + offsets))
        return places

    def _nearest(self, address: int) -> str:
        before = [each for each in self.ranges if each.start <= address]
        if not before:
            return ""
        each = before[-1]
        return f", {address - each.start - each.content.size} bytes after the end of a tensor of {each.content.size}"


def extent(tensor: Any) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(last + 1) * int(tensor.element_size())
