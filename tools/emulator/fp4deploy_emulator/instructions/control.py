"""Branches, barriers, votes and shuffles.

| instructions | PTX ISA |
|---|---|
| bra, ret, exit | Control Flow Instructions |
| trap | Miscellaneous Instructions |
| bar, barrier, barrier.cluster, elect, vote, activemask, griddepcontrol | Parallel Synchronization Instructions |
| shfl | Data Movement Instructions: shfl.sync |
| membar, fence | Parallel Synchronization: membar, fence |

`bar.sync` needs every thread of the block, or as many as it says; threads that have ended will never come. A launch of
the emulator is alone, so that `griddepcontrol` waits for nothing. Memory is in order, so that other fences than those
of proxies have no effect; what may overtake what is the business of `order`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.machine import WARP, Active, Continue, Machine, Step, implements
from fp4deploy_emulator.operands import Reader, pair_of, reader, writer
from fp4deploy_emulator.ptx import Entry, Immediate, Instruction, Operand, Symbol

Array = NDArray[Any]
EVERYBODY = 0xFFFFFFFF
CLUSTER = -1  # the barrier of a cluster, beside the numbered ones of its blocks


@implements("bra", control=True)
def branch(entry: Entry, instruction: Instruction) -> Step:
    """To a label, for the threads whose predicate holds."""
    label = instruction.operands[0]
    assert isinstance(label, Symbol)
    target = entry.labels[label.name]

    def run(m: Machine, active: Active) -> Continue:
        chosen = m.guard(instruction, active)
        if chosen is active:
            return [(target, active.mask)]
        return [(target, chosen.mask), (m.pc + 1, active.mask & ~chosen.mask)]

    return run


@implements("ret", "exit", control=True)
def end(entry: Entry, instruction: Instruction) -> Step:
    """The thread ends."""

    def run(m: Machine, active: Active) -> Continue:
        chosen = m.guard(instruction, active)
        m.exited = m.exited | chosen.mask
        return [(m.pc + 1, active.mask & ~chosen.mask)] if chosen is not active else []

    return run


@implements("trap")
def trap(entry: Entry, instruction: Instruction) -> Step:
    """The kernel stops with an error."""

    def run(m: Machine, active: Active) -> None:
        if m.guard(instruction, active).mask.any():
            raise Hazard("trap", "a thread executes it")

    return run


@implements("fence.proxy.async")
def proxy_fence(entry: Entry, instruction: Instruction) -> Step:
    """What came before is visible to the asynchronous proxy."""
    return lambda m, active: m.order.fence(np.unique(m.row[active.index]))


@implements(
    "membar", "fence", "griddepcontrol", "prefetch", "pragma", "tcgen05.fence", "discard", "setmaxnreg", "createpolicy"
)
def nothing(entry: Entry, instruction: Instruction) -> Step:
    """Order that the emulator always has, and hints."""
    return lambda m, active: None


@implements("bar.sync", "barrier.sync", "bar.red", "bar.cta.sync", "barrier.cta.sync", control=True)
def barrier(entry: Entry, instruction: Instruction) -> Step:
    """Waits for the other threads of the block; bar.red also combines a predicate of all."""
    if instruction.guard:
        raise UnknownInstruction("a barrier with a predicate is not implemented")
    operands = list(instruction.operands)
    reduce = instruction.parts[0] == "bar" and "red" in instruction.parts
    result = writer(entry, operands.pop(0)) if reduce else None
    source = reader(entry, operands.pop(), "pred") if reduce else None
    number = reader(entry, operands[0], "u32")
    count = reader(entry, operands[1], "u32") if len(operands) > 1 else None
    combine = {"or": np.any, "and": np.all}.get(next((part for part in instruction.parts if part in ("or", "and")), ""))
    aligned = instruction.parts[0] == "bar" or "aligned" in instruction.parts

    def run(m: Machine, active: Active) -> Continue:
        if aligned:
            active = _complete_warps(m, active)
            if not active.mask.any():
                return []
        which = np.broadcast_to(number(m, active), (m.count,))
        if which[active.mask].min() != which[active.mask].max():
            raise Hazard("barrier", "threads of one instruction wait at different barriers")
        name = int(which[active.index[0]])
        needed = int(np.broadcast_to(count(m, active), (m.count,))[active.index[0]]) if count else None
        if needed is not None and (needed % WARP or needed > m.padded):
            raise Hazard("barrier", f"a barrier of {needed} threads; multiples of {WARP} up to {m.padded} are possible")
        value = np.broadcast_to(source(m, active), (m.count,)) if source else None
        return _arrive(m, active, name, needed, value, result, combine)

    return run


def _complete_warps(m: Machine, active: Active) -> Active:
    """The lanes here whose warps are complete; others are held, since those that lack may run code laid out behind.

    Lanes that come in different iterations of a loop are taken for those of one.
    """
    here = active.mask | m.held.pop(m.pc) if m.pc in m.held else active.mask
    lanes, started = here.reshape(-1, WARP), m.started.reshape(-1, WARP)
    ready = np.repeat((lanes == started).all(1), WARP) & here
    if (here & ~ready).any():
        m.held[m.pc] = here & ~ready
    return active if np.array_equal(ready, active.mask) else Active(ready)


def _arrive(
    m: Machine, active: Active, name: int, needed: int | None, value: Any, result: Any, combine: Any
) -> Continue:
    waiting: dict[int, Array] = m.waiting.setdefault((name, 0), {})
    for pc, mask in waiting.items():
        if (mask & active.mask).any() and pc != m.pc:
            raise Hazard("barrier", "a thread waits twice at a barrier")
    waiting[m.pc + 1] = waiting[m.pc + 1] | active.mask if m.pc + 1 in waiting else active.mask
    if value is not None:
        kept = m.units.setdefault("bar.red", np.zeros(m.count, bool))
        kept[active.mask] = value[active.mask]
    everyone: Array = np.zeros(m.count, bool)
    for mask in waiting.values():
        everyone |= mask
    arrived = everyone.reshape(m.blocks, m.padded)
    if needed is None:
        complete: Array = (arrived == m.started.reshape(m.blocks, m.padded)).all(1)
        ended = (m.exited & m.started).reshape(m.blocks, m.padded)
        stuck = ((arrived | ended) == m.started.reshape(m.blocks, m.padded)).all(1) & ~complete & arrived.any(1)
        if stuck.any():
            raise Hazard("barrier", "a barrier of all threads of a block, some of which have ended")
    else:
        if (arrived.sum(1) > needed).any():
            raise Hazard("barrier", f"{int(arrived.sum(1).max())} threads come to a barrier of {needed}")
        complete = arrived.sum(1) == needed
    if not complete.any():
        return []
    free = np.repeat(complete, m.padded) & everyone
    _order(m, np.flatnonzero(complete), free)
    followers: Continue = []
    for pc in [*waiting]:
        go = waiting[pc] & free
        rest = waiting[pc] & ~free
        waiting.pop(pc)
        if rest.any():
            waiting[pc] = rest
        followers.append((pc, go))
    if value is not None:
        kept = m.units["bar.red"].reshape(m.blocks, m.padded)
        masked = np.where(arrived, kept, combine is np.all)
        result(m, Active(free), np.repeat(combine(masked, axis=1), m.padded))
    return followers


def _order(m: Machine, blocks: Array, mask: Array) -> None:
    """What the warps of each block did before the barrier came before what they do after it."""
    rows = m.row.reshape(m.blocks, m.warps, WARP)[:, :, 0]
    inside = np.asarray(mask.reshape(m.blocks, m.warps, WARP).any(2))
    if inside[blocks].all():
        m.order.meet(rows[blocks])
        return
    for block in blocks:
        m.order.meet(rows[block][inside[block]][None])


def together(instruction: Instruction, members: Reader, work: Callable[[Machine, Active, Array], None]) -> Step:
    """A step that waits, warp by warp, until all lanes of the member mask are there, and then does `work` for them.

    `work` gets the lanes [warps, 32].
    """

    def run(m: Machine, active: Active) -> Continue | None:
        chosen = m.guard(instruction, active)
        if chosen.full and m.started.all() and (members(m, chosen) == EVERYBODY).all():
            work(m, chosen, chosen.mask.reshape(-1, WARP))
            return None
        passing = active.mask & ~chosen.mask
        here = chosen.mask | m.held.pop(m.pc) if m.pc in m.held else chosen.mask
        lanes = here.reshape(-1, WARP)
        mask = np.broadcast_to(members(m, Active(here)), (m.count,)).reshape(-1, WARP)
        first = mask[np.arange(len(lanes)), lanes.argmax(1)]
        named = (first[:, None] >> np.arange(WARP, dtype=np.uint32) & np.uint32(1)).astype(bool)
        named &= m.started.reshape(-1, WARP)
        some = lanes.any(1)
        if (some & (lanes & ~named).any(1)).any():
            raise Hazard("barrier", f"{instruction.parts[0]} is executed by lanes that its member mask does not name")
        complete = some & (lanes == named).all(1)
        ready = np.repeat(complete, WARP) & here
        if ready.any():
            work(m, Active(ready), ready.reshape(-1, WARP))
        if chosen is active and np.array_equal(ready, active.mask):
            return None
        if (here & ~ready).any():
            m.held[m.pc] = here & ~ready
        return [(m.pc + 1, ready | passing)]

    return run


@implements("bar.warp.sync", control=True)
def warp_barrier(entry: Entry, instruction: Instruction) -> Step:
    """The lanes meet; what they did before comes before what they do after."""

    def work(m: Machine, active: Active, lanes: Array) -> None:
        m.order.epoch[m.row.reshape(-1, WARP)[lanes.any(1), 0]] += 1

    return together(instruction, reader(entry, instruction.operands[0], "u32"), work)


def _rank_rows(m: Machine, clusters: Array) -> Array:
    """Agents of all warps of clusters."""
    rows = m.row.reshape(m.blocks, m.warps, WARP)[:, :, 0].reshape(-1, m.cluster * m.warps)
    return rows[clusters]


@implements("barrier.cluster.arrive", "barrier.cluster.wait", control=True)
def cluster_barrier(entry: Entry, instruction: Instruction) -> Step:
    """Arrive, then wait for all threads of the cluster."""
    arriving = "arrive" in instruction.parts
    if instruction.guard:
        raise UnknownInstruction("a barrier with a predicate is not implemented")

    def run(m: Machine, active: Active) -> Continue | None:
        state = m.units.setdefault("cluster", {"arrived": np.zeros(m.count, bool), "waiting": {}})
        if arriving:
            if (state["arrived"] & active.mask).any():
                raise Hazard("barrier", "a thread arrives twice at the barrier of its cluster")
            state["arrived"] = state["arrived"] | active.mask
            return None
        if (~state["arrived"] & active.mask).any():
            raise Hazard("barrier", "a thread waits at the barrier of its cluster without having arrived")
        waiting = state["waiting"]
        waiting[m.pc + 1] = waiting.get(m.pc + 1, np.zeros(m.count, bool)) | active.mask
        everyone: Array = np.zeros(m.count, bool)
        for mask in waiting.values():
            everyone |= mask
        complete: Array = (everyone == m.started).reshape(-1, m.cluster * m.padded).all(1)
        free = np.repeat(complete, m.cluster * m.padded)
        if not complete.any():
            return []
        m.order.meet(_rank_rows(m, np.flatnonzero(complete)))
        state["arrived"] = state["arrived"] & ~free
        followers = [(pc, mask & free) for pc, mask in waiting.items()]
        state["waiting"] = {pc: mask & ~free for pc, mask in waiting.items() if (mask & ~free).any()}
        return followers

    return run


@implements("elect", control=True)
def elect(entry: Entry, instruction: Instruction) -> Step:
    """d|p: the lowest member lane, and true in it alone."""
    first, second = pair_of(instruction.operands[0])
    leader = writer(entry, first)
    chosen = writer(entry, second) if second else None
    members = reader(entry, instruction.operands[1], "u32")

    def work(m: Machine, active: Active, lanes: Array) -> None:
        lowest = lanes.argmax(1).astype(np.uint32)
        leader(m, active, np.repeat(lowest, WARP))
        if chosen:
            chosen(m, active, (np.arange(m.count) % WARP) == np.repeat(lowest, WARP))

    return together(instruction, members, work)


@implements("vote", control=True)
def vote(entry: Entry, instruction: Instruction) -> Step:
    """all, any, uni, ballot of a predicate over the member lanes."""
    mode = instruction.parts[2]
    result = writer(entry, instruction.operands[0])
    source = reader(entry, instruction.operands[1], "pred")
    members = reader(entry, instruction.operands[2], "u32")
    fold: dict[str, Any] = {"all": np.all, "any": np.any}

    def work(m: Machine, active: Active, lanes: Array) -> None:
        value = np.broadcast_to(source(m, active), (m.count,)).reshape(-1, WARP)
        if mode == "ballot":
            bits = ((value & lanes) << np.arange(WARP, dtype=np.uint64)).sum(1)
            result(m, active, np.repeat(bits.astype(np.uint32), WARP))
            return
        masked = np.where(lanes, value, mode == "all")
        result(m, active, np.repeat(fold[mode](masked, axis=1), WARP))

    return together(instruction, members, work)


@implements("redux", control=True)
def reduce(entry: Entry, instruction: Instruction) -> Step:
    """add, min, max, and, or, xor of a register over the member lanes."""
    _, _, mode, kind = instruction.parts
    if kind not in ("u32", "s32", "b32"):
        raise UnknownInstruction("redux of this type is not implemented")
    fold: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
    fold |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    neutral = {"min": np.iinfo(np.int64).max, "max": np.iinfo(np.int64).min, "and": -1}.get(mode, 0)
    result, source = writer(entry, instruction.operands[0]), reader(entry, instruction.operands[1], kind)
    members = reader(entry, instruction.operands[2], "u32")

    def work(m: Machine, active: Active, lanes: Array) -> None:
        value = np.broadcast_to(source(m, active), (m.count,)).reshape(-1, WARP).astype(np.int64)
        folded = fold[mode].reduce(np.where(lanes, value, neutral), axis=1)
        result(m, active, np.repeat(folded.astype(np.uint32), WARP))

    return together(instruction, members, work)


@implements("activemask")
def active_mask(entry: Entry, instruction: Instruction) -> Step:
    """Bits of the lanes that execute this together."""
    result = writer(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        bits = (active.mask.reshape(-1, WARP).astype(np.uint64) << np.arange(WARP, dtype=np.uint64)).sum(1)
        result(m, active, np.repeat(bits.astype(np.uint32), WARP))

    return run


@implements("shfl", control=True)
def shuffle(entry: Entry, instruction: Instruction) -> Step:
    """Each lane reads a register of another lane; of a lane that does not execute it, the value is undefined."""
    mode = instruction.parts[2]
    first, second = pair_of(instruction.operands[0])
    result, inside = writer(entry, first), writer(entry, second) if second else None
    value = reader(entry, instruction.operands[1], "b32")
    by, clamp = (reader(entry, each, "u32") for each in instruction.operands[2:4])
    members = reader(entry, instruction.operands[4], "u32")

    def work(m: Machine, active: Active, lanes: Array) -> None:
        offset, control = (_by_warp(m, each(m, active)) for each in (by, clamp))
        source, valid = _shuffled(mode, offset.astype(np.int64) & 31, control.astype(np.int64))
        source = np.broadcast_to(source, lanes.shape)
        if not active.full and (lanes & ~np.take_along_axis(lanes, source, 1)).any():
            raise Hazard("barrier", "shfl.sync reads a lane that does not execute it")
        values = np.broadcast_to(value(m, active), (m.count,)).reshape(-1, WARP)
        result(m, active, np.take_along_axis(values, source, 1).reshape(-1))
        if inside:
            inside(m, active, np.broadcast_to(valid, lanes.shape).reshape(-1))

    return together(instruction, members, work)


def _by_warp(m: Machine, values: Array) -> Array:
    """[warps, 32], or [] of a constant."""
    return values if values.ndim == 0 else values.reshape(-1, WARP)


def _shuffled(mode: str, offset: Array, control: Array) -> tuple[Array, Array]:
    """The lane that each lane reads, and whether it is inside of the segment; otherwise a lane reads itself."""
    lane = np.arange(WARP)
    segment, limit = control >> 8 & 31, control & 31
    top = (lane & segment) | (limit & ~segment)
    source = {
        "bfly": lane ^ offset,
        "up": lane - offset,
        "down": lane + offset,
        "idx": (lane & segment) | (offset & ~segment),
    }[mode]
    valid = source >= top if mode == "up" else source <= top
    return np.where(valid, source, lane), valid


def constant(operand: Operand) -> int:
    """The value of an immediate operand."""
    if not isinstance(operand, Immediate):
        raise UnknownInstruction("a constant is expected")
    return operand.value
