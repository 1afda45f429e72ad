"""What came before what: vector clocks, and the accesses that have no order.

Warps and asynchronous units (copies, tensor cores) are agents. Each agent has a vector clock: for every agent of its
cluster, up to which of that agent's steps everything is known to have happened before. A barrier makes its participants
agree on the largest of their clocks; an mbarrier carries the clocks of those who arrived to those who waited. Each cell
of a memory remembers who wrote it last and when, and when each agent read it last. An access is in order if the clock
of its agent includes these; otherwise it is a race, whatever the cell happens to hold.

**Proxies.** Ordinary stores to shared memory (the generic proxy) reach the units that read it by descriptors or bulk
copies (the asynchronous proxy) only through `fence.proxy.async`, anywhere between the store and the read. So a clock
has a second half: the steps up to which such a fence came. It travels with the first.

**Lanes.** Lanes of a warp have an order only through `bar.warp.sync` or a barrier of the block: shuffles, votes and
warp-wide loads promise none. Each cell remembers the lane that wrote it, and the lane (or that there were several) of
the warp that read it last, with the warp's count of such barriers then.

Source: PTX ISA, "Memory Consistency Model" (causality order, proxies); L. Lamport, "Time, Clocks, and the Ordering of
Events".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
WHOLE, SEVERAL = 32, 33  # in the place of a lane: the whole warp or a unit; more than one


class Order:
    """The clocks of all agents of a batch, row = domain x agents + agent; a domain is a cluster.

    clocks: [rows, 2 x agents], steps that came before, then steps that came before a proxy fence. own: the agent of
    each row. epoch: barriers so far that order the lanes of a warp.
    """

    def __init__(self, domains: int, agents: int) -> None:
        self.agents = agents
        first = np.concatenate([np.eye(agents, dtype=np.int32), np.zeros((agents, agents), np.int32)], 1)
        self.clocks = np.tile(first, (domains, 1))
        self.own = np.tile(np.arange(agents), domains)
        self.epoch = np.zeros(domains * agents, np.int32)

    def meet(self, rows: Array) -> None:
        """A barrier of agents [groups, members]: each group agrees on its largest clocks."""
        self.clocks[rows] = self.clocks[rows].max(1, keepdims=True)
        self.advance(rows.reshape(-1))
        self.epoch[rows.reshape(-1)] += 1

    def advance(self, rows: Array) -> None:
        """A new step of these agents: what they do from now on is not what they released."""
        self.clocks[rows, self.own[rows]] += 1

    def join(self, row: int, clock: Array) -> None:
        """What is known to `clock` is known to the agent."""
        np.maximum(self.clocks[row], clock, out=self.clocks[row])

    def fence(self, rows: Array) -> None:
        """What came before is visible to the asynchronous proxy."""
        self.clocks[rows, self.agents :] = self.clocks[rows, : self.agents]


class Accesses:
    """Of `cells` cells: who wrote and read each, and when."""

    def __init__(self, order: Order, cells: int) -> None:
        self.order = order
        self.writer = np.zeros(cells, np.int16)
        self.write_clock = np.zeros(cells, np.int32)
        self.write_lane, self.write_epoch = np.full(cells, WHOLE, np.int8), np.zeros(cells, np.int32)
        self.generic = np.zeros(cells, bool)  # written by the generic proxy
        self.read_clock = np.zeros((cells, order.agents), np.int32)
        self.reader = np.full(cells, -1, np.int16)
        self.read_lane, self.read_epoch = np.full(cells, WHOLE, np.int8), np.zeros(cells, np.int32)

    def unordered_write(self, at: Array, row: Array, lane: Array) -> Array:
        """Where the last write may still come; `at` [n, size], `row` and `lane` [n, 1]."""
        order, writer = self.order, self.writer[at]
        late = self.write_clock[at] > order.clocks[row, writer]
        other_lane = (self.write_lane[at] != lane) & (self.write_epoch[at] == order.epoch[row])
        found: Array = late | ((writer == order.own[row]) & other_lane & (self.write_clock[at] > 0))
        return found

    def unordered_read(self, at: Array, row: Array, lane: Array) -> Array:
        """Where a read may still come."""
        order = self.order
        late = (self.read_clock[at] > order.clocks[row, : order.agents]).any(-1)
        other_lane = (self.read_lane[at] != lane) & (self.read_epoch[at] == order.epoch[row])
        found: Array = late | ((self.reader[at] == order.own[row]) & other_lane)
        return found

    def unfenced(self, at: Array, row: Array) -> Array:
        """Where the last write was of the generic proxy, and no proxy fence followed."""
        order = self.order
        found: Array = self.generic[at] & (self.write_clock[at] > order.clocks[row, order.agents + self.writer[at]])
        return found

    def read(self, at: Array, row: Array, lane: Array) -> None:
        """Note a read."""
        order, own = self.order, self.order.own[row]
        self.read_clock[at, own] = order.clocks[row, own]
        again = (self.reader[at] == own) & (self.read_epoch[at] == order.epoch[row]) & (self.read_lane[at] != lane)
        self.reader[at], self.read_epoch[at] = own, order.epoch[row]
        self.read_lane[at] = np.where(again, SEVERAL, lane)
        shared = self.read_lane[at] != np.where(again, SEVERAL, lane)
        self.read_lane[at[shared]] = SEVERAL

    def write(self, at: Array, row: Array, lane: Array, generic: bool) -> None:
        """Note a write."""
        order, own = self.order, self.order.own[row]
        self.writer[at], self.write_clock[at] = own, order.clocks[row, own]
        self.write_lane[at], self.write_epoch[at], self.generic[at] = lane, order.epoch[row], generic
