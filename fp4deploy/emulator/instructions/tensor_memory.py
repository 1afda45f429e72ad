"""tcgen05: tensor memory and the tensor core that works on it (SM100, SM103).

Source: PTX ISA, "Tensor Memory", "tcgen05.ld", "tcgen05.st", "tcgen05.mma", "Instruction descriptor", "Shared memory
descriptor", "Scale Factor Layout in the Tensor Memory".

Tensor memory has 128 lanes of 512 columns of 32 bits; an address is lane << 16 | column. Warp w of a group of four
reaches lanes 32 w to 32 w + 31. `.32x32b`: lane i of the warp, consecutive columns. Row m of D (M = 128) is lane m, its
column n the n-th column.

A block-scaled multiplication takes 64 elements of K: 32 bytes a row of A and B, in shared memory as descriptors say,
and their scales from tensor memory: rows r, r + 32, ... of a lane r in consecutive columns, four bytes each, one for 16
elements; the same in each of the four groups of 32 lanes.

The work is done as late as possible: when nobody else can run. It reads shared memory as an agent that knows what its
issuer knew, so that operands which are overwritten too early are a race. Tensor memory that a multiplication will write
must not be touched until a commit behind it has been waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy.emulator.accumulate import block_scaled
from fp4deploy.emulator.faults import Hazard, UnknownInstruction
from fp4deploy.emulator.instructions.bulk import advance, barrier_at, place
from fp4deploy.emulator.instructions.control import constant
from fp4deploy.emulator.instructions.data import spread, store_bytes
from fp4deploy.emulator.instructions.matrix import registers
from fp4deploy.emulator.instructions.warpgroup import matrix_positions, read_matrix
from fp4deploy.emulator.machine import WARP, Active, Machine, Step, implements
from fp4deploy.emulator.operands import address, reader, readers, writers
from fp4deploy.emulator.ptx import Entry, Instruction, Register, Vector

Array = NDArray[Any]
LANES, COLUMNS = 128, 512
SWIZZLES = {0: 0, 2: 128, 4: 64, 6: 32}


class TensorMemory:
    """Of all thread blocks of a batch."""

    def __init__(self, blocks: int) -> None:
        self.content = np.zeros((blocks, LANES, COLUMNS), np.uint32)
        self.written = np.zeros((blocks, LANES, COLUMNS), bool)
        self.pending = np.zeros((blocks, LANES, COLUMNS), np.int32)
        self.allocated = np.zeros((blocks, COLUMNS), bool)

    def usable(self, where: Any, written: bool, waiting: bool = True) -> None:
        """Check an access to a region (an index of the arrays)."""
        block, _, columns = where
        if not self.allocated[block, columns].all():
            raise Hazard("out of bounds", "tensor memory outside of what was allocated")
        if waiting and self.pending[where].any():
            raise Hazard("unwaited copy", "tensor memory is accessed before a multiplication was waited for")
        if written and not self.written[where].all():
            raise Hazard("uninitialised", "tensor memory is read before it was written")


def memory(m: Machine) -> TensorMemory:
    """That of a machine."""
    found: TensorMemory = m.units.setdefault("tensor memory", None) or TensorMemory(m.blocks)
    m.units["tensor memory"] = found
    return found


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
        for region, values in zip(regions, held, strict=True):
            tensor.usable(region, written=False)
            tensor.content[region] = values
            tensor.written[region] = True

    return run


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
        _, regions = _regions(m, active, where(m, active), count, shape, split)
        tensor = memory(m)
        for region in regions:
            tensor.usable(region, written=True)
        held = np.stack([tensor.content[region] for region in regions])
        for i, result in enumerate(results):
            result(m, active, spread(m, active, np.ascontiguousarray(held[..., i]).reshape(-1)))
        for name in names:
            m.loading[name] = active.mask

    return run


@implements("tcgen05.wait::ld", "tcgen05.wait::st")
def wait(entry: Entry, instruction: Instruction) -> Step:
    """The registers of loads may be read; stores are done at once here."""

    def run(m: Machine, active: Active) -> None:
        if instruction.parts[1] == "wait::ld":
            m.loading = {name: mask & ~active.mask for name, mask in m.loading.items() if (mask & ~active.mask).any()}

    return run


@dataclass(frozen=True)
class Product:
    """One multiplication: descriptors, addresses in tensor memory, sizes; of one block."""

    block: int
    d: int
    a: int
    b: int
    scales_a: int
    scales_b: int
    rows: int
    columns: int
    add: bool


@implements("tcgen05.mma")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """D = A B^T + D of E2M1 with a scale for 16 elements."""
    parts = {*instruction.parts}
    if "kind::mxf4nvf4" not in parts or not parts & {"scale_vec::4X", "block16"} or "cta_group::1" not in parts:
        raise UnknownInstruction("this kind of tcgen05.mma is not implemented")
    d, a, b, shape, scales_a, scales_b, adds = instruction.operands
    to, first_a, first_b = (address(entry, each) for each in (d, scales_a, scales_b))
    left, right, kind = reader(entry, a, "u64"), reader(entry, b, "u64"), reader(entry, shape, "u32")
    add = reader(entry, adds, "pred")

    def run(m: Machine, active: Active) -> None:
        values = [
            np.broadcast_to(each(m, active), (m.count,)) for each in (to, left, right, first_a, first_b, kind, add)
        ]
        for thread in active.index.tolist():
            at, x, y, sa, sb, descriptor, more = (int(value[thread]) for value in values)
            rows, columns = _sizes(descriptor)
            product = Product(int(m.block[thread]), at, x, y, sa, sb, rows, columns, bool(more))
            _issue(m, thread, product)

    return run


def _sizes(descriptor: int) -> tuple[int, int]:
    """M and N of an instruction descriptor for E2M1 with UE4M3 scales, both with K contiguous."""
    rows, columns = (descriptor >> 27 & 3) << 7, (descriptor >> 17 & 63) << 3
    plain = (descriptor >> 7 & 7, descriptor >> 10 & 7) == (1, 1) and not descriptor >> 13 & 15
    if not plain or rows != LANES or descriptor >> 23 & 1 or descriptor & 0x30 or descriptor >> 29:
        raise UnknownInstruction(f"the instruction descriptor {descriptor:#x} is not implemented")
    return rows, columns


def _issue(m: Machine, thread: int, product: Product) -> None:
    tensor, row = memory(m), m.tensor_row(product.block)
    first = product.d & 0xFFFF
    region = (product.block, slice(0, product.rows), slice(first, first + product.columns))
    tensor.usable(region, written=product.add, waiting=False)
    tensor.pending[region] += 1
    m.shared.join(row, m.shared.clocks[m.row[thread]])
    known = m.shared.clocks[row].copy()
    m.asynchronous.append(partial(_multiply, m, product, region, known))


def _multiply(m: Machine, product: Product, region: Any, known: Array) -> None:
    tensor, row = memory(m), m.tensor_row(product.block)
    m.shared.clocks[row], later = known, m.shared.clocks[row].copy()
    operands = []
    for descriptor, rows in ((product.a, product.rows), (product.b, product.columns)):
        swizzle = SWIZZLES.get(descriptor >> 61 & 7)
        if swizzle is None:
            raise UnknownInstruction("this swizzle of a matrix descriptor is not implemented")
        addresses = matrix_positions(descriptor, rows, 32, swizzle)
        packed = read_matrix(m, product.block, row, addresses)
        operands.append(np.stack([packed & 15, packed >> 4], -1).reshape(rows, 64))
    m.shared.clocks[row] = np.maximum(known, later)
    scales_a = _scales(tensor, product.block, product.scales_a, product.rows)
    scales_b = _scales(tensor, product.block, product.scales_b, product.columns)
    before = (
        tensor.content[region].view(np.float32) if product.add else np.zeros(tensor.content[region].shape, np.float32)
    )
    after = block_scaled(operands[0], operands[1], scales_a, scales_b, before, m.launch.model)
    tensor.content[region] = after.view(np.uint32)
    tensor.written[region] = True
    tensor.pending[region] -= 1


def _scales(tensor: TensorMemory, block: int, start: int, rows: int) -> Array:
    """Bytes [rows, 4]; the four groups of 32 lanes must have the same."""
    column, count = start & 0xFFFF, -(-rows // WARP)
    region = (block, slice(0, LANES), slice(column, column + count))
    tensor.usable(region, written=True)
    copies = tensor.content[region].reshape(4, WARP, count)
    if (copies != copies[0]).any():
        raise Hazard("barrier", "the scales differ between the groups of 32 lanes of tensor memory")
    words = np.ascontiguousarray(copies[0].T).reshape(-1, 1)
    return words.view(np.uint8)[:rows]


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
            position = place(m, int(addresses[thread]), block)
            barrier_at(m, position)
            arrived: Callable[[], None] = partial(_arrive, m, position, block)
            m.asynchronous.append(arrived)

    return run


def _arrive(m: Machine, position: int, block: int) -> None:
    barrier, row = barrier_at(m, position), m.tensor_row(block)
    np.maximum(barrier.clock, m.shared.clocks[row], out=barrier.clock)
    m.shared.advance(np.array([row]))
    barrier.pending -= 1
    advance(m, barrier)
