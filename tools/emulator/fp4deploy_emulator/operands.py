"""Reading and writing the operands of an instruction as arrays of the type that it names.

bfloat16 has no numpy type: it stays bits (uint16). Pairs such as f16x2 are bits too; the instruction splits them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import UnknownInstruction
from fp4deploy_emulator.machine import GENERIC_PARAMETER, GENERIC_SHARED, Active, Machine
from fp4deploy_emulator.ptx import Address, Entry, Immediate, Operand, Pair, Register, Symbol, Vector

Array = NDArray[Any]
Reader = Callable[[Machine, Active], Array]
Writer = Callable[[Machine, Active, Array], None]
KINDS: dict[str, Any] = {
    "pred": np.bool_,
    "u8": np.uint8,
    "s8": np.int8,
    "b8": np.uint8,
    "u16": np.uint16,
    "s16": np.int16,
    "b16": np.uint16,
    "f16": np.float16,
    "bf16": np.uint16,
    "u32": np.uint32,
    "s32": np.int32,
    "b32": np.uint32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "u64": np.uint64,
    "s64": np.int64,
    "b64": np.uint64,
    "f64": np.float64,
    "f32x2": np.uint64,
    "b128": np.dtype("V16"),
    "e4m3x2": np.uint16,
    "e5m2x2": np.uint16,
    "e2m1x2": np.uint8,
}
_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.dtype("V16")}
_SIZE: dict[str, Any] = {"pred": np.bool_, "8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_SIZE["128"] = np.dtype("V16")


def storage(entry: Entry, name: str) -> Any:
    """The numpy type of a register's bits."""
    kind = entry.register_type(name) or ""
    return np.bool_ if kind == "pred" else _SIZE[kind.lstrip("bsuf")]


def reader(entry: Entry, operand: Operand, kind: str, filled: bool = False) -> Reader:
    """What reads an operand as `kind`; of a wider register the low bits, of a narrower one with zeros above.

    filled: see `Machine.get_filled`.

    Raises:
        UnknownInstruction: no operand that has a value.
    """
    dtype = np.dtype(KINDS[kind])
    if isinstance(operand, Immediate):
        constant = _immediate(operand.value, dtype)
        return lambda m, active: constant
    if isinstance(operand, Symbol):
        name = operand.name
        return lambda m, active: np.asarray(_symbol(m, name)).astype(dtype)
    if isinstance(operand, Vector):
        return _packed(entry, operand, dtype)
    if not isinstance(operand, Register):
        raise UnknownInstruction("an operand is neither a register nor a constant")
    name = operand.name

    def read(m: Machine, active: Active) -> Array:
        bits = m.get_filled(name, active) if filled else m.get(name, active)
        if bits.dtype == dtype:
            return bits
        if bits.dtype.itemsize != dtype.itemsize:
            bits = bits.astype(_BITS[dtype.itemsize])
        return bits.view(dtype)

    return read


def readers(entry: Entry, operand: Operand, kind: str) -> list[Reader]:
    """One for each element of a vector, or the one of a scalar."""
    return [reader(entry, part, kind) for part in (operand.parts if isinstance(operand, Vector) else (operand,))]


def writer(entry: Entry, operand: Operand) -> Writer:
    """What writes a result into a register; signed values are extended with their sign, others with zeros.

    Raises:
        UnknownInstruction: no register.
    """
    if isinstance(operand, Vector):
        return _unpacked(entry, operand)
    if not isinstance(operand, Register):
        raise UnknownInstruction("a result is not written to a register")
    name = operand.name
    if name == "_":
        return lambda m, active, value: None
    bits = np.dtype(storage(entry, name))
    signed = None if bits == np.bool_ or bits.kind == "V" else np.dtype(f"i{bits.itemsize}")

    def write(m: Machine, active: Active, value: Array) -> None:
        if value.dtype != bits:
            if value.dtype.itemsize == bits.itemsize:
                value = value.view(bits)
            elif value.dtype.kind == "i" and signed is not None:
                value = value.astype(signed).view(bits)
            else:
                value = value.view(_BITS[value.dtype.itemsize]).astype(bits)
        m.put(name, value, active)

    return write


def writers(entry: Entry, operand: Operand) -> list[Writer]:
    """One for each element of a vector, or the one of a scalar."""
    return [writer(entry, part) for part in (operand.parts if isinstance(operand, Vector) else (operand,))]


def pair_of(operand: Operand) -> tuple[Operand, Operand | None]:
    """Both results of `a|b`."""
    return (operand.first, operand.second) if isinstance(operand, Pair) else (operand, None)


def address(entry: Entry, operand: Operand) -> Reader:
    """What reads the address of `[base + offset]`, of all threads.

    Raises:
        UnknownInstruction: no address.
    """
    if not isinstance(operand, Address):
        raise UnknownInstruction("an operand is not an address")
    wide = isinstance(operand.base, Register) and storage(entry, operand.base.name) == np.uint64
    base = reader(entry, operand.base, "u64" if wide else "u32") if not isinstance(operand.base, Symbol) else None
    offset, name = operand.offset, operand.base.name if isinstance(operand.base, Symbol) else ""
    step = np.int64(offset)

    def read(m: Machine, active: Active) -> Array:
        value = np.broadcast_to(_symbol(m, name), (m.count,)) if base is None else base(m, active)
        if value.ndim == 0:
            value = np.full(m.count, value)
        return (value.astype(np.int64) + step).view(np.uint64) if offset else value.astype(np.uint64)

    return read


def _symbol(m: Machine, name: str) -> int | Array:
    """The address of a variable: in shared memory it says the rank of the block, too (see `WINDOW`)."""
    if name in m.symbols:
        return m.symbols[name] + m.window if m.cluster > 1 else m.symbols[name]
    for each in m.entry.parameters:
        if each.name == name:
            return GENERIC_PARAMETER | each.offset
    raise UnknownInstruction(f"the symbol {name} is not a variable in shared memory")


def generic_shared(address: int) -> int:
    """The generic address of an address in shared memory."""
    return GENERIC_SHARED | address


def _immediate(value: int, dtype: np.dtype[Any]) -> Array:
    if dtype == np.bool_:
        return np.asarray(value != 0)
    size = dtype.itemsize
    return np.asarray(value % (1 << 8 * size), _BITS[size]).view(dtype)


def _packed(entry: Entry, operand: Vector, dtype: np.dtype[Any]) -> Reader:
    """{low, high} read as one number."""
    size = dtype.itemsize // len(operand.parts)
    parts = [reader(entry, part, f"b{8 * size}", filled=True) for part in operand.parts]

    def read(m: Machine, active: Active) -> Array:
        columns = [np.broadcast_to(part(m, active), (m.count,)) for part in parts]
        return np.ascontiguousarray(np.stack(columns, -1)).view(_BITS[dtype.itemsize]).reshape(-1).view(dtype)

    return read


def _unpacked(entry: Entry, operand: Vector) -> Writer:
    parts = [writer(entry, part) for part in operand.parts]

    def write(m: Machine, active: Active, value: Array) -> None:
        value = np.ascontiguousarray(np.broadcast_to(value, (m.count,)))
        columns = value.view(_BITS[value.dtype.itemsize // len(parts)]).reshape(m.count, len(parts))
        for index, part in enumerate(parts):
            part(m, active, np.ascontiguousarray(columns[:, index]))

    return write
