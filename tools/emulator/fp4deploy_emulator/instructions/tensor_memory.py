"""tcgen05: tensor memory, and how threads reach it (SM100, SM103). `tensor_core` is what multiplies there.

Source: PTX ISA, "Tensor Memory", "tcgen05.alloc", "tcgen05.dealloc", "tcgen05.ld", "tcgen05.st", "tcgen05.wait".

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. Warp w of a group of four
reaches lanes 32 w to 32 w + 31. `.32x32b`: lane i of the warp, consecutive columns. Row m of D (M = 128) is lane m, its
column n the n-th column. With M = 64, rows 16 i to 16 i + 15 are lanes 32 i to 32 i + 15. `.unpack::16b` stores each
half of a register to a column of its own; what the upper half of a column is then nobody says, and here it is all ones,
as scales NaN.

With `.cta_group::2` a warp of each block of a pair allocates; every block has its own tensor memory, at equal
addresses.

Tensor memory that a multiplication will write must not be touched until a commit behind it has been waited for, nor
what it reads be changed. Stores and loads by threads are asynchronous too: what they touch is free for others after
`tcgen05.wait`. Accesses have the order of `order`, cell by cell.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.control import constant
from fp4deploy_emulator.instructions.data import spread, store_bytes
from fp4deploy_emulator.instructions.matrix import registers
from fp4deploy_emulator.machine import WARP, Active, Continue, Machine, Step, implements
from fp4deploy_emulator.operands import Reader, address, reader, readers, writers
from fp4deploy_emulator.order import WHOLE, Accesses, Order
from fp4deploy_emulator.ptx import Entry, Instruction, Register, Vector

Array = NDArray[Any]
Region = tuple[Any, Any, Any]  # an index of the arrays: block, lanes, columns
LANES, COLUMNS = 128, 512
UNPACK = "unpack::16b"
UNALLOCATED = "tensor memory is used that was not allocated"


class TensorMemory:
    """Of all thread blocks of a batch; a cell is one column of one lane.

    writes, reads: multiplications under way that will write or read a cell. storing, loading: a store or load of a
    thread has not been waited for. remarks: takes UNALLOCATED, which is a hazard without it.
    """

    def __init__(self, order: Order, blocks: int, remarks: set[str] | None = None) -> None:
        self.remarks = remarks
        shape = (blocks, LANES, COLUMNS)
        self.content = np.zeros(shape, np.uint32)
        self.written = np.zeros(shape, bool)
        self.writes, self.reads = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
        self.storing, self.loading = np.zeros(shape, bool), np.zeros(shape, bool)
        self.allocated = np.zeros((blocks, COLUMNS), bool)
        self.accesses = Accesses(order, blocks * LANES * COLUMNS)

    def usable(self, where: Region) -> None:
        """Check that a region was allocated.

        Raises:
            Hazard: it was not.
        """
        block, _, columns = where
        if self.allocated[block, columns].all():
            return
        if self.remarks is None or (columns >= COLUMNS).any():
            raise Hazard("out of bounds", "tensor memory outside of what was allocated")
        self.remarks.add(UNALLOCATED)

    def read(self, where: Region, row: int, unit: bool = False) -> Array:
        """The words of a region, by an agent; `unit`: a multiplication, in the order of multiplications."""
        self.usable(where)
        if not unit and self.writes[where].any():
            raise Hazard("unwaited copy", "tensor memory is accessed before a multiplication was waited for")
        if self.storing[where].any():
            raise Hazard("unwaited copy", "tensor memory is read before tcgen05.wait::st")
        if not self.written[where].all():
            raise Hazard("uninitialised", "tensor memory is read before it was written")
        cells, rows, lanes = self._cells(where, row)
        if self.accesses.unordered_write(cells, rows, lanes).any():
            raise Hazard("race", "tensor memory is read, and the write before it may still come")
        self.accesses.read(cells, rows, lanes)
        found: Array = self.content[where]
        return found

    def write(self, where: Region, values: Array, row: int, unit: bool = False) -> None:
        """Change the words of a region; arguments as of `read`."""
        self.usable(where)
        if not unit and (self.writes[where].any() or self.reads[where].any()):
            raise Hazard("unwaited copy", "tensor memory is changed before a multiplication was waited for")
        if self.loading[where].any():
            raise Hazard("unwaited copy", "tensor memory is changed before tcgen05.wait::ld")
        cells, rows, lanes = self._cells(where, row)
        late = self.accesses.unordered_write(cells, rows, lanes) | self.accesses.unordered_read(cells, rows, lanes)
        if late.any():
            raise Hazard("race", "tensor memory is changed, and an access before it may still come")
        self.accesses.write(cells, rows, lanes, generic=False)
        self.content[where], self.written[where] = values, True

    def _cells(self, where: Region, row: int) -> tuple[Array, Array, Array]:
        block, lanes, columns = where
        cells = ((block * LANES + lanes) * COLUMNS + columns).reshape(-1, 1)
        return cells, np.full((len(cells), 1), row), np.full((len(cells), 1), WHOLE, np.int8)


def memory(m: Machine) -> TensorMemory:
    """That of a machine."""
    remarks = m.statistics.remarks if m.launch.unallocated else None
    found: TensorMemory = m.units.setdefault("tensor memory", None) or TensorMemory(m.order, m.blocks, remarks)
    m.units["tensor memory"] = found
    return found


def matrix_region(block: int, address: int, rows: int, columns: int) -> Region:
    """Where a matrix of 64 or 128 rows lies."""
    row = np.arange(rows)[:, None]
    lanes = row if rows == LANES else row // 16 * 32 + row % 16
    return block, lanes + (address >> 16), (address & 0xFFFF) + np.arange(columns)[None]


def _columns(m: Machine, active: Active, amount: Reader) -> int:
    values = np.broadcast_to(amount(m, active), (m.count,))[active.mask]
    if (values != values[0]).any():
        raise Hazard("barrier", "the threads of tcgen05.alloc or tcgen05.dealloc differ in the number of columns")
    return int(values[0])


@implements("tcgen05.alloc", control=True)
def allocate(entry: Entry, instruction: Instruction) -> Step:
    """Columns of tensor memory; their address is stored to shared memory. A warp of a pair waits for the other."""
    where, amount = address(entry, instruction.operands[0]), reader(entry, instruction.operands[1], "u32")
    pair = "cta_group::2" in instruction.parts

    def run(m: Machine, active: Active) -> Continue | None:
        chosen = m.guard(instruction, active)
        if not chosen.mask.any():
            return None
        count = _columns(m, chosen, amount)
        if count < 32 or count & (count - 1) or count > COLUMNS:
            raise Hazard(
                "barrier", f"{count} columns of tensor memory; powers of two from 32 to {COLUMNS} are possible"
            )
        warps = m.whole_warps(chosen, "tcgen05.alloc")
        addresses, tensor = where(m, chosen), memory(m)
        for warp in warps.tolist():
            block = warp // m.warps
            free = [at for at in range(0, COLUMNS, count) if not tensor.allocated[block, at : at + count].any()]
            if not free:
                raise Hazard("deadlock", "there is no tensor memory left")
            tensor.allocated[block, free[0] : free[0] + count] = True
            one = np.zeros(m.count, bool)
            one[warp * WARP] = True
            store_bytes(m, Active(one, False), "shared", addresses, np.array([[free[0]]], np.uint32).view(np.uint8))
        return [(m.pc + 1, active.mask & ~chosen.mask), *_paired(m, warps.tolist())] if pair else None

    return run


def _paired(m: Machine, warps: list[int]) -> Continue:
    """The warps that go on: those whose partner in the other block of the pair has come."""
    waiting: dict[int, dict[int, int]] = m.units.setdefault("tcgen05.alloc", {})
    found = []
    for warp in warps:
        block = warp // m.warps
        here = waiting.setdefault(block - block % m.cluster % 2, {})
        here[block] = warp
        if len(here) == 2:
            mask = np.zeros(m.count, bool)
            mask.reshape(-1, WARP)[list(here.values())] = True
            found.append((m.pc + 1, mask & m.started))
            here.clear()
    return found


@implements("tcgen05.dealloc")
def free(entry: Entry, instruction: Instruction) -> Step:
    """Give columns back."""
    where, amount = reader(entry, instruction.operands[0], "u32"), reader(entry, instruction.operands[1], "u32")

    def run(m: Machine, active: Active) -> None:
        count = _columns(m, active, amount)
        starts, tensor = np.broadcast_to(where(m, active), (m.count,)), memory(m)
        for warp in m.whole_warps(active, "tcgen05.dealloc").tolist():
            first = int(starts[warp * WARP])
            region = (warp // m.warps, slice(first, first + count))
            if not tensor.allocated[region].all():
                raise Hazard("barrier", "tensor memory is given back that was not allocated")
            tensor.allocated[region] = False

    return run


@implements("tcgen05.relinquish_alloc_permit", "tcgen05.fence::before_thread_sync", "tcgen05.fence::after_thread_sync")
def nothing(entry: Entry, instruction: Instruction) -> Step:
    """Promises and order that change nothing here."""
    return lambda m, active: None


def _regions(m: Machine, active: Active, starts: Array, count: int, shape: str, split: int) -> tuple[Array, list[Any]]:
    """Warps, and of each the index (block, lanes [32, 1], columns [32, registers])."""
    warps = m.whole_warps(active, "tcgen05.ld or tcgen05.st")
    found = []
    for warp in warps.tolist():
        own = starts[warp * WARP : (warp + 1) * WARP]
        if (own != own[0]).any():
            raise Hazard("barrier", "the lanes of a warp give different addresses of tensor memory")
        lane, column = int(own[0]) >> 16, int(own[0]) & 0xFFFF
        if lane // WARP != warp % m.warps % 4:
            raise Hazard("out of bounds", f"warp {warp % m.warps} accesses lane {lane} of tensor memory")
        lanes, columns = lane + np.arange(WARP)[:, None], column + np.arange(count)[None]
        if shape == "16x32bx2":
            lanes, columns = lane + np.arange(WARP)[:, None] % 16, columns + np.arange(WARP)[:, None] // 16 * split
        if (lanes >= LANES).any() or (columns >= COLUMNS).any():
            raise Hazard("out of bounds", "tensor memory beyond its lanes or columns")
        found.append((warp // m.warps, lanes, columns))
    return warps, found


def _form(instruction: Instruction) -> tuple[str, int]:
    shape = next((part for part in instruction.parts if part in ("32x32b", "16x32bx2")), "")
    count = next((int(part[1:]) for part in instruction.parts if part[0] == "x" and part[1:].isdigit()), 0)
    possible = {"sync", "aligned", shape, f"x{count}", "b32", *([UNPACK] if instruction.parts[1] == "st" else [])}
    if not shape or not count or {*instruction.parts[2:]} - possible:
        raise UnknownInstruction("this shape of tcgen05.ld or tcgen05.st is not implemented")
    return shape, count


@implements("tcgen05.st")
def store(entry: Entry, instruction: Instruction) -> Step:
    """Registers to tensor memory."""
    shape, count = _form(instruction)
    where = address(entry, instruction.operands[0])
    split = constant(instruction.operands[1]) if shape == "16x32bx2" else 0
    sources, unpacks = readers(entry, instruction.operands[-1], "b32"), UNPACK in instruction.parts

    def run(m: Machine, active: Active) -> None:
        warps, regions = _regions(m, active, where(m, active), count * (1 + unpacks), shape, split)
        held, tensor = registers(m, active, sources, warps), memory(m)
        if unpacks:
            held = np.ascontiguousarray(held).view(np.uint16).astype(np.uint32) | np.uint32(0xFFFF0000)
        for warp, region, values in zip(warps.tolist(), regions, held, strict=True):
            tensor.write(region, values, int(m.row[warp * WARP]))
            tensor.storing[region] = True
            stored(m).setdefault(warp, []).append(region)

    return run


def stored(m: Machine) -> dict[int, list[Region]]:
    """What each warp has stored and not waited for."""
    found: dict[int, list[Region]] = m.units.setdefault("tcgen05.st", {})
    return found


def loaded(m: Machine) -> dict[int, list[tuple[Region, list[str]]]]:
    """What each warp has loaded and not waited for, and the registers that it was loaded to."""
    found: dict[int, list[tuple[Region, list[str]]]] = m.units.setdefault("tcgen05.ld", {})
    return found


def _read_early(m: Machine, name: str, threads: Array) -> None:
    """A register is read without a wait: hardware has waited for its load then, for this load alone."""
    for warp in np.flatnonzero(threads.reshape(-1, WARP).any(1)).tolist():
        for region, names in [each for each in loaded(m).get(warp, []) if name in each[1]]:
            memory(m).loading[region] = False
            loaded(m)[warp].remove((region, names))


@implements("tcgen05.ld")
def load(entry: Entry, instruction: Instruction) -> Step:
    """Tensor memory to registers; reading them before `tcgen05.wait::ld` is a remark.

    The PTX ISA leaves it undefined; in Triton's kernels LLVM moves uses of the registers above the wait.
    """
    shape, count = _form(instruction)
    results, where = writers(entry, instruction.operands[0]), address(entry, instruction.operands[1])
    split = constant(instruction.operands[2]) if shape == "16x32bx2" else 0
    target = instruction.operands[0]
    names = [part.name for part in target.parts if isinstance(part, Register)] if isinstance(target, Vector) else []

    def run(m: Machine, active: Active) -> None:
        warps, regions = _regions(m, active, where(m, active), count, shape, split)
        tensor, held = memory(m), []
        for warp, region in zip(warps.tolist(), regions, strict=True):
            held.append(tensor.read(region, int(m.row[warp * WARP])))
            tensor.loading[region] = True
            loaded(m).setdefault(warp, []).append((region, names))
        m.early = partial(_read_early, m)
        values = np.stack(held)
        for i, result in enumerate(results):
            result(m, active, spread(m, active, np.ascontiguousarray(values[..., i]).reshape(-1)))
        for name in names:
            m.loading[name] = active.mask

    return run


@implements("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(entry: Entry, instruction: Instruction) -> Step:
    """The registers of loads may be read, what was loaded may be changed, and what was stored may be read."""
    loads = instruction.parts[1] == "wait::ld"

    def run(m: Machine, active: Active) -> None:
        tensor = memory(m)
        for warp in m.whole_warps(active, "tcgen05.wait").tolist():
            if loads:
                for region, _ in loaded(m).pop(warp, []):
                    tensor.loading[region] = False
            else:
                for region in stored(m).pop(warp, []):
                    tensor.storing[region] = False
        if loads:
            m.loading = {name: mask & ~active.mask for name, mask in m.loading.items() if (mask & ~active.mask).any()}

    return run
