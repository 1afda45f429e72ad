"""cp.async: threads copy from global to shared memory and go on (PTX ISA, "Non-bulk copy: cp.async").

What was copied is visible to the thread after it waited for the group that the copy was committed to, and to other
threads after a barrier that follows. Here the bytes are read from global memory when the copy is issued and appear in
shared memory when it is waited for. Bytes beyond the source size are zeros and are not read.

cp.async.mbarrier.arrive (PTX ISA, "Parallel Synchronization and Communication Instructions") lets an mbarrier wait for
all copies that a thread has issued so far. It arrives when nobody else can run, and says nothing of the thread's other
accesses.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.bulk import advance, barrier_at, each_barrier, unit_row
from fp4deploy_emulator.instructions.control import constant
from fp4deploy_emulator.machine import WARP, Active, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader
from fp4deploy_emulator.ptx import Entry, Instruction

Array = NDArray[Any]


@dataclass
class Batch:
    """Copies of one instruction: by which threads, to which positions, the commit group of each, and its number."""

    threads: Array
    at: Array
    values: Array
    group: Array
    number: int


class Copies:
    """What is under way; `group`: how many groups each thread has committed."""

    def __init__(self, count: int) -> None:
        self.batches: list[Batch] = []
        self.group = np.zeros(count, np.int64)
        self.issued = 0

    def add(self, threads: Array, at: Array, values: Array) -> None:
        """Copies of one instruction begin."""
        self.batches.append(Batch(threads, at, values, self.group[threads], self.issued))
        self.issued += 1

    def wait(self, m: Machine, active: Active, left: int) -> None:
        """Finish all groups of the active threads but the newest `left`."""
        self._finish(m, lambda batch: active.mask[batch.threads] & (batch.group < self.group[batch.threads] - left))

    def wait_for(self, m: Machine, threads: Array, issued: int, row: int) -> None:
        """Finish copies of the first `issued` instructions, by these threads; `row`: the agent that they come from."""
        self._finish(m, lambda batch: np.isin(batch.threads, threads) & (batch.number < issued), row)

    def _finish(self, m: Machine, which: Callable[[Batch], Array], row: int | None = None) -> None:
        for batch in self.batches:
            done = which(batch)
            if done.any():
                threads = batch.threads[done]
                rows, lanes = (m.row[threads], threads % WARP) if row is None else (np.full(threads.size, row), None)
                m.shared.arrived(batch.at[done], batch.values[done], rows, lanes, generic=True)
                rest = ~done
                batch.threads, batch.group = batch.threads[rest], batch.group[rest]
                batch.at, batch.values = batch.at[rest], batch.values[rest]
        self.batches = [batch for batch in self.batches if batch.threads.size]


def _copies(m: Machine) -> Copies:
    copies: Copies = m.units.setdefault("cp.async", None) or Copies(m.count)
    m.units["cp.async"] = copies
    return copies


@implements("cp.async.ca", "cp.async.cg")
def copy(entry: Entry, instruction: Instruction) -> Step:
    """4, 8 or 16 bytes of a thread."""
    target, source = (address(entry, each) for each in instruction.operands[:2])
    size = constant(instruction.operands[2])
    filled = reader(entry, instruction.operands[3], "u32") if len(instruction.operands) > 3 else None

    def run(m: Machine, active: Active) -> None:
        index = active.index
        at = m.position(target(m, active)[index], size, m.block[index])
        taken = np.full(m.count, size) if filled is None else np.broadcast_to(filled(m, active), (m.count,))
        taken = taken[index]
        values = np.zeros((index.size, size), np.uint8)
        where = source(m, active)[index]
        for amount in np.unique(taken[taken > 0]):
            chosen = np.flatnonzero(taken == amount)
            places, width = where[chosen], int(amount)
            if width < size and (places % np.uint64(size)).any():  # however few are read
                raise Hazard("misaligned", f"cp.async of {size} bytes from {int(places[0]):#x} and others")
            unit = width & -width  # the largest part that lies at a multiple of itself
            for part in range(0, width, unit):
                values[chosen, part : part + unit] = m.memory.read(places + np.uint64(part), unit)
        m.shared.expect(at, m.row[index], index % WARP)
        _copies(m).add(index, at, values)

    return run


@implements("cp.async.commit_group")
def commit(entry: Entry, instruction: Instruction) -> Step:
    """Closes a thread's group."""

    def run(m: Machine, active: Active) -> None:
        _copies(m).group[active.mask] += 1

    return run


@implements("cp.async.wait_group", "cp.async.wait_all")
def wait(entry: Entry, instruction: Instruction) -> Step:
    """Until at most so many groups of the thread are under way."""
    everything = instruction.parts[-1] == "wait_all"
    left = -1 if everything else constant(instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        _copies(m).wait(m, active, left)

    return run


@implements("cp.async.mbarrier.arrive")
def arrive(entry: Entry, instruction: Instruction) -> Step:
    """An arrival for each thread when its copies so far have ended, of those that the mbarrier expects."""
    if "noinc" not in instruction.parts:
        raise UnknownInstruction("an mbarrier that expects one more arrival is not implemented")
    where = address(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        threads = defaultdict(list)
        for thread, position in each_barrier(m, active, where(m, active)):
            threads[position].append(thread)
        # All blocks at once: those that do the same go on together.
        m.asynchronous.append(partial(_arrived, m, threads, _copies(m).issued))

    return run


def _arrived(m: Machine, threads: dict[int, list[int]], issued: int) -> None:
    for position, each in threads.items():
        barrier, row = barrier_at(m, position), unit_row(m, position)
        _copies(m).wait_for(m, np.array(each), issued, row)
        np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
        m.order.advance(np.array([row]))
        barrier.pending -= len(each)
        advance(m, barrier)
