"""mma.sync: a warp multiplies matrices whose elements its lanes hold in registers.

Source: PTX ISA, "Warp Level Matrix Instructions: mma", "Matrix Fragments for mma.m16n8k16", "... m16n8k32" and
"... m16n8k64", and "Block Scaling for mma.sync". With lane = 4 g + t:

| fragment | lane holds |
|---|---|
| accumulator 16 x 8, 4 registers | rows g and g + 8, columns 2 t and 2 t + 1 |
| A, k16 of 16 bits, 4 registers | rows g, g + 8; elements 2 t, 2 t + 1, then 8 more |
| B, k16 of 16 bits, 2 registers | column g; elements 2 t, 2 t + 1, then 8 more |
| A, k32 of 8 bits, 4 registers | rows g, g + 8; elements 4 t to 4 t + 3, then 16 more |
| B, k32 of 8 bits, 2 registers | column g; elements 4 t to 4 t + 3, then 16 more |
| A, k64 of 4 bits, 4 registers | rows g, g + 8; elements 8 t to 8 t + 7, then 32 more |
| B, k64 of 4 bits, 2 registers | column g; elements 8 t to 8 t + 7, then 32 more |
| scales of A | row g + 8 (t % 2), of the lanes that thread-id-a selects |
| scales of B | column g, of the lanes that thread-id-b selects |

A row of E2M1 has four UE4M3 scales, all bytes of the register, or two UE8M0 scales, the bytes from byte-id on (0 or 2);
one of E4M3 a single UE8M0 scale, any byte.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import BLOCKS, DEPTH, block_scaled, block_scaled_fp8, half_precision, plain
from fp4deploy_emulator.faults import Hazard, UnknownInstruction
from fp4deploy_emulator.instructions.data import spread
from fp4deploy_emulator.machine import WARP, Active, Machine, Step, implements
from fp4deploy_emulator.operands import Reader, reader, readers, writers
from fp4deploy_emulator.ptx import Entry, Immediate, Instruction, Operand, Vector

Array = NDArray[Any]
LANE = np.arange(WARP)
SELECTORS = "the byte id is 0, or 2 where a row has two scales, or 0 to 3 of one; the thread id 0, 1 (A), 0 to 3 (B)"
ROW, COLUMN = LANE // 4, LANE % 4
M, N = 16, 8
EIGHT_BITS = ("kind::mxf8f6f4", "scale_vec::1X", "ue8m0")
SCALED = {
    ("kind::mxf4nvf4", "scale_vec::4X", "ue4m3"),
    ("kind::mxf4nvf4", "scale_vec::2X", "ue8m0"),
    ("kind::mxf4", "scale_vec::2X", "ue8m0"),
}


def registers(m: Machine, active: Active, sources: list[Reader], warps: Array) -> Array:
    """[warps, 32 lanes, registers]"""
    columns = [np.broadcast_to(source(m, active), (m.count,)).reshape(-1, WARP)[warps] for source in sources]
    return np.ascontiguousarray(np.stack(columns, -1))


@implements("mma")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """mma.sync.m16n8k16 of FP16 and BF16, .m16n8k64 of E2M1 with a scale for 16 or 32 elements, .m16n8k32 of E4M3 with
    one for 32."""
    parts = instruction.parts
    if "block_scale" in parts:
        kind = next(part for part in parts if part.startswith("kind::"))
        size = next((part for part in parts if part.startswith("scale_vec::")), "")
        if (
            (kind, size, parts[-1]) == EIGHT_BITS
            and "m16n8k32" in parts
            and parts[-5:-1] == ("f32", "e4m3", "e4m3", "f32")
        ):
            return _block_scaled(entry, instruction, "ue8m0", 1)
        if "m16n8k64" not in parts or (kind, size, parts[-1]) not in SCALED:
            raise UnknownInstruction("this block-scaled mma is not implemented")
        return _block_scaled(entry, instruction, parts[-1], DEPTH // BLOCKS[parts[-1]])
    if "m16n8k16" not in parts or parts[-4:] not in (("f32", "f16", "f16", "f32"), ("f32", "bf16", "bf16", "f32")):
        raise UnknownInstruction("this shape or type of mma is not implemented")
    return _halves(entry, instruction, parts[-2] == "bf16")


def accumulators(values: Array) -> Array:
    """Fragments [warps, 32, 4] -> [warps, 16, 8]."""
    out = np.empty((len(values), M, N), values.dtype)
    for i in range(4):
        out[:, ROW + 8 * (i // 2), 2 * COLUMN + i % 2] = values[..., i]
    return out


def fragments(matrix: Array) -> Array:
    """[warps, 16, 8] -> [warps, 32, 4]"""
    return np.stack([matrix[:, ROW + 8 * (i // 2), 2 * COLUMN + i % 2] for i in range(4)], -1)


def operand_matrix(values: Array, elements: int) -> Array:
    """Operand fragments [warps, 32, registers] -> [warps, 16 or 8, K] elements of 32 / `elements` bits each.

    A register holds `elements` neighbours of a row; registers of A alternate between rows g and g + 8, then K advances.
    """
    count = values.shape[-1]
    halves = 2 if count == 4 else 1
    unpacked = unpack(values, elements)
    out = np.empty((len(values), 8 * halves, elements * 4 * 2), unpacked.dtype)
    for i in range(count):
        k = (elements * 4) * (i // halves) + elements * COLUMN[:, None] + np.arange(elements)
        out[:, (ROW + 8 * (i % halves))[:, None], k] = unpacked[:, :, i]
    return out


def unpack(values: Array, elements: int) -> Array:
    """Registers -> [..., elements]: codes of four bits, bytes, or bits of halves."""
    if elements != 8:
        return values[..., None].view({2: np.uint16, 4: np.uint8}[elements])
    return (values[..., None] >> np.arange(0, 32, 4, dtype=np.uint32) & np.uint32(15)).astype(np.uint8)


def half_values(bits: Array, bfloat: bool) -> Array:
    """float32 of FP16 or BF16 bits."""
    if bfloat:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return bits.view(np.float16).astype(np.float32)


def _halves(entry: Entry, instruction: Instruction, bfloat: bool) -> Step:
    results = writers(entry, instruction.operands[0])
    a, b, c = (readers(entry, each, "b32") for each in instruction.operands[1:4])

    def run(m: Machine, active: Active) -> None:
        warps = m.whole_warps(active, "mma.sync")
        left, right = (half_values(operand_matrix(registers(m, active, each, warps), 2), bfloat) for each in (a, b))
        before = accumulators(registers(m, active, c, warps).view(np.float32))
        numbers = half_precision(m.launch.capability)
        after = plain(left, right, before, numbers, -126 if bfloat else -14, m.launch.model)
        _write(m, active, results, after)

    return run


def _block_scaled(entry: Entry, instruction: Instruction, scale_type: str, count: int) -> Step:
    """count: scales of a row; one is that of E4M3 elements."""
    results = writers(entry, instruction.operands[0])
    a, b, c = (readers(entry, each, "b32") for each in instruction.operands[1:4])
    scales = [reader(entry, instruction.operands[i], "b32") for i in (4, 6)]
    selectors = [_selector(entry, instruction.operands[i]) for i in (5, 7)]
    first_bytes = set(range(0, 4, count))
    possible = (first_bytes, {0, 1}), (first_bytes, set(range(4)))
    for chosen, sets in zip(selectors, possible, strict=True):
        if any(isinstance(value, int) and value not in valid for value, valid in zip(chosen, sets, strict=True)):
            raise UnknownInstruction(SELECTORS)

    def run(m: Machine, active: Active) -> None:
        warps = m.whole_warps(active, "mma.sync")
        (byte_a, lanes_a), (byte_b, lanes_b) = (
            [_selected(m, active, value, valid) for value, valid in zip(chosen, sets, strict=True)]
            for chosen, sets in zip(selectors, possible, strict=True)
        )
        elements = 4 if count == 1 else 8
        left, right = (operand_matrix(registers(m, active, each, warps), elements) for each in (a, b))
        before = accumulators(registers(m, active, c, warps).view(np.float32))
        held = registers(m, active, scales, warps)  # [warps, 32, 2]
        lane = 4 * np.arange(8)
        rows = np.concatenate([held[:, lane + 2 * lanes_a, 0], held[:, lane + 2 * lanes_a + 1, 0]], 1)
        columns = held[:, lane + lanes_b, 1]
        of_a, of_b = (
            np.ascontiguousarray(x)[..., None].view(np.uint8)[..., first : first + count]
            for x, first in ((rows, byte_a), (columns, byte_b))
        )
        if count == 1:
            after = block_scaled_fp8(left, right, of_a[..., 0], of_b[..., 0], before, m.launch.model)
        else:
            after = block_scaled(left, right, of_a, of_b, before, m.launch.model, scale_type)
        _write(m, active, results, after)

    return run


def _selector(entry: Entry, operand: Operand) -> tuple[int | Reader, int | Reader]:
    """{byte-id, thread-id}, each a constant or a register of 16 bits."""
    assert isinstance(operand, Vector)
    first, second = (
        part.value if isinstance(part, Immediate) else reader(entry, part, "u16") for part in operand.parts
    )
    return first, second


def _selected(m: Machine, active: Active, selector: int | Reader, valid: set[int]) -> int:
    """The value of a selector, the same in all threads.

    Raises:
        Hazard: the PTX ISA leaves it undefined.
        UnknownInstruction: warps that differ.
    """
    if isinstance(selector, int):
        return selector
    values = np.broadcast_to(selector(m, active), (m.count,)).reshape(-1, WARP)[active.mask.reshape(-1, WARP).any(1)]
    if (values != values[:, :1]).any():
        raise Hazard("barrier", "the threads of a warp select different scales")
    if (values != values[0, 0]).any():
        raise UnknownInstruction("warps that select different scales")
    if int(values[0, 0]) not in valid:
        raise Hazard("barrier", f"{SELECTORS}, not {int(values[0, 0])}")
    return int(values[0, 0])


def _write(m: Machine, active: Active, results: list[Any], matrix: Array) -> None:
    held = np.ascontiguousarray(fragments(matrix).astype(np.float32)).view(np.uint32)
    for i, result in enumerate(results):
        result(m, active, spread(m, active, held[..., i].reshape(-1)))
