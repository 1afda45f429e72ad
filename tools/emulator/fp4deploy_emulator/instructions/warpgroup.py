"""wgmma: four warps multiply matrices from shared memory, asynchronously (SM90).

Source: PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions", with "Matrix Fragments for
wgmma.mma_async.m64nNk16" and "Shared Memory Matrix Layout".

D is 64 x N; warp w of the four has rows 16 w to 16 w + 15, in fragments as those of mma.m16n8. A comes from registers
in the same way, or like B from shared memory, where a descriptor says how it lies. K is the contiguous axis:

    bits 0 to 13    address / 16                        bits 32 to 45   bytes / 16 from 8 rows to the next 8
    bits 16 to 29   bytes / 16 between columns of 16 bytes (without a swizzle)
    bits 62, 63     swizzle: 0 none, 1 of 128 bytes, 2 of 64, 3 of 32; rows of so many bytes, 8 after each other

The work happens when it is issued, and until it is waited for nobody may read or write the registers of D, or change
the operands: the unit that reads shared memory is an agent of its own there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import half_precision, plain
from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.control import constant
from fp4deploy_emulator.instructions.matrix import COLUMN, ROW, half_values, operand_matrix, registers
from fp4deploy_emulator.machine import SHARED_BASE, WARP, Active, Machine, Step, implements
from fp4deploy_emulator.operands import reader, readers, writers
from fp4deploy_emulator.ptx import Entry, Instruction, Register, Vector

Array = NDArray[Any]
GROUP = 4  # warps
SWIZZLES = {0: 0, 1: 128, 2: 64, 3: 32}


def matrix_positions(descriptor: int, rows: int, size: int, swizzle: int) -> Array:
    """Addresses [rows, size] of the bytes of a matrix in shared memory: `size` bytes along K of each row."""
    start = (descriptor & 0x3FFF) << 4
    across, down = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    row, byte = np.arange(rows)[:, None], np.arange(size)[None]
    if not swizzle:
        return start + row // 8 * down + row % 8 * 16 + byte // 16 * across + byte % 16
    if descriptor >> 49 & 7:
        raise UnknownInstruction("a matrix descriptor with a base offset is not implemented")
    linear = start + row // 8 * down + row % 8 * swizzle + byte
    return linear ^ ((linear >> 7 & (swizzle // 16 - 1)) << 4)


def read_matrix(
    m: Machine, block: int, row: int, addresses: Array, remarks: set[str] | None = None, name: str = "wgmma"
) -> Array:
    """Bytes in the shared memory of a block, read by an agent; `remarks`, `name`: see `SharedMemory.read`."""
    offset = addresses.reshape(-1) - SHARED_BASE
    if (offset < 0).any() or (offset >= m.shared.size).any():
        raise Hazard("out of bounds", "a matrix descriptor reaches beyond shared memory")
    at = (block * m.shared.size + offset)[:, None]
    return m.shared.read(at, np.full(len(at), row), unit=True, remarks=remarks, name=name).reshape(addresses.shape)


def unit(m: Machine, warp: int) -> int:
    """The agent that reads shared memory for the warp group of a warp (of the batch)."""
    warp = warp // GROUP * GROUP
    block = warp // m.warps
    cluster, rank = block // m.cluster, block % m.cluster
    return cluster * m.agents + m.units_from + rank * m.warps + warp % m.warps


class Groups:
    """Committed groups of each warp, and the clock that its unit had at each commit."""

    def __init__(self, warps: int) -> None:
        self.count = np.zeros(warps, np.int64)
        self.clocks: dict[int, list[Array]] = {}

    def used(self, before: tuple[Array, Array] | None, active: Active) -> tuple[Array, Array]:
        """Which threads' registers a multiplication uses, and in which group of their warp."""
        if before is None:
            return active.mask, self.count.copy()
        mask, group = before
        return mask | active.mask, np.where(active.mask.reshape(-1, WARP).any(1), self.count, group)


def _groups(m: Machine) -> Groups:
    found: Groups = m.units.setdefault("wgmma", Groups(m.count // WARP))
    return found


@implements("wgmma.fence")
def fence(entry: Entry, instruction: Instruction) -> Step:
    """Registers written before are seen by what multiplies after."""

    def run(m: Machine, active: Active) -> None:
        _fenced(m, active, list(m.fresh or ()))

    return run


def _fenced(m: Machine, active: Active, names: list[str]) -> None:
    assert m.fresh is not None
    for name in names:
        rest = m.fresh.pop(name) & ~active.mask
        if rest.any():
            m.fresh[name] = rest


def _require_fence(m: Machine, active: Active, names: list[str]) -> None:
    assert m.fresh is not None
    for name in names:
        if name in m.fresh and (m.fresh[name] & active.mask).any():
            raise Hazard("race", f"wgmma uses the register {name}, which was written with no wgmma.fence after it")


@implements("wgmma.mma_async")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """D = A B^T + D, or A B^T, for FP16 and BF16."""
    parts = instruction.parts
    shape = next(part for part in parts if part.startswith("m64n"))
    if not shape.endswith("k16") or parts[-3:] not in (("f32", "f16", "f16"), ("f32", "bf16", "bf16")):
        raise UnknownInstruction("this shape or type of wgmma is not implemented")
    columns, bfloat = int(shape[4:-3]), parts[-1] == "bf16"
    result, left, right, keep, *signs = instruction.operands
    if [constant(each) for each in signs[:2]] != [1, 1] or any(constant(each) for each in signs[2:]):
        raise UnknownInstruction("a negated or transposed operand of wgmma is not implemented")
    names = [part.name for part in result.parts if isinstance(part, Register)] if isinstance(result, Vector) else []
    results, sources = writers(entry, result), readers(entry, result, "b32")
    fragments = readers(entry, left, "b32") if isinstance(left, Vector) else None
    kept = [part.name for part in left.parts if isinstance(part, Register)] if isinstance(left, Vector) else []
    descriptor_a = None if fragments else reader(entry, left, "u64")
    descriptor_b = reader(entry, right, "u64")
    adds = reader(entry, keep, "pred")

    def run(m: Machine, active: Active) -> None:
        warps = m.whole_warps(active, "wgmma").reshape(-1, GROUP)
        if (warps % GROUP != np.arange(GROUP)).any():
            raise Hazard("barrier", "wgmma is executed by other warps than four consecutive ones")
        _require_fence(m, active, [*names, *kept])
        groups = _groups(m)
        flying = {name: m.flying.pop(name, None) for name in names}
        add = np.broadcast_to(adds(m, active), (m.count,))
        unset = not add[active.mask].any()
        before = np.zeros((len(warps), GROUP * 16, columns), np.float32)
        if not unset:
            held = registers(m, active, sources, warps.reshape(-1)).view(np.float32)
            before = _rows(held, len(warps), columns)
        b = np.broadcast_to(descriptor_b(m, active), (m.count,))
        a = None if descriptor_a is None else np.broadcast_to(descriptor_a(m, active), (m.count,))
        rights, lefts = [], []
        for group in warps:
            thread, block = int(group[0]) * WARP, int(group[0]) // m.warps
            row = unit(m, int(group[0]))
            for warp in group:
                m.order.join(row, m.order.clocks[m.row[int(warp) * WARP]])
            rights.append(_shared_operand(m, int(b[thread]), columns, block, row, bfloat))
            if a is not None:
                lefts.append(_shared_operand(m, int(a[thread]), GROUP * 16, block, row, bfloat))
        if fragments is not None:
            values = half_values(operand_matrix(registers(m, active, fragments, warps.reshape(-1)), 2), bfloat)
            lefts = [*values.reshape(len(warps), GROUP * 16, 16)]
        numbers = half_precision(m.launch.capability)
        after = plain(np.stack(lefts), np.stack(rights), before, numbers, -126 if bfloat else -14, m.launch.model)
        _write(m, active, results, after, warps)
        _fenced(m, active, names)  # sums of one shape are in order
        for name in names:
            m.flying[name] = groups.used(flying[name], active)
        for name in kept:
            m.frozen[name] = groups.used(m.frozen.get(name), active)

    return run


def _shared_operand(m: Machine, descriptor: int, rows: int, block: int, row: int, bfloat: bool) -> Array:
    addresses = matrix_positions(descriptor, rows, 32, SWIZZLES[descriptor >> 62 & 3])
    bits = np.ascontiguousarray(read_matrix(m, block, row, addresses, m.statistics.remarks)).view(np.uint16)
    return half_values(bits, bfloat)


def _index(columns: int) -> tuple[Array, Array]:
    """Row and column of each of the columns / 2 registers of each lane, [32, registers]."""
    i = np.arange(columns // 2)
    return ROW[:, None] + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * COLUMN[:, None] + i % 2


def _rows(held: Array, groups: int, columns: int) -> Array:
    row, column = _index(columns)
    out = np.empty((len(held), 16, columns), np.float32)
    out[:, row, column] = held
    return out.reshape(groups, GROUP * 16, columns)


def _write(m: Machine, active: Active, results: list[Any], matrix: Array, warps: Array) -> None:
    row, column = _index(matrix.shape[-1])
    held = matrix.reshape(-1, 16, matrix.shape[-1])[:, row, column]
    for i, result in enumerate(results):
        values = np.zeros((m.count // WARP, WARP), np.float32)
        values[warps.reshape(-1)] = held[..., i]
        result(m, active, values.reshape(-1).view(np.uint32))


@implements("wgmma.commit_group")
def commit(entry: Entry, instruction: Instruction) -> Step:
    """Closes a warp's group."""

    def run(m: Machine, active: Active) -> None:
        groups, warps = _groups(m), m.whole_warps(active, "wgmma.commit_group")
        groups.count[warps] += 1
        first = warps[warps % GROUP == 0]
        rows = np.array([unit(m, int(warp)) for warp in first])
        for warp, row in zip(first.tolist(), rows, strict=True):
            groups.clocks.setdefault(warp, []).append(m.order.clocks[row].copy())
        m.order.advance(rows)

    return run


@implements("wgmma.wait_group")
def wait(entry: Entry, instruction: Instruction) -> Step:
    """Until at most so many groups of the warp are under way."""
    left = constant(instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        groups = _groups(m)
        for warp in m.whole_warps(active, "wgmma.wait_group").tolist():
            done = groups.count[warp] - left
            if done > 0:
                m.order.join(int(m.row[warp * WARP]), groups.clocks[warp // GROUP * GROUP][done - 1])
        for registers_in_flight in (m.flying, m.frozen):
            for name, (mask, group) in [*registers_in_flight.items()]:
                over = np.repeat(group < groups.count - left, WARP) & active.mask
                rest = mask & ~over
                if rest.any():
                    registers_in_flight[name] = (rest, group)
                else:
                    del registers_in_flight[name]

    return run
