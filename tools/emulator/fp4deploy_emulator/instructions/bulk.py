"""mbarriers, and copies by the Tensor Memory Accelerator (TMA) that complete on them.

| instructions | PTX ISA |
|---|---|
| mbarrier.init, inval, arrive, expect_tx, try_wait, test_wait | Asynchronous Barriers: mbarrier |
| cp.async.bulk (to shared memory) | Bulk Copy: cp.async.bulk |
| cp.async.bulk.tensor (to shared memory) | Tensor Copy: cp.async.bulk.tensor |

An mbarrier has phases. A phase is complete when as many arrivals came as `init` said and the bytes that were announced
(`expect_tx`) have arrived. A thread that waits is put aside until a phase completes; waiting for a parity succeeds if
the phase of that parity is over.

A tensor map is a structure that only the driver can encode. Here its 128 bytes are an encoding of the emulator's own
(`encode`) of the same sizes, strides, box and swizzle that the host gives to the driver. The swizzle permutes 16-byte
words: bits 4 to 6 of an address in shared memory are XORed with bits 7 to 9 (rows of 128 bytes), or bit 4 with bit 7
(rows of 32 bytes). Elements outside of the tensor are zeros, and count as arrived.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.data import parameter_bytes
from fp4deploy_emulator.machine import GENERIC_PARAMETER, WARP, WINDOW, Active, Continue, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader, writer
from fp4deploy_emulator.ptx import Address, Entry, Instruction

Array = NDArray[Any]
MAGIC = b"fp4deploy tensor"
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}
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
    """All mbarriers of a batch, by position in shared memory."""

    known: dict[int, Barrier]
    slots: dict[int, int]


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
    slots = barriers(m).slots
    if position not in slots:
        cluster = position // (m.shared.size * m.cluster)
        used = sum(1 for other in slots if other // (m.shared.size * m.cluster) == cluster)
        if m.cluster * m.warps + used >= m.units_from:
            raise UnknownInstruction("more mbarriers with asynchronous work than the emulator keeps apart")
        slots[position] = cluster * m.agents + m.cluster * m.warps + used
    return slots[position]


def _each(m: Machine, active: Active, addresses: Array) -> list[tuple[int, int]]:
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
        for thread, position in _each(m, active, where(m, active)):
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
        for _, position in _each(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            if barrier.transaction:
                raise Hazard("barrier", "an mbarrier is invalidated while bytes are expected")
            del barriers(m).known[position]
            m.shared.reserved[position : position + 8] = False

    return run


@implements("mbarrier.arrive", "mbarrier.expect_tx")
def arrive(entry: Entry, instruction: Instruction) -> Step:
    """One arrival, and bytes to wait for; the state it returns is not implemented."""
    parts = instruction.parts
    sink, target = instruction.operands[0], instruction.operands[1] if "arrive" in parts else instruction.operands[0]
    if "arrive" in parts and getattr(sink, "name", "") != "_":
        raise UnknownInstruction("the state that mbarrier.arrive returns is not implemented")
    expects, arrives = "expect_tx" in parts, "arrive" in parts
    where = address(entry, target)
    more = instruction.operands[2 if arrives else 1 :]
    amount = reader(entry, more[0], "u32") if more else None

    def run(m: Machine, active: Active) -> None:
        amounts = np.broadcast_to(amount(m, active), (m.count,)) if amount else np.ones(m.count, np.uint32)
        for thread, position in _each(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            row = int(m.row[thread])
            np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
            if expects:
                barrier.transaction += int(amounts[thread])
            if arrives:
                barrier.pending -= 1 if expects else int(amounts[thread])
            advance(m, barrier)
        m.order.advance(np.unique(m.row[active.index]))

    return run


@implements("mbarrier.try_wait", "mbarrier.test_wait", control=True)
def wait(entry: Entry, instruction: Instruction) -> Step:
    """Whether the phase of a parity is over. A thread that tries for the second time waits until a phase completes."""
    if instruction.guard or "parity" not in instruction.parts:
        raise UnknownInstruction("this form of waiting for an mbarrier is not implemented")
    result = writer(entry, instruction.operands[0])
    where, parity = address(entry, instruction.operands[1]), reader(entry, instruction.operands[2], "u32")

    def run(m: Machine, active: Active) -> Continue:
        parities = np.broadcast_to(parity(m, active), (m.count,))
        over = np.zeros(m.count, bool)
        for thread, position in _each(m, active, where(m, active)):
            barrier = barrier_at(m, position)
            if barrier.phase % 2 != int(parities[thread]) & 1:
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


@dataclass(frozen=True)
class TensorMap:
    """What a tensor map says: address, sizes and box from the innermost axis on, strides in bytes of the outer axes."""

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int


def encode(start: int, sizes: Sequence[int], strides: Sequence[int], box: Sequence[int], swizzle: int) -> bytes:
    """128 bytes in the place of the driver's; of a tensor of bytes with up to three axes. swizzle: 32 or 128 bytes."""
    rank = len(sizes)
    numbers = [*sizes, *[1] * (3 - rank), *strides, *[0] * (3 - rank), *box, *[1] * (3 - rank)]
    return (MAGIC + struct.pack("<QHH8Q", start, rank, swizzle, *numbers)).ljust(128, b"\0")


def decode(content: bytes) -> TensorMap:
    """The tensor map that `encode` wrote.

    Raises:
        Hazard: the bytes are something else.
    """
    if content[: len(MAGIC)] != MAGIC:
        raise Hazard("barrier", "a tensor copy with an address at which there is no tensor map")
    start, rank, swizzle, *numbers = struct.unpack_from("<QHH8Q", content, len(MAGIC))
    return TensorMap(start, tuple(numbers[:rank]), tuple(numbers[3 : 2 + rank]), tuple(numbers[5 : 5 + rank]), swizzle)


def _box(m: Machine, tensor: TensorMap, first: list[int]) -> Array:
    """Bytes of a box, the innermost axis first; zeros outside of the tensor."""
    axes = [start + np.arange(size) for start, size in zip(first, tensor.box, strict=True)]
    inside = [(axis >= 0) & (axis < size) for axis, size in zip(axes, tensor.sizes, strict=True)]
    strides = (1, *tensor.strides)
    offsets, valid = np.zeros((1,), np.int64), np.ones((1,), bool)
    for axis, good, stride in zip(axes, inside, strides, strict=True):
        offsets = (axis[:, None] * stride + offsets).reshape(-1)
        valid = (good[:, None] & valid).reshape(-1)
    out = np.zeros(offsets.size, np.uint8)
    where = (np.uint64(tensor.address) + offsets[valid].astype(np.uint64)).astype(np.uint64)
    out[valid] = m.memory.read(where, 1)[:, 0]
    return out


def _swizzled(start: int, count: int, swizzle: int) -> Array:
    """Addresses of `count` bytes from `start` on, in the order in which a swizzled box is stored."""
    linear = start + np.arange(count)
    bits = SWIZZLE_BITS[swizzle]
    return linear ^ ((linear >> 7 & ((1 << bits) - 1)) << 4)


@implements("cp.async.bulk.tensor")
def copy_tensor(entry: Entry, instruction: Instruction) -> Step:
    """A box of a tensor to shared memory."""
    if "mbarrier::complete_tx::bytes" not in instruction.parts or "multicast::cluster" in instruction.parts:
        raise UnknownInstruction("this tensor copy is not implemented")
    target, source, done = instruction.operands[:3]
    assert isinstance(source, Address)
    to, tensor_map, signal = address(entry, target), address(entry, source), address(entry, done)
    coordinates = [reader(entry, each, "s32") for each in source.coordinates]

    def run(m: Machine, active: Active) -> None:
        starts, maps, signals = to(m, active), tensor_map(m, active), signal(m, active)
        first = [np.broadcast_to(each(m, active), (m.count,)) for each in coordinates]
        for thread in active.index.tolist():
            offset = maps[thread : thread + 1] & np.uint64((1 << 56) - 1)
            if int(maps[thread]) >> 56 != GENERIC_PARAMETER >> 56:
                raise Hazard("out of bounds", "a tensor map that is not a parameter")
            tensor = decode(parameter_bytes(m, offset, 128).tobytes())
            start = int(starts[thread])
            if start % 128:
                raise Hazard("misaligned", "a tensor copy to shared memory that is not aligned to 128 bytes")
            values = _box(m, tensor, [int(each[thread]) for each in first])
            addresses = _swizzled(start, values.size, tensor.swizzle)
            _begin(m, thread, addresses, values, int(signals[thread]), [int(m.block[thread])])

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
            block = int(m.block[thread])
            blocks = [block]
            if masks is not None:
                first = block // m.cluster * m.cluster
                blocks = [first + rank for rank in range(16) if int(masks[thread]) >> rank & 1]
                if any(each >= first + m.cluster for each in blocks):
                    raise Hazard("out of bounds", "a multicast to more blocks than the cluster has")
            _begin(m, thread, start + np.arange(count), values, int(signals[thread]), blocks)

    return run


def _begin(m: Machine, thread: int, addresses: Array, values: Array, signal: int, blocks: list[int]) -> None:
    """A copy to the same addresses in each of `blocks`; it arrives when nobody else can run."""
    issuer = int(m.row[thread])
    for block in blocks:
        local = np.full(addresses.size, block)
        at = m.position(addresses % WINDOW if len(blocks) > 1 else addresses, 1, local)
        m.shared.expect(at, np.full(len(at), issuer), np.full(len(at), thread % WARP))
        position = place(m, signal % WINDOW if len(blocks) > 1 else signal, block)
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
