"""Loads, stores, atomics and addresses.

| instructions | PTX ISA |
|---|---|
| ld, st, cvta, mapa, ldmatrix, stmatrix | Data Movement and Conversion Instructions |
| atom, red | Parallel Synchronization and Communication Instructions: atom, red |

`ldmatrix` gives each lane two elements of each of up to four matrices of 8 x 8 halves, a row of which lies at the
address of one lane: lanes 0 to 7 name the rows of the first matrix, and so on. Lane i receives elements 2 (i % 4) and
the next of row i / 4.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.machine import (
    GENERIC_PARAMETER,
    GENERIC_SHARED,
    WARP,
    WINDOW,
    Active,
    Machine,
    Step,
    implements,
)
from fp4deploy_emulator.operands import KINDS, Writer, address, reader, readers, writer, writers
from fp4deploy_emulator.ptx import BYTES, Address, Entry, Instruction, Symbol, Vector

Array = NDArray[Any]
HINTS = {"relaxed", "acquire", "release", "volatile", "weak", "cta", "cluster", "gpu", "sys", "nc", "L1::no_allocate"}
HINTS |= {
    "L1::evict_last",
    "L1::evict_first",
    "L2::evict_first",
    "L2::evict_last",
    "L2::128B",
    "L2::cache_hint",
    "unaligned",
}
COPIED = "bytes of a structure are copied that nothing wrote"
SPACES = {"global", "shared", "shared::cta", "shared::cluster", "param", "const"}


def _shape(instruction: Instruction) -> tuple[str, int, str]:
    """(space or "" for generic, elements, type) of a load or store."""
    *middle, kind = instruction.parts[1:]
    space = next((part for part in middle if part in SPACES), "")
    count = next((int(part[1:]) for part in middle if part in ("v2", "v4", "v8")), 1)
    unknown = {*middle} - HINTS - SPACES - {"v2", "v4", "v8"}
    if unknown:
        raise UnknownInstruction(f"the modifier {', '.join(sorted(unknown))} is not implemented")
    return space.partition("::")[0], count, kind


def load_bytes(m: Machine, active: Active, space: str, addresses: Array, size: int) -> Array:
    """uint8 [active threads, size]."""
    index = active.index
    where = addresses[index]
    if space == "shared":
        return m.shared.read(m.position(where, size, m.block[index]), m.row[index], index % WARP)
    if space == "global":
        return m.memory.read(where, size)
    tag = where >> np.uint64(56)
    if (tag == GENERIC_SHARED >> 56).all():
        return load_bytes(m, active, "shared", addresses & np.uint64((1 << 56) - 1), size)
    if (tag == GENERIC_PARAMETER >> 56).all():
        return parameter_bytes(m, where & np.uint64((1 << 56) - 1), size)
    return load_bytes(m, active, "global", addresses, size)


def store_bytes(m: Machine, active: Active, space: str, addresses: Array, values: Array) -> None:
    """uint8 [active threads, size]."""
    index = active.index
    where = addresses[index]
    if space == "shared":
        m.shared.write(m.position(where, values.shape[1], m.block[index]), values, m.row[index], index % WARP)
    elif not space and (where >> np.uint64(56) == GENERIC_SHARED >> 56).all():
        store_bytes(m, active, "shared", addresses & np.uint64((1 << 56) - 1), values)
    else:
        m.memory.write(where, values, m.writer(index))


def parameter_bytes(m: Machine, offsets: Array, size: int) -> Array:
    """Bytes of the parameter buffer."""
    buffer = np.frombuffer(m.launch.parameters, np.uint8)
    at = offsets.astype(np.int64)[:, None] + np.arange(size)
    if (at >= buffer.size).any():
        raise Hazard("out of bounds", f"{size} bytes beyond the parameters")
    return buffer[at]


@implements("ld", "ldu")
def load(entry: Entry, instruction: Instruction) -> Step:
    """One element or a vector; narrower than the register it is extended."""
    space, count, kind = _shape(instruction)
    target, source = instruction.operands[:2]
    results = writers(entry, target) if isinstance(target, Vector) and count > 1 else [writer(entry, _single(target))]
    size, dtype = BYTES[kind], KINDS[kind]
    if space == "param":
        assert isinstance(source, Address)
        if isinstance(source.base, Symbol):
            return _parameter(entry, source, results, size, dtype)
        space = ""
    where = address(entry, source)
    total = size * count

    def run(m: Machine, active: Active) -> None:
        loaded = load_bytes(m, active, space, where(m, active), total)
        values = np.ascontiguousarray(loaded).view(dtype)
        for i, result in enumerate(results):
            result(m, active, spread(m, active, values[:, i]))

    return run


def spread(m: Machine, active: Active, values: Array) -> Array:
    """Values of the active threads as an array over all threads."""
    if active.full:
        return np.ascontiguousarray(values)
    out = np.zeros(m.count, values.dtype)
    out[active.index] = values
    return out


def _single(operand: Any) -> Any:
    return operand.parts[0] if isinstance(operand, Vector) and len(operand.parts) == 1 else operand


def _parameter(entry: Entry, source: Address, results: list[Writer], size: int, dtype: Any) -> Step:
    assert isinstance(source.base, Symbol)
    name, offset = source.base.name, source.offset
    found = next((each for each in entry.parameters if each.name == name), None)

    def run(m: Machine, active: Active) -> None:
        for i, result in enumerate(results):
            at = offset + i * size
            if found is None:
                result(m, active, _kept(m, active, f"{name}+{at}", dtype))
            else:
                bits = m.launch.parameters[found.offset + at : found.offset + at + size]
                result(m, active, np.full(m.count, np.frombuffer(bits, dtype)[0]))

    return run


def _kept(m: Machine, active: Active, name: str, dtype: Any) -> Array:
    """A parameter or result of a function that was inlined: kept like a register.

    nvcc copies whole structures, also bytes that the function never wrote; what comes out must not depend on them.
    """
    known = m.partial.get(name)
    if name in m.registers and (known is None or known[active.mask].all()):
        return m.get(name, active).view(dtype)
    m.statistics.remarks.add(COPIED)
    ones = np.full(m.count, 0xFF, np.uint8).repeat(np.dtype(dtype).itemsize).view(dtype)
    return ones if known is None else np.where(known, m.registers[name].view(dtype), ones)


@implements("st")
def store(entry: Entry, instruction: Instruction) -> Step:
    """One element or a vector."""
    space, _, kind = _shape(instruction)
    sources = readers(entry, instruction.operands[1], kind)
    target = instruction.operands[0]
    if space == "param":
        assert isinstance(target, Address)
        assert isinstance(target.base, Symbol)
        names = [f"{target.base.name}+{target.offset + i * BYTES[kind]}" for i in range(len(sources))]

        def keep(m: Machine, active: Active) -> None:
            for name, source in zip(names, sources, strict=True):
                m.put(name, np.broadcast_to(source(m, active), (m.count,)), active)

        return keep
    where = address(entry, target)

    def run(m: Machine, active: Active) -> None:
        columns = [np.broadcast_to(source(m, active), (m.count,))[active.index] for source in sources]
        values = np.ascontiguousarray(np.stack(columns, -1)).view(np.uint8)
        store_bytes(m, active, space, where(m, active), values)

    return run


@implements("cvta")
def convert_address(entry: Entry, instruction: Instruction) -> Step:
    """Between generic addresses and those of a state space; global and parameter addresses are generic already."""
    space = next(part for part in instruction.parts[1:] if part in SPACES)
    kind = instruction.parts[-1]
    source, result = reader(entry, instruction.operands[1], kind), writer(entry, instruction.operands[0])
    mask = np.uint64((1 << 56) - 1)

    def run(m: Machine, active: Active) -> None:
        value = source(m, active).astype(np.uint64)
        if space.startswith("shared"):
            value = value & mask if "to" in instruction.parts else value | np.uint64(GENERIC_SHARED)
        result(m, active, value.astype(KINDS[kind]))

    return run


@implements("mapa")
def map_address(entry: Entry, instruction: Instruction) -> Step:
    """The address of the same variable in another block of the cluster; of a rank beyond it, an address of nothing."""
    if "shared::cluster" not in instruction.parts:
        raise UnknownInstruction("mapa of a generic address is not implemented")
    result = writer(entry, instruction.operands[0])
    source, rank = (reader(entry, each, "u32") for each in instruction.operands[1:3])

    def run(m: Machine, active: Active) -> None:
        there = np.broadcast_to(rank(m, active), (m.count,))
        result(
            m,
            active,
            (source(m, active) % np.uint32(WINDOW) + there * np.uint32(WINDOW)).astype(np.uint32),
        )

    return run


def _matrices(m: Machine, active: Active, addresses: Array, count: int) -> tuple[Array, Array, Array]:
    """Warps, and positions [warps, matrices, 8 rows, 16 bytes] that ldmatrix and stmatrix access, with their agents."""
    warps = m.whole_warps(active, "ldmatrix or stmatrix")
    lanes = addresses.reshape(-1, WARP)[warps, : 8 * count]
    blocks = m.block.reshape(-1, WARP)[warps, : 8 * count]
    at = m.position(lanes.reshape(-1), 16, blocks.reshape(-1)).reshape(len(warps), count, 8, 16)
    rows = np.repeat(m.row.reshape(-1, WARP)[warps, 0], count * 8)
    return warps, at, rows


@implements("ldmatrix")
def load_matrix(entry: Entry, instruction: Instruction) -> Step:
    """Fragments of 8 x 8 matrices of 16-bit elements."""
    count = next(int(part[1:]) for part in instruction.parts if part in ("x1", "x2", "x4"))
    if "m8n8" not in instruction.parts or instruction.parts[-1] != "b16":
        raise UnknownInstruction("this shape of ldmatrix is not implemented")
    transpose = "trans" in instruction.parts
    results, where = writers(entry, instruction.operands[0]), address(entry, instruction.operands[1])

    def run(m: Machine, active: Active) -> None:
        warps, at, rows = _matrices(m, active, where(m, active), count)
        loaded = m.shared.read(at.reshape(-1, 16), rows).reshape(len(warps), count, 8, 16).view(np.uint16)
        if transpose:
            loaded = np.ascontiguousarray(np.swapaxes(loaded, 2, 3))
        for i, result in enumerate(results):
            values = np.ascontiguousarray(loaded[:, i]).view(np.uint32).reshape(-1)
            result(m, active, spread(m, active, values))

    return run


@implements("stmatrix")
def store_matrix(entry: Entry, instruction: Instruction) -> Step:
    """The inverse of ldmatrix."""
    count = next(int(part[1:]) for part in instruction.parts if part in ("x1", "x2", "x4"))
    if "m8n8" not in instruction.parts or instruction.parts[-1] != "b16":
        raise UnknownInstruction("this shape of stmatrix is not implemented")
    transpose = "trans" in instruction.parts
    where, sources = address(entry, instruction.operands[0]), readers(entry, instruction.operands[1], "b32")

    def run(m: Machine, active: Active) -> None:
        warps, at, rows = _matrices(m, active, where(m, active), count)
        parts = [np.broadcast_to(source(m, active), (m.count,)).reshape(-1, WARP)[warps] for source in sources]
        values = np.ascontiguousarray(np.stack(parts, 1)).view(np.uint16).reshape(len(warps), count, 8, 8)
        if transpose:
            values = np.ascontiguousarray(np.swapaxes(values, 2, 3))
        m.shared.write(at.reshape(-1, 16), values.view(np.uint8).reshape(-1, 16), rows)

    return run


_ATOMIC: dict[str, Callable[[int, int], int]] = {
    "add": lambda old, new: old + new,
    "max": max,
    "min": min,
    "exch": lambda old, new: new,
    "or": lambda old, new: old | new,
    "and": lambda old, new: old & new,
    "inc": lambda old, limit: 0 if old >= limit else old + 1,
}


@implements("atom", "red")
def atomic(entry: Entry, instruction: Instruction) -> Step:
    """Read, change, write, one thread after the other in the order of their numbers."""
    operation = next((part for part in instruction.parts if part in _ATOMIC), "")
    space = next((part for part in instruction.parts if part in SPACES), "")
    kind = instruction.parts[-1]
    if not operation or space != "global":
        raise UnknownInstruction("this atomic operation is not implemented")
    operands = list(instruction.operands)
    result = writer(entry, operands.pop(0)) if instruction.parts[0] == "atom" else None
    where, source = address(entry, operands[0]), reader(entry, operands[1], kind)
    dtype, function = np.dtype(KINDS[kind]), _ATOMIC[operation]

    def run(m: Machine, active: Active) -> None:
        addresses = where(m, active)
        values = np.broadcast_to(source(m, active), (m.count,))
        old = np.zeros(m.count, dtype)
        for thread in active.index:
            at = addresses[thread : thread + 1]
            bits = m.memory.read(at, dtype.itemsize)
            old[thread] = bits.view(dtype)[0, 0]
            new = np.array([[function(old[thread].item(), values[thread].item())]], dtype)
            m.memory.replace(at, new.view(np.uint8))
        if result:
            result(m, active, old)

    return run
