"""Copies of boxes of a tensor by the Tensor Memory Accelerator (TMA), and bulk groups.

| instructions | PTX ISA |
|---|---|
| cp.async.bulk.tensor | Tensor Copy: cp.async.bulk.tensor; `tensor_maps` says which bytes |
| cp.async.bulk.commit_group, wait_group | Bulk and Tensor copy completion instructions |

**To shared memory** a copy completes on an mbarrier. With `.cta_group::2` that may lie in the other block of the
pair, as tcgen05 wants it: one thread waits for the operands of both.

**To global memory** a copy belongs to the bulk group that its thread commits next. Until the thread has waited for
the group (`.read` suffices) the source must not be changed, nor may its block end: so the source is read as late as
possible here, by an agent that knows what the issuing thread knew. Waiting gives the thread the clock of that agent.

Threads of a warp that store the same box store it once, which is a remark.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.bulk import agent_of, begin, targets
from fp4deploy_emulator.instructions.control import constant
from fp4deploy_emulator.instructions.data import parameter_bytes
from fp4deploy_emulator.instructions.tensor_maps import SIZE, TensorMap, decode
from fp4deploy_emulator.machine import GENERIC_PARAMETER, WARP, Active, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader, readers
from fp4deploy_emulator.ptx import Address, Entry, Instruction

Array = NDArray[Any]
REPEATED = "several threads of a warp store the same box by TMA"
MODES = {"tile", "im2col", "im2col_no_offs"}
HINTS = {"L2::cache_hint", "mbarrier::complete_tx::bytes", "bulk_group", "global", "shared::cluster", "shared::cta"}
HINTS |= {"cta_group::1", "cta_group::2", "multicast::cluster", *(f"{rank}d" for rank in range(1, 6))}


@implements("cp.async.bulk.tensor")
def copy_tensor(entry: Entry, instruction: Instruction) -> Step:
    """A box of a tensor to shared memory, or from it."""
    parts = instruction.parts[4:]
    mode = next((part for part in parts if part in MODES), "tile")
    if {*parts} - HINTS - MODES:
        raise UnknownInstruction("this tensor copy is not implemented")
    return _store(entry, instruction) if "bulk_group" in parts else _load(entry, instruction, mode)


def _maps(m: Machine, thread: int, where: Array) -> TensorMap:
    if int(where[thread]) >> 56 != GENERIC_PARAMETER >> 56:
        raise Hazard("out of bounds", "a tensor map that is not a parameter")
    offset = where[thread : thread + 1] & np.uint64((1 << 56) - 1)
    return decode(parameter_bytes(m, offset, SIZE).tobytes())


def _load(entry: Entry, instruction: Instruction, mode: str) -> Step:
    target, source, done, *more = instruction.operands
    if not isinstance(source, Address):
        raise UnknownInstruction("a tensor copy without coordinates")
    to, tensor_map, signal = address(entry, target), address(entry, source), address(entry, done)
    coordinates = [reader(entry, each, "s32") for each in source.coordinates]
    offsets = readers(entry, more.pop(0), "u16") if mode == "im2col" else []
    members = reader(entry, more.pop(0), "u16") if "multicast::cluster" in instruction.parts else None
    pair = "cta_group::2" in instruction.parts

    def run(m: Machine, active: Active) -> None:
        starts, maps, signals = to(m, active), tensor_map(m, active), signal(m, active)
        first, taps = (
            [np.broadcast_to(each(m, active), (m.count,)) for each in some] for some in (coordinates, offsets)
        )
        masks = np.broadcast_to(members(m, active), (m.count,)) if members else None
        for thread in active.index.tolist():
            tensor, start = _maps(m, thread, maps), int(starts[thread])
            if (tensor.lower is None) != (mode == "tile"):
                raise Hazard("barrier", f"a tensor copy of mode {mode} with a tensor map of the other one")
            if start % 128:
                raise Hazard("misaligned", "a tensor copy to shared memory that is not aligned to 128 bytes")
            values = tensor.load(m.memory, [int(each[thread]) for each in first], [int(each[thread]) for each in taps])
            mask = None if masks is None else int(masks[thread])
            to_blocks = targets(m, thread, start, int(signals[thread]), mask, pair)
            begin(m, thread, tensor.places(start, values.size), values, to_blocks)

    return run


class Groups:
    """Stores of each thread: those of the group that is open, and of each group that was committed."""

    def __init__(self) -> None:
        self.open: dict[int, list[Callable[[], int]]] = {}
        self.committed: dict[int, list[list[Callable[[], int]]]] = {}

    def unread(self) -> None:
        """At the end of the kernel.

        Raises:
            Hazard: a store was not waited for.
        """
        if any(self.open.values()) or any(map(any, self.committed.values())):
            what = (
                "a block ends, and a tensor copy may still read its shared memory: cp.async.bulk.wait_group is missing"
            )
            raise Hazard("unwaited copy", what)


def _groups(m: Machine) -> Groups:
    if "bulk groups" not in m.units:
        m.units["bulk groups"] = Groups()
        m.final.append(m.units["bulk groups"].unread)
    found: Groups = m.units["bulk groups"]
    return found


def _store(entry: Entry, instruction: Instruction) -> Step:
    target, source = instruction.operands[:2]
    if not isinstance(target, Address):
        raise UnknownInstruction("a tensor copy without coordinates")
    tensor_map, start = address(entry, target), address(entry, source)
    coordinates = [reader(entry, each, "s32") for each in target.coordinates]

    def run(m: Machine, active: Active) -> None:
        maps, starts, done = tensor_map(m, active), start(m, active), set()
        first = [np.broadcast_to(each(m, active), (m.count,)) for each in coordinates]
        for thread in active.index.tolist():
            where, box = int(starts[thread]), tuple(int(each[thread]) for each in first)
            if (thread // WARP, int(maps[thread]), where, box) in done:
                m.statistics.remarks.add(REPEATED)
                continue
            done.add((thread // WARP, int(maps[thread]), where, box))
            if where % 128:
                raise Hazard("misaligned", "a tensor copy from shared memory that is not aligned to 128 bytes")
            tensor = _maps(m, thread, maps)
            to, inside = tensor.bytes_at(box)
            block = m.block[thread : thread + 1]
            at = m.position(tensor.places(where, to.size), 1, np.repeat(block, to.size))[inside]
            known = m.order.clocks[m.row[thread]].copy()
            store = partial(_written, m, thread, to[inside], at, known)
            if m.launch.prompt:
                _finished(m, thread, store)
                continue
            _groups(m).open.setdefault(thread, []).append(store)

    return run


def _written(m: Machine, thread: int, to: Array, at: Array, known: Array) -> int:
    """The copy is done now, with what its thread knew; the agent that did it."""
    block = int(m.block[thread])
    row = agent_of(m, block // m.cluster, -1 - block % m.cluster)
    own, later = m.order.own[row], m.order.clocks[row].copy()
    known[own] = later[own]
    m.order.clocks[row] = known
    values = m.shared.read(at, np.full(len(at), row), unit=True)
    m.memory.write(to, values, np.full(len(to), m.writer(thread)))
    m.order.clocks[row] = np.maximum(known, later)
    return row


def _finished(m: Machine, thread: int, store: Callable[[], int]) -> None:
    """A store is done, and its thread knows that."""
    row = store()
    m.order.join(int(m.row[thread]), m.order.clocks[row])
    m.order.advance(np.array([row]))


@implements("cp.async.bulk.commit_group")
def commit(entry: Entry, instruction: Instruction) -> Step:
    """Closes the bulk group of each thread."""

    def run(m: Machine, active: Active) -> None:
        groups = _groups(m)
        for thread in active.index.tolist():
            groups.committed.setdefault(thread, []).append(groups.open.pop(thread, []))

    return run


@implements("cp.async.bulk.wait_group")
def wait(entry: Entry, instruction: Instruction) -> Step:
    """Until at most so many bulk groups of each thread are under way; with `.read` their sources may be changed."""
    left = constant(instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        groups = _groups(m)
        for thread in active.index.tolist():
            mine = groups.committed.get(thread, [])
            while len(mine) > left:
                for store in mine.pop(0):
                    _finished(m, thread, store)

    return run
