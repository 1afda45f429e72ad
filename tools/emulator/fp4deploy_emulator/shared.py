"""Shared memory of the emulated thread blocks, and who may touch which byte when (`order`).

A byte that was never written must not be read; one that an asynchronous copy is on its way to must not be touched at
all until the copy has been waited for.

Two agents that write the same value to a byte without an order are no race here: compilers let several threads store
one result.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard
from fp4deploy_emulator.order import WHOLE, Accesses, Order

Array = NDArray[Any]
UNFENCED = "{} reads what cp.async has copied, without fence.proxy.async"


class SharedMemory:
    """Of all thread blocks of a batch, one after the other.

    blocks, size: how many, and bytes of each. unwritten: whether bytes may be read before they were written. Accesses
    name the agents, `rows` [n] of `order`, and the lanes [n]; without lanes it is the whole warp, or a unit.
    """

    def __init__(self, order: Order, blocks: int, size: int, unwritten: bool = False) -> None:
        self.order, self.size = order, size
        self.content = np.full(blocks * size, 0xFF, np.uint8)
        self.written = np.full(blocks * size, unwritten)
        self.pending = np.zeros(blocks * size, bool)
        self.reserved = np.zeros(blocks * size, bool)  # mbarriers
        self.copied = np.zeros(blocks * size, bool)  # by cp.async
        self.accesses = Accesses(order, blocks * size)

    def read(
        self,
        at: Array,
        rows: Array,
        lanes: Array | None = None,
        unit: bool = False,
        remarks: set[str] | None = None,
        name: str = "wgmma",
    ) -> Array:
        """Bytes at positions `at` [n, size]; `unit`: by the asynchronous proxy.

        remarks: takes UNFENCED with `name`, which is a hazard otherwise.
        """
        self._usable(at)
        if not self.written[at].all():
            raise Hazard(
                "uninitialised", "shared memory is read before it was written" + self._where(at, ~self.written[at])
            )
        row, lane = rows[:, None], _column(lanes, rows)
        late = self.accesses.unordered_write(at, row, lane)
        if late.any():
            raise Hazard(
                "race", "shared memory is read, and the write before it may still come" + self._where(at, late)
            )
        hidden = self.accesses.unfenced(at, row) if unit else late
        if remarks is not None and (hidden & self.copied[at]).any():
            remarks.add(UNFENCED.format(name))
            hidden &= ~self.copied[at]
        if hidden.any():
            what = "shared memory is read by the asynchronous proxy without fence.proxy.async after the write"
            raise Hazard("race", what + self._where(at, hidden))
        self.accesses.read(at, row, lane)
        return self.content[at]

    def write(self, at: Array, values: Array, rows: Array, lanes: Array | None = None) -> None:
        """Bytes [n, size] to positions `at`."""
        self._usable(at)
        self.claim(at, rows, values, lanes)
        self._put(at, values, rows, lanes, generic=True)
        if (self.content[at] != values).any():
            raise Hazard("race", "threads write different values to one byte of shared memory at the same time")

    def claim(self, at: Array, rows: Array, values: Array | None = None, lanes: Array | None = None) -> None:
        """Check that every earlier access to these bytes came before this write."""
        row, lane = rows[:, None], _column(lanes, rows)
        late, reads = self.accesses.unordered_write(at, row, lane), self.accesses.unordered_read(at, row, lane)
        if values is not None:
            late, reads = late & (self.content[at] != values), reads & (self.content[at] != values)
        if late.any():
            raise Hazard("race", "shared memory is written twice with no order" + self._where(at, late))
        if reads.any():
            raise Hazard(
                "race", "shared memory is overwritten, and a read before it may still come" + self._where(at, reads)
            )

    def expect(self, at: Array, rows: Array, lanes: Array | None = None) -> None:
        """An asynchronous copy into these bytes begins, issued by `rows`."""
        self._usable(at)
        self.claim(at, rows, lanes=lanes)
        self.pending[at] = True

    def arrived(self, at: Array, values: Array, rows: Array, lanes: Array | None = None, generic: bool = False) -> None:
        """The copy has arrived: from now on `rows` is who wrote it; `generic`: by which proxy."""
        self.pending[at] = False
        self._put(at, values, rows, lanes, generic)
        self.copied[at] = generic

    def _put(self, at: Array, values: Array, rows: Array, lanes: Array | None, generic: bool) -> None:
        self.content[at] = values
        self.written[at], self.copied[at] = True, False
        self.accesses.write(at, rows[:, None], _column(lanes, rows), generic)

    def _usable(self, at: Array) -> None:
        if self.pending[at].any():
            where = self._where(at, self.pending[at])
            raise Hazard("unwaited copy", "shared memory is accessed before a copy into it was waited for" + where)
        if self.reserved[at].any():
            raise Hazard("barrier", "an mbarrier is accessed as data" + self._where(at, self.reserved[at]))

    def _where(self, at: Array, bad: Array) -> str:
        position = int(at[bad][0])
        return f" (block {position // self.size}, byte {position % self.size}; {int(bad.sum())} bytes)"


def _column(lanes: Array | None, rows: Array) -> Array:
    return np.full((len(rows), 1), WHOLE, np.int8) if lanes is None else lanes[:, None].astype(np.int8)
