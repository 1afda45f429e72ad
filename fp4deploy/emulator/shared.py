"""Shared memory of the emulated thread blocks, and who may touch which byte when.

**Order.** Warps and asynchronous units (copies, tensor cores) are agents. Each agent has a vector clock: for every
agent of its cluster, up to which of that agent's steps everything is known to have happened before. A barrier makes its
participants agree on the largest of their clocks; an mbarrier carries the clocks of those who arrived to those who
waited. Each byte remembers who wrote it last and when, and when each agent read it last. An access is in order if the
clock of its agent includes these; otherwise it is a race, whatever the bytes happen to be. Within a warp the order is
that of the program.

**Values.** A byte that was never written must not be read; one that an asynchronous copy is on its way to must not be
touched at all until the copy has been waited for.

Two agents that write the same value to a byte without an order are no race here: compilers let several threads store
one result.

Source: PTX ISA, "Memory Consistency Model"; L. Lamport, "Time, Clocks, and the Ordering of Events".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.emulator.faults import Hazard

Array = NDArray[Any]


class SharedMemory:
    """Of all thread blocks of a batch, one after the other.

    blocks, size: how many, and bytes of each. cluster: blocks of a cluster. agents: of a cluster, its warps first.
    unwritten: whether bytes may be read before they were written.
    """

    def __init__(self, blocks: int, size: int, cluster: int, agents: int, unwritten: bool = False) -> None:
        self.size, self.cluster, self.agents = size, cluster, agents
        self.content = np.full(blocks * size, 0xFF, np.uint8)
        self.written = np.full(blocks * size, unwritten)
        self.pending = np.zeros(blocks * size, bool)
        self.reserved = np.zeros(blocks * size, bool)  # mbarriers
        self.writer = np.zeros(blocks * size, np.int16)
        self.write_clock = np.zeros(blocks * size, np.int32)
        self.read_clock = np.zeros((blocks * size, agents), np.int32)
        domains = blocks // cluster
        self.clocks = np.tile(np.eye(agents, dtype=np.int32), (domains, 1, 1)).reshape(domains * agents, agents)
        self.own = np.tile(np.arange(agents), domains)

    def read(self, at: Array, rows: Array, asynchronous: bool = False) -> Array:
        """Bytes at positions `at` [n, size] by the agents `rows` [n] (domain x agents + agent)."""
        self._usable(at, asynchronous)
        if not self.written[at].all():
            raise Hazard(
                "uninitialised", "shared memory is read before it was written" + self._where(at, ~self.written[at])
            )
        row = rows[:, None]
        late: Array = self.write_clock[at] > self.clocks[row, self.writer[at]]
        if late.any():
            raise Hazard(
                "race", "shared memory is read, and the write before it may still come" + self._where(at, late)
            )
        self.read_clock[at, self.own[row]] = self.clocks[row, self.own[row]]
        return self.content[at]

    def write(self, at: Array, values: Array, rows: Array, check: bool = True) -> None:
        """Bytes [n, size] to positions `at` by the agents `rows`."""
        row = rows[:, None]
        if check:
            self._usable(at, False)
            self.claim(at, rows, values)
        self.content[at] = values
        self.written[at] = True
        self.writer[at] = self.own[row]
        self.write_clock[at] = self.clocks[row, self.own[row]]
        if check and (self.content[at] != values).any():
            raise Hazard("race", "threads write different values to one byte of shared memory at the same time")

    def claim(self, at: Array, rows: Array, values: Array | None = None) -> None:
        """Check that every earlier access to these bytes came before this write."""
        row = rows[:, None]
        late: Array = self.write_clock[at] > self.clocks[row, self.writer[at]]
        if values is not None:
            late &= self.content[at] != values
        if late.any():
            raise Hazard("race", "shared memory is written twice with no order" + self._where(at, late))
        reads = np.asarray((self.read_clock[at] > self.clocks[row]).any(-1))
        if values is not None:
            reads &= self.content[at] != values
        if reads.any():
            raise Hazard(
                "race", "shared memory is overwritten, and a read before it may still come" + self._where(at, reads)
            )

    def expect(self, at: Array, rows: Array) -> None:
        """An asynchronous copy into these bytes begins, issued by `rows`."""
        self._usable(at, False)
        self.claim(at, rows)
        self.pending[at] = True

    def arrived(self, at: Array, values: Array, rows: Array) -> None:
        """The copy has arrived: from now on `rows` is who wrote it."""
        self.pending[at] = False
        self.write(at, values, rows, check=False)

    def meet(self, rows: Array) -> None:
        """A barrier of agents [groups, members]: each group agrees on its largest clocks."""
        together = self.clocks[rows].max(1, keepdims=True)
        self.clocks[rows] = together
        self.advance(rows.reshape(-1))

    def advance(self, rows: Array) -> None:
        """A new step of these agents: what they do from now on is not what they released."""
        self.clocks[rows, self.own[rows]] += 1

    def join(self, row: int, clock: Array) -> None:
        """What is known to `clock` is known to the agent."""
        np.maximum(self.clocks[row], clock, out=self.clocks[row])

    def _usable(self, at: Array, asynchronous: bool) -> None:
        if self.pending[at].any():
            where = self._where(at, self.pending[at])
            raise Hazard("unwaited copy", "shared memory is accessed before a copy into it was waited for" + where)
        if not asynchronous and self.reserved[at].any():
            raise Hazard("barrier", "an mbarrier is accessed as data" + self._where(at, self.reserved[at]))

    def _where(self, at: Array, bad: Array) -> str:
        position = int(at[bad][0])
        return f" (block {position // self.size}, byte {position % self.size}; {int(bad.sum())} bytes)"
