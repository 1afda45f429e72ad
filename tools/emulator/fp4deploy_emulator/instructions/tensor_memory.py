"""tcgen05: tensor memory and the tensor core that works on it (SM100, SM103).

Source: PTX ISA, "Tensor Memory", "tcgen05.ld", "tcgen05.st", "tcgen05.cp", "tcgen05.mma", "Instruction descriptor",
"Shared memory descriptor", "Scale Factor Layout in the Tensor Memory".

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. Warp w of a group of four
reaches lanes 32 w to 32 w + 31. `.32x32b`: lane i of the warp, consecutive columns. Row m of D (M = 128) is lane m, its
column n the n-th column.

With M = 64, rows 16 i to 16 i + 15 are lanes 32 i to 32 i + 15.

A multiplication takes 32 bytes of K a row of A and B, in shared memory as descriptors say.

    kind::mxf4nvf4   64 E2M1 elements. Their scales come from tensor memory: rows r, r + 32, ... of a lane r in
                     consecutive columns, four bytes each, one for 16 elements; the same in each of the four groups of
                     32 lanes
    kind::mxf4       the same with a scale for 32 elements: two bytes of the four, which the instruction descriptor
                     names for A and for B
    kind::f16        16 elements of FP16 or BF16. A may lie in tensor memory, its rows as those of D, two elements a
                     column

`tcgen05.cp` copies scales from shared memory in the order of the multiplications. Triton stores them from registers
instead, so that no shipped kernel has it.

The work is done as late as possible: when nobody else can run. It reads shared memory as an agent that knows what its
issuer knew, so that operands which are overwritten too early are a race. Tensor memory that a multiplication will write
must not be touched until a commit behind it has been waited for, nor what it reads be changed. Stores and loads by
threads are asynchronous too: what they touch is free for others after `tcgen05.wait`. Accesses have the order of
`order`, cell by cell.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import BLOCKS, DEPTH, block_scaled, half_precision, plain
from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.bulk import advance, barrier_at, place
from fp4deploy_emulator.instructions.control import constant
from fp4deploy_emulator.instructions.data import spread, store_bytes
from fp4deploy_emulator.instructions.matrix import half_values, registers
from fp4deploy_emulator.instructions.warpgroup import matrix_positions, read_matrix
from fp4deploy_emulator.machine import WARP, Active, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader, readers, writers
from fp4deploy_emulator.order import WHOLE, Accesses, Order
from fp4deploy_emulator.ptx import Address, Entry, Instruction, Register, Vector

Array = NDArray[Any]
Region = tuple[Any, Any, Any]  # an index of the arrays: block, lanes, columns
LANES, COLUMNS = 128, 512
SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}
SCALED = {  # qualifiers, by the type of the scales
    "ue4m3": [{"kind::mxf4nvf4", "block_scale", size} for size in ("scale_vec::4X", "block16")],
    "ue8m0": [{"kind::mxf4", "block_scale", size} for size in ("scale_vec::2X", "block32")],
}
SCALE_BITS = 3 << 29 | 1 << 23 | 3 << 4  # of an instruction descriptor: which scales of a word, and their type


class TensorMemory:
    """Of all thread blocks of a batch; a cell is one column of one lane.

    writes, reads: multiplications under way that will write or read a cell. storing, loading: a store or load of a
    thread has not been waited for.
    """

    def __init__(self, order: Order, blocks: int) -> None:
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
        if not self.allocated[block, columns].all():
            raise Hazard("out of bounds", "tensor memory outside of what was allocated")

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
    found: TensorMemory = m.units.setdefault("tensor memory", None) or TensorMemory(m.order, m.blocks)
    m.units["tensor memory"] = found
    return found


def matrix_region(block: int, address: int, rows: int, columns: int) -> Region:
    """Where a matrix of 64 or 128 rows lies."""
    row = np.arange(rows)[:, None]
    lanes = row if rows == LANES else row // 16 * 32 + row % 16
    return block, lanes + (address >> 16), (address & 0xFFFF) + np.arange(columns)[None]


@implements("tcgen05.alloc")
def allocate(entry: Entry, instruction: Instruction) -> Step:
    """Columns of tensor memory; their address is stored to shared memory."""
    where, count = address(entry, instruction.operands[0]), constant(instruction.operands[1])

    def run(m: Machine, active: Active) -> None:
        if count < 32 or count & (count - 1) or count > COLUMNS:
            raise Hazard(
                "barrier", f"{count} columns of tensor memory; powers of two from 32 to {COLUMNS} are possible"
            )
        warps = m.whole_warps(active, "tcgen05.alloc")
        addresses, tensor = where(m, active), memory(m)
        for warp in warps.tolist():
            block = warp // m.warps
            free = [at for at in range(0, COLUMNS, count) if not tensor.allocated[block, at : at + count].any()]
            if not free:
                raise Hazard("deadlock", "there is no tensor memory left")
            tensor.allocated[block, free[0] : free[0] + count] = True
            one = np.zeros(m.count, bool)
            one[warp * WARP] = True
            store_bytes(m, Active(one, False), "shared", addresses, np.array([[free[0]]], np.uint32).view(np.uint8))

    return run


@implements("tcgen05.dealloc")
def free(entry: Entry, instruction: Instruction) -> Step:
    """Give columns back."""
    where, count = reader(entry, instruction.operands[0], "u32"), constant(instruction.operands[1])

    def run(m: Machine, active: Active) -> None:
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
    if not shape or not count or {*instruction.parts[2:]} - {"sync", "aligned", shape, f"x{count}", "b32"}:
        raise UnknownInstruction("this shape of tcgen05.ld or tcgen05.st is not implemented")
    return shape, count


@implements("tcgen05.st")
def store(entry: Entry, instruction: Instruction) -> Step:
    """Registers to tensor memory."""
    shape, count = _form(instruction)
    where = address(entry, instruction.operands[0])
    split = constant(instruction.operands[1]) if shape == "16x32bx2" else 0
    sources = readers(entry, instruction.operands[-1], "b32")

    def run(m: Machine, active: Active) -> None:
        warps, regions = _regions(m, active, where(m, active), count, shape, split)
        held, tensor = registers(m, active, sources, warps), memory(m)
        for warp, region, values in zip(warps.tolist(), regions, held, strict=True):
            tensor.write(region, values, int(m.row[warp * WARP]))
            tensor.storing[region] = True
            stored(m).setdefault(warp, []).append(region)

    return run


def stored(m: Machine) -> dict[int, list[Region]]:
    """What each warp has stored and not waited for."""
    found: dict[int, list[Region]] = m.units.setdefault("tcgen05.st", {})
    return found


def loaded(m: Machine) -> dict[int, list[Region]]:
    """What each warp has loaded and not waited for."""
    found: dict[int, list[Region]] = m.units.setdefault("tcgen05.ld", {})
    return found


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
            loaded(m).setdefault(warp, []).append(region)
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
        tensor, under_way = memory(m), loaded(m) if loads else stored(m)
        for warp in m.whole_warps(active, "tcgen05.wait").tolist():
            for region in under_way.pop(warp, []):
                (tensor.loading if loads else tensor.storing)[region] = False
        if loads:
            m.loading = {name: mask & ~active.mask for name, mask in m.loading.items() if (mask & ~active.mask).any()}

    return run


@implements("tcgen05.cp")
def copy(entry: Entry, instruction: Instruction) -> Step:
    """Scales from shared memory: 32 rows of 16 bytes, to each of the four groups of 32 lanes."""
    if {*instruction.parts} != {"tcgen05", "cp", "cta_group::1", "32x128b", "warpx4"}:
        raise UnknownInstruction("this shape of tcgen05.cp is not implemented")
    where, source = address(entry, instruction.operands[0]), reader(entry, instruction.operands[1], "u64")

    def run(m: Machine, active: Active) -> None:
        addresses, descriptors = (np.broadcast_to(each(m, active), (m.count,)) for each in (where, source))
        for thread in active.index.tolist():
            at, block = int(addresses[thread]), int(m.block[thread])
            if at >> 16:
                raise Hazard("misaligned", f"a copy to all groups of lanes begins at lane {at >> 16} of tensor memory")
            copied = Copied(block, int(descriptors[thread]), 0, LANES, 4, m.launch.model)
            _issue(m, thread, copied, matrix_region(block, at, LANES, 4), False)

    return run


@implements("tcgen05.mma")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """D = A B^T + D: of E2M1 with a scale for 16 or 32 elements, or of FP16 and BF16."""
    kind_and_more = {*instruction.parts} - {"tcgen05", "mma", "cta_group::1"}
    scale_type = next((name for name, forms in SCALED.items() if kind_and_more in forms), "")
    scaled = bool(scale_type)
    if "cta_group::1" not in instruction.parts or not (scaled or kind_and_more == {"kind::f16"}):
        raise UnknownInstruction("this kind of tcgen05.mma is not implemented")
    d, a, b, kind, *scales, adds = instruction.operands
    if len(scales) != 2 * scaled:
        raise UnknownInstruction("tcgen05.mma with other operands is not implemented")
    in_tensor_memory = isinstance(a, Address)
    readers_ = [address(entry, d), address(entry, a) if in_tensor_memory else reader(entry, a, "u64")]
    readers_ += [reader(entry, b, "u64"), reader(entry, kind, "u32"), reader(entry, adds, "pred")]
    readers_ += [address(entry, each) for each in scales]

    def run(m: Machine, active: Active) -> None:
        values = [np.broadcast_to(each(m, active), (m.count,)) for each in readers_]
        for thread in active.index.tolist():
            at, left, right, descriptor, add, *first = (int(value[thread]) for value in values)
            block, model = int(m.block[thread]), m.launch.model
            product: Product
            if scaled:
                which = _scale_bytes(descriptor, scale_type)
                rows, columns = _sizes(descriptor & ~SCALE_BITS, (1, 1), 27, (LANES,))
                product = BlockScaled(block, left, right, rows, columns, model, first[0], first[1], *which, scale_type)
            else:
                rows, columns = _sizes(descriptor, None, 24, (64, LANES))
                bfloat = bool(descriptor >> 7 & 7)
                product = Halves(block, left, right, rows, columns, model, bfloat, in_tensor_memory)
            _issue(m, thread, product, matrix_region(block, at, rows, columns), bool(add))

    return run


def _scale_bytes(descriptor: int, scale_type: str) -> tuple[int, int]:
    """The first byte of the scales of A and of B in their words of tensor memory."""
    of_a, of_b, eight = descriptor >> 29 & 3, descriptor >> 4 & 3, bool(descriptor >> 23 & 1)
    possible = {0, 4 - DEPTH // BLOCKS[scale_type]}
    if eight != (scale_type == "ue8m0") or not {of_a, of_b} <= possible:
        raise UnknownInstruction(f"the instruction descriptor {descriptor:#x} with scales {scale_type}")
    return of_a, of_b


def _sizes(descriptor: int, types: tuple[int, int] | None, shift: int, possible: tuple[int, ...]) -> tuple[int, int]:
    """M and N of an instruction descriptor: K contiguous in A and B, nothing negated, no sparsity, float32 sums.

    types: of A and B; None: FP16 (0) or BF16 (1), with M in units of 16 instead of 128.
    """
    found = (descriptor >> 7 & 7, descriptor >> 10 & 7)
    unit = 4 if types is None else 7
    rows, columns = (descriptor >> shift & (0x1F if types is None else 3)) << unit, (descriptor >> 17 & 63) << 3
    good = found == types if types else found in ((0, 0), (1, 1)) and descriptor >> 4 & 3 == 1
    rest = descriptor & (0x4F if types is None else 0x7F) or descriptor >> 13 & 15 or descriptor >> 23 & 1
    if not good or rest or rows not in possible or descriptor >> (30 if types is None else 29):
        raise UnknownInstruction(f"the instruction descriptor {descriptor:#x} is not implemented")
    return rows, columns


@dataclass(frozen=True)
class Product(ABC):
    """One multiplication or copy of one block: descriptors or addresses of A and B, sizes, accumulator."""

    block: int
    a: int
    b: int
    rows: int
    columns: int
    model: str

    @abstractmethod
    def reads(self) -> list[Region]:
        """What it reads of tensor memory, except D."""

    @abstractmethod
    def result(self, m: Machine, row: int, before: Array) -> Array:
        """D, words [rows, columns]."""

    def operand(self, m: Machine, row: int, descriptor: int, rows: int, size: int = 32) -> Array:
        """Bytes [rows, size] of A or B in shared memory."""
        swizzle = SWIZZLES.get(descriptor >> 61 & 7)
        if swizzle is None:
            raise UnknownInstruction("this swizzle of a matrix descriptor is not implemented")
        return read_matrix(m, self.block, row, matrix_positions(descriptor, rows, size, swizzle))


@dataclass(frozen=True)
class Copied(Product):
    """No product: 32 rows of four words, as descriptor A says, four times."""

    def reads(self) -> list[Region]:
        """Nothing."""
        return []

    def result(self, m: Machine, row: int, before: Array) -> Array:
        """uint32 [128, 4]"""
        return np.tile(np.ascontiguousarray(self.operand(m, row, self.a, WARP, 16)).view(np.uint32), (4, 1))


@dataclass(frozen=True)
class BlockScaled(Product):
    """Of E2M1; addresses of the scales, the first byte of each in its word, their type."""

    scales_a: int
    scales_b: int
    first_a: int
    first_b: int
    scale_type: str

    def reads(self) -> list[Region]:
        """The scales."""
        pairs = ((self.scales_a, self.rows), (self.scales_b, self.columns))
        return [matrix_region(self.block, start & 0xFFFF, LANES, -(-count // WARP)) for start, count in pairs]

    def result(self, m: Machine, row: int, before: Array) -> Array:
        """As `block_scaled`."""
        codes = []
        for descriptor, rows in ((self.a, self.rows), (self.b, self.columns)):
            packed = self.operand(m, row, descriptor, rows)
            codes.append(np.stack([packed & 15, packed >> 4], -1).reshape(rows, 64))
        scales, count = [], DEPTH // BLOCKS[self.scale_type]
        sides = ((self.rows, self.first_a), (self.columns, self.first_b))
        for region, (rows, first) in zip(self.reads(), sides, strict=True):
            copies = memory(m).read(region, row, unit=True).reshape(4, WARP, -1)
            if (copies != copies[0]).any():
                raise Hazard("barrier", "the scales differ between the groups of 32 lanes of tensor memory")
            words = np.ascontiguousarray(copies[0].T).reshape(-1, 1).view(np.uint8)
            scales.append(words[:rows, first : first + count])
        return block_scaled(codes[0], codes[1], scales[0], scales[1], before, self.model, self.scale_type)


@dataclass(frozen=True)
class Halves(Product):
    """Of FP16 or BF16; whether A lies in tensor memory."""

    bfloat: bool
    in_tensor_memory: bool

    def reads(self) -> list[Region]:
        """A."""
        return [matrix_region(self.block, self.a, self.rows, 8)] if self.in_tensor_memory else []

    def result(self, m: Machine, row: int, before: Array) -> Array:
        """As `plain`."""
        if self.in_tensor_memory:
            left = memory(m).read(self.reads()[0], row, unit=True)
        else:
            left = self.operand(m, row, self.a, self.rows)
        right = self.operand(m, row, self.b, self.columns)
        a, b = (half_values(np.ascontiguousarray(each).view(np.uint16), self.bfloat) for each in (left, right))
        smallest = -126 if self.bfloat else -14
        return plain(a, b, before, half_precision(m.launch.capability), smallest, self.model)


def issuers(m: Machine) -> dict[int, set[int]]:
    """Of each block the threads that have issued multiplications or copies since their last commit."""
    found: dict[int, set[int]] = m.units.setdefault("tcgen05.mma", {})
    return found


def _issue(m: Machine, thread: int, product: Product, to: Region, add: bool) -> None:
    tensor, row = memory(m), m.tensor_row(product.block)
    issuers(m).setdefault(product.block, set()).add(thread)
    for region in (to, *product.reads()):
        tensor.usable(region)
    tensor.writes[to] += 1
    for region in product.reads():
        tensor.reads[region] += 1
    m.order.join(row, m.order.clocks[m.row[thread]])
    m.asynchronous.append(partial(_multiply, m, product, to, add, m.order.clocks[row].copy()))


def _multiply(m: Machine, product: Product, to: Region, add: bool, known: Array) -> None:
    """With what its issuer knew; in the order in which multiplications were issued."""
    tensor, row = memory(m), m.tensor_row(product.block)
    own = m.order.own[row]
    later = m.order.clocks[row].copy()
    known[own] = later[own]
    m.order.clocks[row] = known
    before = np.zeros((product.rows, product.columns), np.float32)
    if add:
        before = tensor.read(to, row, unit=True).view(np.float32)
    tensor.write(to, product.result(m, row, before).view(np.uint32), row, unit=True)
    m.order.clocks[row] = np.maximum(known, later)
    tensor.writes[to] -= 1
    for region in product.reads():
        tensor.reads[region] -= 1


@implements("tcgen05.commit")
def commit(entry: Entry, instruction: Instruction) -> Step:
    """One arrival at an mbarrier when all multiplications before are done."""
    if "mbarrier::arrive::one" not in instruction.parts or "multicast::cluster" in instruction.parts:
        raise UnknownInstruction("this form of tcgen05.commit is not implemented")
    where = address(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        addresses = where(m, active)
        for thread in active.index.tolist():
            block = int(m.block[thread])
            if (threads := issuers(m).setdefault(block, set())) - {thread}:
                raise Hazard("barrier", "tcgen05.commit by another thread than the one that issued what is under way")
            threads.clear()
            position = place(m, int(addresses[thread]), block)
            barrier_at(m, position)
            arrived: Callable[[], None] = partial(_arrive, m, position, block)
            m.asynchronous.append(arrived)

    return run


def _arrive(m: Machine, position: int, block: int) -> None:
    barrier, row = barrier_at(m, position), m.tensor_row(block)
    np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
    m.order.advance(np.array([row]))
    barrier.pending -= 1
    advance(m, barrier)
