"""mbarriers, and bulk copies that complete on them.

| instructions | PTX ISA |
|---|---|
| mbarrier.init, inval, arrive, expect_tx, try_wait, test_wait | Asynchronous Barriers: mbarrier |
| cp.async.bulk (to shared memory) | Bulk Copy: cp.async.bulk |

An mbarrier has phases. A phase is complete when as many arrivals came as `init` said and the bytes that were announced
(`expect_tx`) have arrived. A thread that waits is put aside until a phase completes; waiting for a parity succeeds if
the phase of that parity is over.

`mbarrier.arrive` returns a state: here the number of the phase, for which `mbarrier.test_wait` can wait instead of a
parity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.machine import WARP, WINDOW, Active, Continue, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader, writer
from fp4deploy_emulator.ptx import Entry, Instruction

Array = NDArray[Any]
LIMIT = (1 << 20) - 1  # of pending arrivals


@dataclass
class Barrier:
    """One mbarrier: arrivals of a phase, those still pending, bytes still expected, the current phase."""

    count: int
    pending: int
    clock: Array
    transaction: int = 0
    phase: int = 0

    def finished(self) -> bool:
        """Begin the next phase if this one is complete."""
        if self.pending or self.transaction:
            return False
        self.phase += 1
        self.pending = self.count
        return True


@dataclass
class Barriers:
    """All mbarriers of a batch, by position in shared memory; agents by cluster and asynchronous work."""

    known: dict[int, Barrier]
    slots: dict[tuple[int, int], int]


def barriers(m: Machine) -> Barriers:
    """Those of a machine."""
    found: Barriers = m.units.setdefault("mbarriers", Barriers({}, {}))
    return found


def place(m: Machine, where: int, block: int) -> int:
    """Position of an mbarrier at an address, as a block sees it."""
    return int(m.position(np.array([where]), 8, np.array([block]))[0, 0])


def barrier_at(m: Machine, position: int) -> Barrier:
    """The mbarrier there.

    Raises:
        Hazard: there is none.
    """
    found = barriers(m).known.get(position)
    if found is None:
        raise Hazard("barrier", f"there is no mbarrier at byte {position % m.shared.size} of shared memory")
    return found


def advance(m: Machine, barrier: Barrier) -> None:
    """After an arrival: wake those who wait if the phase is complete."""
    if barrier.pending < 0 or barrier.transaction < -LIMIT:
        raise Hazard("barrier", f"more arrivals came to an mbarrier than its {barrier.count}")
    if barrier.finished():
        for pc, mask in m.parked.items():
            m.wake(pc, mask)
        m.parked = {}


def unit_row(m: Machine, position: int) -> int:
    """The agent that stands for the asynchronous work which completes on an mbarrier."""
    return agent_of(m, position // (m.shared.size * m.cluster), position)


def agent_of(m: Machine, cluster: int, work: int) -> int:
    """The agent of a cluster for a kind of asynchronous work, the same one for the same number."""
    slots = barriers(m).slots
    if (cluster, work) not in slots:
        used = sum(1 for other, _ in slots if other == cluster)
        if m.cluster * m.warps + used >= m.units_from:
            raise UnknownInstruction("more mbarriers with asynchronous work than the emulator keeps apart")
        slots[cluster, work] = cluster * m.agents + m.cluster * m.warps + used
    return slots[cluster, work]


def each_barrier(m: Machine, active: Active, addresses: Array) -> list[tuple[int, int]]:
    """(thread, position of its mbarrier) of the active threads."""
    index = active.index
    positions = m.position(addresses[index], 8, m.block[index])[:, 0]
    return list(zip(index.tolist(), positions.tolist(), strict=True))


@implements("mbarrier.init")
def initialise(entry: Entry, instruction: Instruction) -> Step:
    """Make an mbarrier of so many arrivals."""
    where, count = address(entry, instruction.operands[0]), reader(entry, instruction.operands[1], "u32")

    def run(m: Machine, active: Active) -> None:
        amounts = np.broadcast_to(count(m, active), (m.count,))
        for thread, position in each_barrier(m, active, where(m, active)):
            if position in barriers(m).known:
                raise Hazard("barrier", "an mbarrier is initialised twice")
            amount = int(amounts[thread])
            if not 0 < amount <= LIMIT:
                raise Hazard("barrier", f"an mbarrier of {amount} arrivals")
            at = np.arange(position, position + 8)[None]
            m.shared.write(at, np.zeros((1, 8), np.uint8), m.row[[thread]], np.array([thread % WARP]))
            m.shared.reserved[position : position + 8] = True
            barriers(m).known[position] = Barrier(amount, amount, m.order.clocks[m.row[thread]].copy())

    return run


@implements("mbarrier.inval")
def invalidate(entry: Entry, instruction: Instruction) -> Step:
    """Make an mbarrier ordinary memory again."""
    where = address(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        for _, position in each_barrier(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            if barrier.transaction:
                raise Hazard("barrier", "an mbarrier is invalidated while bytes are expected")
            del barriers(m).known[position]
            m.shared.reserved[position : position + 8] = False

    return run


@implements("mbarrier.arrive", "mbarrier.expect_tx")
def arrive(entry: Entry, instruction: Instruction) -> Step:
    """One arrival, and bytes to wait for; the state it returns is the phase."""
    parts = instruction.parts
    sink, target = instruction.operands[0], instruction.operands[1] if "arrive" in parts else instruction.operands[0]
    state = writer(entry, sink) if "arrive" in parts and getattr(sink, "name", "") != "_" else None
    if state is not None and "shared::cluster" in parts:
        raise UnknownInstruction("an mbarrier of another block returns no state")
    expects, arrives = "expect_tx" in parts, "arrive" in parts
    where = address(entry, target)
    more = instruction.operands[2 if arrives else 1 :]
    amount = reader(entry, more[0], "u32") if more else None

    def run(m: Machine, active: Active) -> None:
        amounts = np.broadcast_to(amount(m, active), (m.count,)) if amount else np.ones(m.count, np.uint32)
        phases = np.zeros(m.count, np.uint64)
        for thread, position in each_barrier(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            row = int(m.row[thread])
            phases[thread] = barrier.phase
            np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
            if expects:
                barrier.transaction += int(amounts[thread])
            if arrives:
                barrier.pending -= 1 if expects else int(amounts[thread])
            advance(m, barrier)
        m.order.advance(np.unique(m.row[active.index]))
        if state is not None:
            state(m, active, phases)

    return run


@implements("mbarrier.try_wait", "mbarrier.test_wait", control=True)
def wait(entry: Entry, instruction: Instruction) -> Step:
    """Whether the phase of a parity or state is over. A thread that tries again waits until a phase completes."""
    if instruction.guard:
        raise UnknownInstruction("this form of waiting for an mbarrier is not implemented")
    by_parity = "parity" in instruction.parts
    result = writer(entry, instruction.operands[0])
    where, phase = address(entry, instruction.operands[1]), instruction.operands[2]
    parity = reader(entry, phase, "u32" if by_parity else "u64")

    def run(m: Machine, active: Active) -> Continue:
        parities = np.broadcast_to(parity(m, active), (m.count,))
        over = np.zeros(m.count, bool)
        for thread, position in each_barrier(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            asked = int(parities[thread])
            if barrier.phase % 2 != asked & 1 if by_parity else barrier.phase > asked:
                over[thread] = True
                m.order.join(int(m.row[thread]), barrier.clock)
                m.order.epoch[m.row[thread]] += 1
        done, rest = active.mask & over, active.mask & ~over
        # The PTX ISA allows to give up, so that the first attempt fails: the program must be written to try again.
        tried = m.units.setdefault("tried", {}).setdefault(m.pc, np.zeros(m.count, bool))
        patient, early = rest & tried, rest & ~tried
        m.units["tried"][m.pc] = (tried | early) & ~done
        if patient.any():
            m.parked[m.pc] = m.parked.get(m.pc, np.zeros(m.count, bool)) | patient
        back = done | early
        if back.any():
            result(m, Active(back), done)
        return [(m.pc + 1, back)]

    return run


@implements("cp.async.bulk.shared::cluster", "cp.async.bulk.shared::cta")
def copy_bytes(entry: Entry, instruction: Instruction) -> Step:
    """Contiguous bytes to shared memory, with multicast of several blocks of the cluster."""
    if "global" not in instruction.parts or "mbarrier::complete_tx::bytes" not in instruction.parts:
        raise UnknownInstruction("this bulk copy is not implemented")
    multicast = "multicast::cluster" in instruction.parts
    to, source = (address(entry, each) for each in instruction.operands[:2])
    amount, signal = reader(entry, instruction.operands[2], "u32"), address(entry, instruction.operands[3])
    members = reader(entry, instruction.operands[4], "u16") if multicast else None

    def run(m: Machine, active: Active) -> None:
        starts, sources, signals = to(m, active), source(m, active), signal(m, active)
        amounts = np.broadcast_to(amount(m, active), (m.count,))
        masks = np.broadcast_to(members(m, active), (m.count,)) if members else None
        for thread in active.index.tolist():
            count, start = int(amounts[thread]), int(starts[thread])
            if count % 16 or start % 16 or int(sources[thread]) % 16:
                raise Hazard("misaligned", f"a bulk copy of {count} bytes; size and addresses are multiples of 16")
            words = sources[thread] + np.arange(0, count, 16, dtype=np.uint64)
            values = m.memory.read(words, 16).reshape(-1)
            mask = None if masks is None else int(masks[thread])
            begin(m, thread, start + np.arange(count), values, targets(m, thread, start, int(signals[thread]), mask))

    return run


def targets(
    m: Machine, thread: int, start: int, signal: int, mask: int | None = None, pair: bool = False
) -> list[tuple[int, int]]:
    """The blocks that a copy goes to, each with the position of the mbarrier that it is signalled to.

    Args:
        start, signal: addresses of the destination and of the mbarrier. mask: ranks in the cluster, of a multicast;
        it signals the same offset in each. pair: .cta_group::2: the mbarrier may lie in either block of a pair. That
        of a multicast is in the even blocks of
            the pairs, or in the odd ones, as `signal` is.

    Raises:
        Hazard: a block outside of the cluster; an mbarrier of another block than the destination's.
    """
    first = int(m.block[thread]) // m.cluster * m.cluster
    if mask is not None and mask >> m.cluster:
        raise Hazard("out of bounds", "a multicast to more blocks than the cluster has")
    ranks = [start // WINDOW] if mask is None else [rank for rank in range(m.cluster) if mask >> rank & 1]
    found, of_signal = [], signal // WINDOW
    for rank in ranks:
        signalled = rank if not pair else rank & ~1 | of_signal & 1
        if mask is None and of_signal != signalled:
            raise Hazard("barrier", "a copy is signalled to an mbarrier of another block than its destination's")
        found.append((first + rank, place(m, signal % WINDOW + signalled * WINDOW, first)))
    return found


def begin(m: Machine, thread: int, addresses: Array, values: Array, to: list[tuple[int, int]]) -> None:
    """A copy to the same offsets in each block of `to`, signalled to the mbarrier at a position.

    It arrives when nobody else can run.
    """
    issuer = int(m.row[thread])
    for block, position in to:
        there = addresses % WINDOW + block % m.cluster * WINDOW
        at = m.position(there, 1, np.full(addresses.size, block))
        m.shared.expect(at, np.full(len(at), issuer), np.full(len(at), thread % WARP))
        barrier_at(m, position)
        m.asynchronous.append(partial(_arrived, m, at, values, position))


def _arrived(m: Machine, at: Array, values: Array, position: int) -> None:
    barrier = barrier_at(m, position)
    row = unit_row(m, position)
    m.shared.arrived(at, values[:, None], np.full(len(at), row))
    np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
    m.order.advance(np.array([row]))
    barrier.transaction -= values.size
    advance(m, barrier)
