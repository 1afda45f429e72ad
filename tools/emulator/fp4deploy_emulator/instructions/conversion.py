"""cvt: conversions between types (PTX ISA, "Data Movement and Conversion Instructions: cvt", and "cvt.pack").

Integers become narrower by dropping bits. Floats round as the modifier says (`rn` to nearest even, `rz` toward zero,
`rmi` and `rni` to integers). `satfinite` clamps to the largest finite value, and a NaN becomes a positive one. Of two
sources the first is the upper half of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import DOUBLED, NAN
from fp4deploy_emulator.faults import UnknownInstruction
from fp4deploy_emulator.instructions.arithmetic import to_bfloat
from fp4deploy_emulator.machine import Active, Machine, Step, implements
from fp4deploy_emulator.operands import KINDS, reader, writer
from fp4deploy_emulator.ptx import Entry, Instruction

Array = NDArray[Any]
TYPES = {*KINDS} - {"pred"}
INTEGERS = {f"{sign}{bits}" for sign in "su" for bits in (8, 16, 32, 64)}
E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)


@implements("cvt")
def convert(entry: Entry, instruction: Instruction) -> Step:
    """One conversion; the last two parts are the types."""
    target, source = instruction.parts[-2:]
    modifiers = {*instruction.parts[1:-2]}
    result = writer(entry, instruction.operands[0])
    if target in ("f16x2", "bf16x2", "e2m1x2", "e4m3x2") and source == "f32":
        return _two(entry, instruction, target, modifiers)
    if source in ("e2m1x2", "e4m3x2"):
        return _decoded(entry, instruction, target, source)
    if target not in TYPES or source not in TYPES:
        raise UnknownInstruction(f"the conversion from {source} to {target} is not implemented")
    function = _function(target, source, modifiers)
    value = reader(entry, instruction.operands[1], source)

    def run(m: Machine, active: Active) -> None:
        with np.errstate(all="ignore"):
            result(m, active, np.asarray(function(value(m, active))))

    return run


def _function(target: str, source: str, modifiers: set[str]) -> Callable[[Array], Array]:
    if target in INTEGERS and source in INTEGERS:
        if modifiers:
            raise UnknownInstruction(f"the modifier {', '.join(sorted(modifiers))} is not implemented")
        return lambda x: x.astype(KINDS[target])
    if target in INTEGERS:
        return lambda x: _integer(_widened(x, source), target, modifiers)
    if source in INTEGERS:
        return lambda x: _narrowed(x, target, {"rn"})
    return lambda x: _narrowed(_widened(x, source), target, modifiers)


def _widened(x: Array, source: str) -> Array:
    """float32 of halves; the NaN of FP16 gets all bits but the sign, that of BF16 keeps its own."""
    if source == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return np.where(np.isnan(x), NAN, x.astype(np.float32)) if source == "f16" else x


def _integer(x: Array, target: str, modifiers: set[str]) -> Array:
    """Rounded, then clamped; a NaN becomes 0."""
    rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
    (name,) = modifiers & {*rounding}
    limits = np.iinfo(KINDS[target])
    whole = np.where(np.isnan(x), 0, rounding[name](x.astype(np.float64)))
    clamped = np.clip(whole, limits.min, limits.max)
    value = np.where(clamped >= float(limits.max), limits.max, clamped.astype(KINDS[target]))
    return np.asarray(value).astype(KINDS[target])


def _narrowed(x: Array, target: str, modifiers: set[str]) -> Array:
    whole: dict[str, Callable[..., Array]] = {"rni": np.rint, "rmi": np.floor, "rpi": np.ceil, "rzi": np.trunc}
    for name in modifiers & {*whole}:
        x = whole[name](x)
    unknown = modifiers - {*whole} - {"rn", "rz", "sat", "ftz"}
    if unknown:
        raise UnknownInstruction(f"the modifier {', '.join(sorted(unknown))} is not implemented")
    if "sat" in modifiers:
        x = np.where(np.isnan(x), np.float32(0), np.clip(x, 0, 1)).astype(x.dtype)
    if target == "f32":
        if x.dtype.kind in "iu" and x.dtype.itemsize == 8:
            return np.asarray([float(np.float32(value)) for value in np.atleast_1d(x).tolist()], np.float32).reshape(
                x.shape
            )
        return x.astype(np.float32)
    if target == "f64":
        return x.astype(np.float64)
    if target == "bf16":
        return _cut_bfloat(x) if "rz" in modifiers else to_bfloat(x)
    half = x.astype(np.float16)
    if "rz" in modifiers:
        larger = np.abs(half.astype(np.float64)) > np.abs(x)
        half = np.where(larger & np.isfinite(x), np.nextafter(half, np.float16(0)), half)
    return np.where(np.isnan(half), np.uint16(0x7FFF).view(np.float16), half)


def _cut_bfloat(x: Array) -> Array:
    bits = x.astype(np.float32).view(np.uint32)
    return np.where(np.isnan(x), 0x7FFF, bits >> np.uint32(16)).astype(np.uint16)


def to_e2m1(x: Array) -> Array:
    """float32 -> E2M1 code, saturated, ties to the even code; a NaN becomes 7 (6.0)."""
    magnitude = np.abs(x)
    up = np.searchsorted(E2M1_TIES, magnitude, "right")
    down = np.searchsorted(E2M1_TIES, magnitude, "left")
    code = np.where(up == down, up, np.where(up % 2 == 0, up, down))  # between the two sides of a tie the even one
    sign = np.where(np.signbit(x), 8, 0)
    return np.where(np.isnan(x), 7, code | sign).astype(np.uint8)


def to_e4m3(x: Array) -> Array:
    """float32 -> E4M3 byte, saturated at 448, to nearest even; a NaN becomes 0x7F."""
    magnitude = np.minimum(np.abs(x), np.float32(448)).astype(np.float64)
    exponent = np.maximum(np.frexp(np.where(np.isnan(magnitude), 0, magnitude))[1] - 1, -6)
    steps = np.rint(np.ldexp(np.where(np.isnan(magnitude), 0, magnitude), 3 - exponent)).astype(np.int64)
    exponent, steps = np.where(steps == 16, exponent + 1, exponent), np.where(steps == 16, 8, steps)
    code = np.where(steps < 8, steps, (exponent + 7) * 8 + steps - 8)
    sign = np.where(np.signbit(x), 128, 0)
    return np.where(np.isnan(x), 0x7F, np.minimum(code, 0x7E) | sign).astype(np.uint8)


def _two(entry: Entry, instruction: Instruction, target: str, modifiers: set[str]) -> Step:
    sources = [reader(entry, each, "f32") for each in instruction.operands[1:3]]
    result = writer(entry, instruction.operands[0])
    narrow = {"f16x2": "f16", "bf16x2": "bf16"}.get(target)
    if not narrow and "satfinite" not in modifiers:
        raise UnknownInstruction("a conversion to FP4 or FP8 that does not saturate is not implemented")
    if narrow and modifiers - {"rn", "rz"}:
        raise UnknownInstruction(f"the modifier {', '.join(sorted(modifiers))} is not implemented")

    def run(m: Machine, active: Active) -> None:
        with np.errstate(all="ignore"):
            high, low = (np.broadcast_to(source(m, active), (m.count,)) for source in sources)
            if narrow:
                pair = [np.ascontiguousarray(_narrowed(x, narrow, modifiers)).view(np.uint16) for x in (low, high)]
                result(m, active, (pair[0] | pair[1].astype(np.uint32) << np.uint32(16)).astype(np.uint32))
            elif target == "e2m1x2":
                result(m, active, to_e2m1(low) | to_e2m1(high) << np.uint8(4))
            else:
                result(m, active, to_e4m3(low) | to_e4m3(high).astype(np.uint16) << np.uint16(8))

    return run


def e4m3_values(code: Array) -> Array:
    """E4M3 bytes -> float32."""
    field, mantissa = (code >> 3 & 15).astype(np.int32), (code & 7).astype(np.float32) / 8
    value = np.ldexp(np.where(field > 0, 1 + mantissa, mantissa), np.maximum(field, 1) - 7)
    return np.where(code & 0x7F == 0x7F, np.float32(np.nan), np.where(code & 0x80, -value, value)).astype(np.float32)


def _decoded(entry: Entry, instruction: Instruction, target: str, source: str) -> Step:
    value, result = reader(entry, instruction.operands[1], source), writer(entry, instruction.operands[0])
    narrow = {"f16x2": "f16", "bf16x2": "bf16"}[target]

    def run(m: Machine, active: Active) -> None:
        bits = np.broadcast_to(value(m, active), (m.count,))
        if source == "e2m1x2":
            low, high = (DOUBLED[part] / np.float32(2) for part in (bits & 15, bits >> 4 & 15))
        else:
            low, high = (e4m3_values(part) for part in (bits & 255, bits >> 8))
        pair = [
            np.ascontiguousarray(_narrowed(x.astype(np.float32), narrow, {"rn"})).view(np.uint16) for x in (low, high)
        ]
        result(m, active, (pair[0] | pair[1].astype(np.uint32) << np.uint32(16)).astype(np.uint32))

    return run
