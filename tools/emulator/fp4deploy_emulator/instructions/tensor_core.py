"""tcgen05: the tensor core that works on tensor memory (SM100, SM103).

Source: PTX ISA, "tcgen05.cp", "tcgen05.mma", "tcgen05.commit", "Instruction descriptor", "Shared memory descriptor",
"Scale Factor Layout in the Tensor Memory", "Data Path Layout Organization".

A multiplication takes 32 bytes of K a row of A and B, in shared memory as descriptors say.

    kind::mxf4nvf4   64 E2M1 elements. Their scales come from tensor memory: rows r, r + 32, ... of a lane r in
                     consecutive columns, four bytes each, one for 16 elements; the same in each of the four groups of
                     32 lanes
    kind::mxf4       the same with a scale for 32 elements: two bytes of the four, which the instruction descriptor
                     names for A and for B
    kind::mxf8f6f4   32 E4M3 elements with one scale, one byte of the four, named likewise
    kind::f16        16 elements of FP16 or BF16

A may lie in tensor memory, its rows as those of D, four bytes a column.

`tcgen05.cp` copies scales from shared memory in the order of the multiplications. Triton stores them from registers
instead, so that no shipped kernel has it.

**Pairs.** With `.cta_group::2` one thread issues work for two blocks of a cluster, of even and odd rank. Of M = 256
rows each block has 128: its half of A and of the scales of A, and of D in its tensor memory. Each block also holds
half of the rows of B, and the scales of all of them. Descriptors and addresses are those of both blocks. `tcgen05.cp`
copies in each block from its own shared memory. A commit is for the work of the pair.

The work is done as late as possible: when nobody else can run. It reads shared memory as an agent that knows what its
issuer knew, so that operands which are overwritten too early are a race.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import block_scaled, block_scaled_fp8, half_precision, plain
from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.bulk import advance, barrier_at, place
from fp4deploy_emulator.instructions.matrix import half_values
from fp4deploy_emulator.instructions.tensor_memory import LANES, Region, matrix_region, memory
from fp4deploy_emulator.instructions.warpgroup import matrix_positions, read_matrix
from fp4deploy_emulator.machine import WARP, WINDOW, Active, Machine, Step, implements
from fp4deploy_emulator.operands import address, reader
from fp4deploy_emulator.ptx import Address, Entry, Instruction

Array = NDArray[Any]
SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}


class Kind(NamedTuple):
    """Of a block-scaled multiplication: its qualifiers, one of `sizes` among them.

    scale_type, scales: of the scales, and how many a row has. element: type of A and B in an instruction descriptor, 1
    for E2M1, 0 for E4M3.
    """

    name: str
    sizes: tuple[str, ...]
    scale_type: str
    scales: int
    element: int


KINDS = (
    Kind("kind::mxf4nvf4", ("scale_vec::4X", "block16"), "ue4m3", 4, 1),
    Kind("kind::mxf4", ("scale_vec::2X", "block32"), "ue8m0", 2, 1),
    Kind("kind::mxf8f6f4", ("scale_vec::1X", "block32"), "ue8m0", 1, 0),
)
SCALE_BITS = 3 << 29 | 1 << 23 | 3 << 4  # of an instruction descriptor: which scales of a word, and their type
PAIR, SINGLE = "cta_group::2", "cta_group::1"


def _blocks(m: Machine, thread: int, pair: bool) -> tuple[int, ...]:
    """The blocks whose tensor cores an instruction is for, the one of even rank first."""
    block = int(m.block[thread])
    if not pair:
        return (block,)
    if m.cluster % 2:
        raise Hazard("barrier", f"cta_group::2 in a cluster of {m.cluster} blocks")
    first = block - block % m.cluster % 2
    return first, first + 1


@implements("tcgen05.cp")
def copy(entry: Entry, instruction: Instruction) -> Step:
    """Scales from shared memory: 32 rows of 16 bytes, to each of the four groups of 32 lanes."""
    group = {*instruction.parts} - {"tcgen05", "cp", "32x128b", "warpx4"}
    if group not in ({PAIR}, {SINGLE}) or len(instruction.parts) != 5:
        raise UnknownInstruction("this shape of tcgen05.cp is not implemented")
    where, source = address(entry, instruction.operands[0]), reader(entry, instruction.operands[1], "u64")

    def run(m: Machine, active: Active) -> None:
        addresses, descriptors = (np.broadcast_to(each(m, active), (m.count,)) for each in (where, source))
        for thread in active.index.tolist():
            at = int(addresses[thread])
            if at >> 16:
                raise Hazard("misaligned", f"a copy to all groups of lanes begins at lane {at >> 16} of tensor memory")
            blocks = _blocks(m, thread, group == {PAIR})
            for block in blocks:
                copied = Copied(block, blocks, int(descriptors[thread]), 0, LANES, 4, m.launch.model)
                _issue(m, thread, copied, matrix_region(block, at, LANES, 4), False)

    return run


@implements("tcgen05.mma")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """D = A B^T + D: of E2M1 with a scale for 16 or 32 elements, or of FP16 and BF16."""
    kind_and_more = {part for part in instruction.parts if not part.startswith("collector")} - {"tcgen05", "mma"}
    pair, kind_and_more = PAIR in kind_and_more, kind_and_more - {PAIR, SINGLE}
    scaled = next((k for k in KINDS for size in k.sizes if kind_and_more == {k.name, "block_scale", size}), None)
    if not scaled and (pair or kind_and_more != {"kind::f16"}):
        raise UnknownInstruction("this kind of tcgen05.mma is not implemented")
    d, a, b, kind, *scales, adds = instruction.operands
    if len(scales) != 2 * bool(scaled):
        raise UnknownInstruction("tcgen05.mma with other operands is not implemented")
    in_tensor_memory = isinstance(a, Address)
    readers_ = [address(entry, d), address(entry, a) if in_tensor_memory else reader(entry, a, "u64")]
    readers_ += [reader(entry, b, "u64"), reader(entry, kind, "u32"), reader(entry, adds, "pred")]
    readers_ += [address(entry, each) for each in scales]

    def run(m: Machine, active: Active) -> None:
        values = [np.broadcast_to(each(m, active), (m.count,)) for each in readers_]
        for thread in active.index.tolist():
            at, left, right, descriptor, add, *first = (int(value[thread]) for value in values)
            blocks, model = _blocks(m, thread, pair), m.launch.model
            product: Product
            if scaled:
                which = _scale_bytes(descriptor, scaled)
                _, columns = _sizes(descriptor & ~SCALE_BITS, (scaled.element,) * 2, 27, (len(blocks) * LANES,))
                rows, more = LANES, (in_tensor_memory, first[0], first[1], *which, scaled)
                product = BlockScaled(blocks[0], blocks, left, right, rows, columns, model, *more)
            else:
                rows, columns = _sizes(descriptor, None, 24, (64, LANES))
                bfloat = bool(descriptor >> 7 & 7)
                product = Halves(blocks[0], blocks, left, right, rows, columns, model, in_tensor_memory, bfloat)
            for block in blocks:
                _issue(m, thread, replace(product, block=block), matrix_region(block, at, rows, columns), bool(add))

    return run


def _scale_bytes(descriptor: int, kind: Kind) -> tuple[int, int]:
    """The first byte of the scales of A and of B in their words of tensor memory."""
    of_a, of_b, eight = descriptor >> 29 & 3, descriptor >> 4 & 3, bool(descriptor >> 23 & 1)
    if eight != (kind.scale_type == "ue8m0") or not {of_a, of_b} <= {*range(0, 4, kind.scales)}:
        raise UnknownInstruction(f"the instruction descriptor {descriptor:#x} with scales {kind.scale_type}")
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
    """One multiplication or copy of one block: descriptors or addresses of A and B, sizes, accumulator.

    blocks: those that work together, `block` among them.
    """

    block: int
    blocks: tuple[int, ...]
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

    @property
    def unit(self) -> int:
        """The block whose tensor core stands for all that work together."""
        return self.blocks[0]

    def operand(
        self, m: Machine, row: int, descriptor: int, rows: int, size: int = 32, block: int | None = None
    ) -> Array:
        """Bytes [rows, size] of A or B in the shared memory of a block."""
        swizzle = SWIZZLES.get(descriptor >> 61 & 7)
        if swizzle is None:
            raise UnknownInstruction("this swizzle of a matrix descriptor is not implemented")
        positions = matrix_positions(descriptor, rows, size, swizzle)
        place = self.block if block is None else block
        return read_matrix(m, place, row, positions, m.statistics.remarks, "tcgen05")

    def second(self, m: Machine, row: int) -> Array:
        """Bytes [columns, 32] of B: equal parts of its rows from each block."""
        rows = self.columns // len(self.blocks)
        return np.concatenate([self.operand(m, row, self.b, rows, block=block) for block in self.blocks])


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
class Multiplied(Product):
    """A product; whether A lies in tensor memory, four bytes a column."""

    in_tensor_memory: bool

    def reads(self) -> list[Region]:
        """A."""
        return [matrix_region(self.block, self.a, self.rows, 8)] if self.in_tensor_memory else []

    def operands(self, m: Machine, row: int) -> tuple[Array, Array]:
        """Bytes [rows, 32] and [columns, 32] of A and B."""
        if not self.in_tensor_memory:
            return self.operand(m, row, self.a, self.rows), self.second(m, row)
        words = memory(m).read(Multiplied.reads(self)[0], row, unit=True)
        return np.ascontiguousarray(words).view(np.uint8), self.second(m, row)


@dataclass(frozen=True)
class BlockScaled(Multiplied):
    """Of E2M1 or E4M3; addresses of the scales, the first byte of each in its word."""

    scales_a: int
    scales_b: int
    first_a: int
    first_b: int
    kind: Kind

    def reads(self) -> list[Region]:
        """A, and the scales."""
        return [*super().reads(), *self._scales()]

    def _scales(self) -> list[Region]:
        pairs = ((self.scales_a, self.rows), (self.scales_b, self.columns))
        return [matrix_region(self.block, start & 0xFFFF, LANES, -(-count // WARP)) for start, count in pairs]

    def result(self, m: Machine, row: int, before: Array) -> Array:
        """As `block_scaled`, of E4M3 as `block_scaled_fp8`."""
        a, b = self.operands(m, row)
        scales, count = [], self.kind.scales
        sides = ((self.rows, self.first_a), (self.columns, self.first_b))
        for region, (rows, first) in zip(self._scales(), sides, strict=True):
            copies = memory(m).read(region, row, unit=True).reshape(4, WARP, -1)
            if (copies != copies[0]).any():
                raise Hazard("barrier", "the scales differ between the groups of 32 lanes of tensor memory")
            words = np.ascontiguousarray(copies[0].T).reshape(-1, 1).view(np.uint8)
            scales.append(words[:rows, first : first + count])
        if count == 1:
            return block_scaled_fp8(a, b, scales[0][:, 0], scales[1][:, 0], before, self.model)
        a, b = (np.stack([packed & 15, packed >> 4], -1).reshape(len(packed), 64) for packed in (a, b))
        return block_scaled(a, b, scales[0], scales[1], before, self.model, self.kind.scale_type)


@dataclass(frozen=True)
class Halves(Multiplied):
    """Of FP16 or BF16."""

    bfloat: bool

    def result(self, m: Machine, row: int, before: Array) -> Array:
        """As `plain`."""
        a, b = (half_values(np.ascontiguousarray(each).view(np.uint16), self.bfloat) for each in self.operands(m, row))
        smallest = -126 if self.bfloat else -14
        return plain(a, b, before, half_precision(m.launch.capability), smallest, self.model)


def issuers(m: Machine) -> dict[int, set[int]]:
    """Of each block, or pair by its first, the threads that have issued work since their last commit."""
    found: dict[int, set[int]] = m.units.setdefault("tcgen05.mma", {})
    return found


def _issue(m: Machine, thread: int, product: Product, to: Region, add: bool) -> None:
    tensor, row = memory(m), m.tensor_row(product.unit)
    issuers(m).setdefault(product.unit, set()).add(thread)
    for region in (to, *product.reads()):
        tensor.usable(region)
    tensor.writes[to] += 1
    for region in product.reads():
        tensor.reads[region] += 1
    m.order.join(row, m.order.clocks[m.row[thread]])
    m.asynchronous.append(partial(_multiply, m, product, to, add, m.order.clocks[row].copy()))


def _multiply(m: Machine, product: Product, to: Region, add: bool, known: Array) -> None:
    """With what its issuer knew; in the order in which multiplications were issued."""
    tensor, row = memory(m), m.tensor_row(product.unit)
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
    """One arrival at an mbarrier, or at that of each block of a mask, when all multiplications before are done."""
    if "mbarrier::arrive::one" not in instruction.parts:
        raise UnknownInstruction("this form of tcgen05.commit is not implemented")
    where, pair = address(entry, instruction.operands[0]), PAIR in instruction.parts
    multicast = "multicast::cluster" in instruction.parts
    members = reader(entry, instruction.operands[1], "u16") if multicast else None

    def run(m: Machine, active: Active) -> None:
        addresses = where(m, active)
        masks = np.broadcast_to(members(m, active), (m.count,)) if members else None
        for thread in active.index.tolist():
            unit = _blocks(m, thread, pair)[0]
            if (threads := issuers(m).setdefault(unit, set())) - {thread}:
                raise Hazard("barrier", "tcgen05.commit by another thread than the one that issued what is under way")
            threads.clear()
            at, block = int(addresses[thread]), int(m.block[thread])
            if masks is None:
                signalled = [at]
            elif int(masks[thread]) >> m.cluster:
                raise Hazard("out of bounds", "a multicast to more blocks than the cluster has")
            else:
                ranks = [rank for rank in range(m.cluster) if int(masks[thread]) >> rank & 1]
                signalled = [at % WINDOW + rank * WINDOW for rank in ranks]
            positions = [place(m, each, block) for each in signalled]
            for position in positions:
                barrier_at(m, position)
            arrived: Callable[[], None] = partial(_arrive, m, positions, unit)
            m.asynchronous.append(arrived)

    return run


def _arrive(m: Machine, positions: list[int], unit: int) -> None:
    row = m.tensor_row(unit)
    for position in positions:
        barrier = barrier_at(m, position)
        np.maximum(barrier.clock, m.order.clocks[row], out=barrier.clock)
        barrier.pending -= 1
    m.order.advance(np.array([row]))
    for position in positions:
        advance(m, barrier_at(m, position))
