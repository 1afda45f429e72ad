"""Arithmetic, logic and comparison, on registers alone.

| instructions | PTX ISA |
|---|---|
| add, sub, mul, mad, div, rem, abs, neg, min, max, bfe, bfi, popc, clz, bfind, brev | Integer Arithmetic Instructions |
| dp2a, dp4a | the same |
| add, sub, mul, fma, div, rcp, sqrt, rsqrt, abs, neg, copysign, min, max, ex2, lg2 | Floating-Point Instructions |
| setp, set, selp | Comparison and Selection Instructions |
| and, or, xor, not, shl, shr, lop3, shf | Logic and Shift Instructions |
| mov, prmt | Data Movement Instructions |

Floating-point results are rounded to nearest even, with subnormal numbers. `div.full`, `rcp.approx`, `rsqrt.approx`
and the like are only approximate on hardware, to within some units in the last place; here they are rounded correctly,
which is one of the values that the PTX ISA allows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.accumulate import odd_sum
from fp4deploy_emulator.faults import UnknownInstruction
from fp4deploy_emulator.machine import Active, Machine, Step, implements
from fp4deploy_emulator.operands import KINDS, pair_of, reader, writer
from fp4deploy_emulator.ptx import Entry, Immediate, Instruction

Array = NDArray[Any]
ROUNDINGS = {"rn", "rz", "rm", "rp", "rni", "rzi", "rmi", "rpi"}
_QUIET = np.uint32(0x7FFFFFFF).view(np.float32)


def elementwise(
    entry: Entry, instruction: Instruction, function: Callable[..., Array], kinds: list[str], filled: bool = False
) -> Step:
    """A step that applies `function` to the sources, read as `kinds`; filled: see `Machine.get_filled`."""
    sources = [reader(entry, each, kind, filled) for each, kind in zip(instruction.operands[1:], kinds, strict=True)]
    result = writer(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        with np.errstate(all="ignore"):
            result(m, active, np.asarray(function(*[source(m, active) for source in sources])))

    return run


def _modifiers(instruction: Instruction, *allowed: str) -> str:
    """The type; refuses modifiers that change the result and are not listed."""
    unknown = set(instruction.parts[1:-1]) - {"rn", "full", "approx", *allowed}
    if unknown:
        raise UnknownInstruction(f"the modifier {', '.join(sorted(unknown))} is not implemented")
    return instruction.parts[-1]


def _bfloat(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(x: Array) -> Array:
    """float32 -> the bits of bfloat16, to nearest even; a NaN is 0x7FFF."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), 0x7FFF, rounded).astype(np.uint16)


def lanes(kind: str, function: Callable[..., Array]) -> Callable[..., Array]:
    """`function` of float32 for operands of a type: halves are widened, pairs are split; one rounding at the end."""
    if kind in ("f32", "f64"):
        return function
    if kind == "f16":
        return lambda *xs: np.asarray(function(*(x.astype(np.float32) for x in xs))).astype(np.float16)
    if kind == "bf16":
        return lambda *xs: to_bfloat(function(*(_bfloat(x) for x in xs)))
    narrow, bits = {"f16x2": ("f16", np.float16), "bf16x2": ("bf16", np.uint16), "f32x2": ("f32", np.float32)}[kind]
    single = lanes(narrow, function)

    def both(*xs: Array) -> Array:
        parts = [np.ascontiguousarray(x).reshape(-1, 1).view(bits) for x in xs]
        low, high = (np.broadcast_arrays(single(*(part[:, i] for part in parts)))[0] for i in (0, 1))
        return np.ascontiguousarray(np.stack([low, high], -1)).view(KINDS[kind]).reshape(-1)

    return both


def _minimum(pick: Callable[..., Array], nan: bool) -> Callable[..., Array]:
    """min and max of two or three: a NaN loses against a number, unless `nan`; -0 is below +0."""

    def function(a: Array, b: Array, *third: Array) -> Array:
        if third:
            return function(function(a, b), *third)
        ordered = pick(a, b)
        zero = (a == 0) & (b == 0)
        signs = (np.signbit(a) | np.signbit(b)) if pick is np.minimum else (np.signbit(a) & np.signbit(b))
        ordered = np.where(zero, np.where(signs, np.float32(-0.0), np.float32(0)), ordered)
        if nan:
            return np.where(np.isnan(a) | np.isnan(b), _QUIET, ordered)
        return np.where(np.isnan(a), np.where(np.isnan(b), _QUIET, b), np.where(np.isnan(b), a, ordered))

    return function


def fused(a: Array, b: Array, c: Array) -> Array:
    """a * b + c of float32 with one rounding, to nearest even."""
    return odd_sum(_product(a, b), np.asarray(c, np.float64)).astype(np.float32)


def _product(a: Array, b: Array) -> Array:
    """Of float32, exact in float64."""
    return np.asarray(a.astype(np.float64) * b)


def _fused_towards(limit: float) -> Callable[..., Array]:
    """`fused`, rounded down where `limit` is -inf, up where it is inf, towards zero where it is 0."""

    def function(a: Array, b: Array, c: Array) -> Array:
        exact = odd_sum(_product(a, b), np.asarray(c, np.float64))
        nearest = exact.astype(np.float32)
        beyond = np.abs(nearest) > np.abs(exact) if limit == 0 else nearest < exact if limit > 0 else nearest > exact
        return np.where(beyond & np.isfinite(exact), np.nextafter(nearest, np.float32(limit)), nearest)

    return function


def _nan(function: Callable[..., Array]) -> Callable[..., Array]:
    """Results of float32 arithmetic that are NaN have the bits that hardware gives them."""
    return lambda *xs: np.where(np.isnan(value := function(*xs)), _QUIET, value)


_DIRECTED = {
    "rm": _nan(_fused_towards(-math.inf)),
    "rp": _nan(_fused_towards(math.inf)),
    "rz": _nan(_fused_towards(0.0)),
}
_FLOAT: dict[str, Callable[..., Array]] = {
    "add": _nan(lambda a, b: a + b),
    "sub": _nan(lambda a, b: a - b),
    "mul": _nan(lambda a, b: a * b),
    "div": _nan(lambda a, b: a / b),
    "fma": _nan(fused),
    "mad": _nan(fused),
    "rcp": _nan(lambda a: np.float32(1) / a),
    "sqrt": _nan(np.sqrt),
    "rsqrt": _nan(lambda a: (1 / np.sqrt(a.astype(np.float64))).astype(np.float32)),
    "ex2": _nan(lambda a: np.exp2(a.astype(np.float64)).astype(np.float32)),
    "lg2": _nan(lambda a: np.log2(a.astype(np.float64)).astype(np.float32)),
    "abs": np.abs,
    "neg": lambda a: -a,
}


def _truncated(a: Array, b: Array) -> Array:
    """Integer division toward zero; by zero all bits set, as on hardware."""
    safe = np.where(b == 0, 1, b).astype(b.dtype)
    if a.dtype.kind == "u":
        return np.where(b == 0, np.iinfo(a.dtype).max, a // safe).astype(a.dtype)
    quotient = np.abs(a.astype(np.int64)) // np.abs(safe.astype(np.int64))
    signed = np.where((a < 0) != (safe < 0), -quotient, quotient)
    return np.where(b == 0, -1, signed).astype(a.dtype)


_INTEGER: dict[str, Callable[..., Array]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "min": np.minimum,
    "max": np.maximum,
    "div": _truncated,
    "rem": lambda a, b: np.where(b == 0, a, a - _truncated(a, b) * b).astype(a.dtype),
    "abs": np.abs,
    "neg": lambda a: (-a.astype(np.int64)).astype(a.dtype),
}


def _array(function: Callable[..., Array]) -> Callable[..., Array]:
    """Scalars become arrays, so that integers wrap around without a warning."""
    return lambda *xs: function(*(np.atleast_1d(x) for x in xs)) if all(x.ndim == 0 for x in xs) else function(*xs)


@implements("add", "sub", "div", "rem", "abs", "neg", "fma", "rcp", "sqrt", "rsqrt", "ex2", "lg2", "min", "max")
def arithmetic(entry: Entry, instruction: Instruction) -> Step:
    """Operations whose result has the type of their operands; of `.f32.f16` all but the last are halves."""
    if instruction.parts[-2:] in (("f32", "f16"), ("f32", "bf16")):
        return _mixed(entry, instruction)
    name = instruction.parts[0]
    directed = _DIRECTED.keys() if name == "fma" and instruction.parts[-1] == "f32" else ()
    kind = _modifiers(instruction, "NaN", "xorsign", "abs", "ftz", *directed)
    count = len(instruction.operands) - 1
    if kind in ("u16x2", "s16x2"):
        return _pairs(entry, instruction, _INTEGER[name], kind)
    if "f" not in kind:
        return elementwise(entry, instruction, _array(_INTEGER[name]), [kind] * count)
    if name in ("min", "max"):
        function = _minimum(np.minimum if name == "min" else np.maximum, "NaN" in instruction.parts)
        if "xorsign" in instruction.parts:
            function = _of_magnitudes(function)
    else:
        function = next((_DIRECTED[part] for part in instruction.parts[1:-1] if part in directed), _FLOAT[name])
    if "ftz" in instruction.parts:
        function = _flushed(function)
    return elementwise(entry, instruction, lanes(kind, function), [kind] * count)


def _mixed(entry: Entry, instruction: Instruction) -> Step:
    """add, sub, fma of halves and, as the last operand, float32: one rounding to float32 (SM100)."""
    name, *modifiers, _, half = instruction.parts
    if name not in ("add", "sub", "fma") or modifiers != ["rn"]:
        raise UnknownInstruction("this operation of halves and float32 is not implemented")

    def function(*operands: Array) -> Array:
        *halves, last = operands
        return _FLOAT[name](*(_bfloat(x) if half == "bf16" else x.astype(np.float32) for x in halves), last)

    return elementwise(entry, instruction, function, [half] * (len(instruction.operands) - 2) + ["f32"])


def _flushed(function: Callable[..., Array]) -> Callable[..., Array]:
    """`.ftz`: subnormal operands and results are zeros with their sign."""

    def flush(x: Array) -> Array:
        return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)

    return lambda *xs: flush(function(*(flush(x) for x in xs)))


def _of_magnitudes(function: Callable[..., Array]) -> Callable[..., Array]:
    """`.xorsign.abs`: of the magnitudes, with the product of the signs."""

    def signed(a: Array, b: Array) -> Array:
        value = function(np.abs(a), np.abs(b))
        return np.where(np.signbit(a) != np.signbit(b), np.copysign(value, np.float32(-1)), value)

    return signed


def _pairs(entry: Entry, instruction: Instruction, function: Callable[..., Array], kind: str) -> Step:
    """Integers of 16 bits, two in a register."""
    narrow = np.uint16 if kind[0] == "u" else np.int16

    def both(*xs: Array) -> Array:
        parts = [np.ascontiguousarray(x).reshape(-1, 1).view(narrow) for x in xs]
        return np.ascontiguousarray(function(*parts)).view(np.uint32).reshape(-1)

    return elementwise(entry, instruction, both, ["b32"] * (len(instruction.operands) - 1))


@implements("copysign")
def copy_sign(entry: Entry, instruction: Instruction) -> Step:
    """b with the sign of a."""
    kind = _modifiers(instruction)
    return elementwise(entry, instruction, lambda a, b: np.copysign(b, a), [kind] * 2)


@implements("mul", "mad")
def multiply(entry: Entry, instruction: Instruction) -> Step:
    """mul and mad: floats; of integers the low half, the high half, or all of the product."""
    name, kind = instruction.parts[0], _modifiers(instruction, "lo", "hi", "wide")
    count = len(instruction.operands) - 1
    if "f" in kind:
        return elementwise(entry, instruction, lanes(kind, _FLOAT[name]), [kind] * count)
    bits, signed = int(kind[1:]), kind[0] == "s"
    wide = f"{kind[0]}{2 * bits}"
    part = instruction.parts[1]

    def product(a: Array, b: Array, c: Array | None = None) -> Array:
        if part == "lo":
            value = a * b
        elif bits == 64:
            value = _high(a, b, signed)
        else:
            double = a.astype(KINDS[wide]) * b.astype(KINDS[wide])
            value = double if part == "wide" else (double >> np.array(bits, double.dtype)).astype(a.dtype)
        return value if c is None else value + c

    kinds = [kind, kind, wide if part == "wide" else kind][:count]
    return elementwise(entry, instruction, _array(product), kinds)


def _high(a: Array, b: Array, signed: bool) -> Array:
    a, b = np.broadcast_arrays(a, b)
    pairs = zip(a.tolist(), b.tolist(), strict=True)
    kind = np.int64 if signed else np.uint64
    return np.array([x * y >> 64 for x, y in pairs], kind)


_COMPARE: dict[str, Callable[..., Array]] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
_COMBINE: dict[str, Callable[..., Array]] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


@implements("setp")
def compare(entry: Entry, instruction: Instruction) -> Step:
    """p|q = a ? b, combined with a third predicate where one is given."""
    name, kind = instruction.parts[1], instruction.parts[-1]
    combine = next((_COMBINE[part] for part in instruction.parts[2:-1] if part in _COMBINE), None)
    first, second = pair_of(instruction.operands[0])
    results = [writer(entry, each) for each in (first, second) if each is not None]
    sources = [reader(entry, each, kind) for each in instruction.operands[1:3]]
    third = reader(entry, instruction.operands[3], "pred") if combine else None
    unordered = name == "nan" or name == "num" or name[:-1] in ("eq", "ne", "lt", "le", "gt", "ge")

    def run(m: Machine, active: Active) -> None:
        a, b = (source(m, active) for source in sources)
        if kind == "f16":
            a, b = a.astype(np.float32), b.astype(np.float32)
        elif kind == "bf16":
            a, b = _bfloat(a), _bfloat(b)
        with np.errstate(invalid="ignore"):
            if unordered:
                nan = np.isnan(a) | np.isnan(b)
                value = nan if name == "nan" else ~nan if name == "num" else nan | _COMPARE[name[:-1]](a, b)
            else:
                value = _COMPARE[name](a, b)
                if name == "ne" and "f" in kind:
                    value &= ~(np.isnan(a) | np.isnan(b))
        values = [np.asarray(value), np.asarray(~value)]
        for result, each in zip(results, values, strict=False):
            result(m, active, combine(each, third(m, active)) if combine and third else each)

    return run


def _holds(name: str, a: Array, b: Array) -> Array:
    """An ordered comparison of floats: false where one is NaN."""
    value = np.asarray(_COMPARE[name](a, b))
    return value & ~(np.isnan(a) | np.isnan(b)) if name == "ne" else value


@implements("set")
def compare_into(entry: Entry, instruction: Instruction) -> Step:
    """As setp, with a number as the result: of integers all bits set, of floats 1.0; of pairs lane by lane."""
    name, target, kind = instruction.parts[1], instruction.parts[-2], instruction.parts[-1]
    if name in _COMPARE and (target, kind) == ("f32", "f32"):
        return elementwise(entry, instruction, lambda a, b: _holds(name, a, b).astype(np.float32), ["f32", "f32"])
    if name not in _COMPARE or target not in ("u32", "s32") or kind not in ("f16x2", "bf16x2"):
        raise UnknownInstruction("this comparison is not implemented")

    def function(a: Array, b: Array) -> Array:
        halves = []
        for shift in (0, 16):
            x, y = ((each >> np.uint32(shift)).astype(np.uint16) for each in (a, b))
            left, right = (_bfloat(each) if kind[0] == "b" else each.view(np.float16) for each in (x, y))
            halves.append(np.where(_holds(name, left, right), np.uint32(0xFFFF), np.uint32(0)))
        return np.asarray(halves[0] | halves[1] << np.uint32(16))

    return elementwise(entry, instruction, function, ["b32", "b32"])


@implements("selp")
def select(entry: Entry, instruction: Instruction) -> Step:
    """p ? a : b"""
    kind = instruction.parts[1]
    return elementwise(entry, instruction, lambda a, b, p: np.asarray(np.where(p, a, b)), [kind, kind, "pred"])


_LOGIC: dict[str, Callable[..., Array]] = {
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
    "not": lambda a: ~a,
    "cnot": lambda a: (a == 0).astype(a.dtype),
}


@implements("and", "or", "xor", "not")
def logic(entry: Entry, instruction: Instruction) -> Step:
    """Bit by bit."""
    kind = instruction.parts[1]
    return elementwise(entry, instruction, _LOGIC[instruction.parts[0]], [kind] * (len(instruction.operands) - 1))


@implements("shl", "shr")
def shift(entry: Entry, instruction: Instruction) -> Step:
    """By more bits than there are: zero, or the sign."""
    kind = instruction.parts[1]
    bits, left = int(kind[1:]), instruction.parts[0] == "shl"

    def function(a: Array, by: Array) -> Array:
        by = np.minimum(by, bits).astype(np.int64)
        if kind[0] == "s":
            return (a.astype(np.int64) >> np.minimum(by, bits - 1)).astype(a.dtype)
        safe = np.minimum(by, bits - 1).astype(np.uint64)
        moved = a.astype(np.uint64) << safe if left else a.astype(np.uint64) >> safe
        return np.where(by < bits, moved, 0).astype(a.dtype)

    return elementwise(entry, instruction, function, [kind, "u32"])


@implements("shf")
def funnel(entry: Entry, instruction: Instruction) -> Step:
    """64 bits of two registers, shifted; `.wrap` by the count modulo 32, `.clamp` by at most 32."""
    left, wrap = instruction.parts[1] == "l", instruction.parts[2] == "wrap"

    def function(a: Array, b: Array, by: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        n = (by & np.uint32(31) if wrap else np.minimum(by, 32)).astype(np.uint64)
        moved = (both << n) >> np.uint64(32) if left else both >> n
        return moved.astype(np.uint32)

    return elementwise(entry, instruction, function, ["b32", "b32", "u32"])


@implements("lop3")
def lookup(entry: Entry, instruction: Instruction) -> Step:
    """Any function of three bits, by its truth table."""
    table = instruction.operands[4]
    assert isinstance(table, Immediate)

    def function(a: Array, b: Array, c: Array, _: Array) -> Array:
        value = np.uint32(0)
        for row in range(8):
            if table.value >> row & 1:
                picked = (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
                value = value | picked
        return np.asarray(value, np.uint32)

    return elementwise(entry, instruction, function, ["b32"] * 4)


@implements("bfe")
def extract(entry: Entry, instruction: Instruction) -> Step:
    """`length` bits from `start` on, extended by zeros or by their highest bit."""
    kind = instruction.parts[1]
    bits = int(kind[1:])

    def function(a: Array, start: Array, length: Array) -> Array:
        start, length = (np.minimum(x & np.uint32(255), bits).astype(np.int64) for x in (start, length))
        wide = a.astype(np.int64) if kind[0] == "s" else a.astype(np.uint64).view(np.int64)
        moved = wide >> np.minimum(start, 63)
        if kind[0] == "s":
            length = np.minimum(length, np.maximum(bits - start, 1))
            unused = 64 - np.maximum(length, 1)
            moved = np.where(length > 0, moved << unused >> unused, 0)
        else:
            moved = moved & ((np.int64(1) << np.minimum(length, 62)) - 1)
        return moved.astype(a.dtype)

    return elementwise(entry, instruction, function, [kind, "u32", "u32"])


@implements("bfi")
def insert(entry: Entry, instruction: Instruction) -> Step:
    """The low `length` bits of a into b, at `start`."""
    kind = instruction.parts[1]

    def function(a: Array, b: Array, start: Array, length: Array) -> Array:
        start, length = (np.minimum(x & np.uint32(255), 63).astype(np.uint64) for x in (start, length))
        mask = ((np.uint64(1) << length) - np.uint64(1)) << start
        value = (b.astype(np.uint64) & ~mask) | (a.astype(np.uint64) << start & mask)
        return value.astype(b.dtype)

    return elementwise(entry, instruction, function, [kind, kind, "u32", "u32"])


@implements("popc", "clz", "brev", "bfind")
def bits(entry: Entry, instruction: Instruction) -> Step:
    """Counts and positions of bits."""
    name, kind = instruction.parts[0], instruction.parts[-1]
    size = int(kind[1:])

    def function(a: Array) -> Array:
        a = np.atleast_1d(a)
        if name == "brev":
            flipped = np.unpackbits(a.astype(f">u{size // 8}").view(np.uint8).reshape(-1, size // 8), axis=1)[:, ::-1]
            return np.packbits(flipped, axis=1).reshape(-1).view(f">u{size // 8}").astype(a.dtype)
        if name == "popc":
            return np.bitwise_count(a).astype(np.uint32)
        top = np.where(a == 0, -1, np.frexp(a.astype(np.float64))[1] - 1)
        return (size - 1 - top).astype(np.uint32) if name == "clz" else top.astype(np.int32).view(np.uint32)

    return elementwise(entry, instruction, function, [kind])


@implements("dp2a", "dp4a")
def dot(entry: Entry, instruction: Instruction) -> Step:
    """c and the products of two halves or four bytes of a with bytes of b; of two, the low or the high ones of b."""
    return elementwise(entry, instruction, dot_of(instruction.parts), ["b32"] * 3)


def dot_of(parts: Sequence[str]) -> Callable[[Array, Array, Array], Array]:
    """What an instruction of these parts computes, ("dp2a", "lo", "u32", "s32")."""
    (first, second), count = parts[-2:], 2 if parts[0] == "dp2a" else 4
    start = 2 if parts[1] == "hi" else 0

    def element(x: Array, at: int, bits: int, kind: str) -> Array:
        moved = x.astype(np.int64) >> bits * at & (1 << bits) - 1
        return np.asarray(moved - (moved >> bits - 1 << bits) if kind == "s32" else moved)

    def function(a: Array, b: Array, c: Array) -> Array:
        products = [element(a, at, 32 // count, first) * element(b, start + at, 8, second) for at in range(count)]
        return np.asarray((c.astype(np.int64) + sum(products)).astype(np.uint32))

    return function


@implements("prmt")
def permute(entry: Entry, instruction: Instruction) -> Step:
    """Four bytes out of eight, chosen by nibbles; a nibble of 8 or more repeats the byte's sign.

    A source none of whose bytes is chosen is not read. Compilers leave such registers unwritten, and also bytes that
    are dropped later.
    """
    if len(instruction.parts) != 2:
        raise UnknownInstruction("a mode of prmt is not implemented")
    control = instruction.operands[3]
    used = range(8)
    if isinstance(control, Immediate):
        used = [control.value >> 4 * i & 7 for i in range(4)]  # type: ignore[assignment]
    zero = Immediate(0)
    operands = [each if any(u // 4 == i for u in used) else zero for i, each in enumerate(instruction.operands[1:3])]
    changed = Instruction(**{**vars(instruction), "operands": (instruction.operands[0], *operands, control)})

    def function(a: Array, b: Array, selector: Array) -> Array:
        both = (b.astype(np.uint64) << np.uint64(32)) | a.astype(np.uint64)
        value = np.uint32(0)
        for i in range(4):
            nibble = selector >> np.uint32(4 * i) & np.uint32(15)
            byte = (both >> ((nibble & np.uint32(7)) * np.uint32(8)).astype(np.uint64)).astype(np.uint32) & np.uint32(
                255
            )
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            value = value | np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
        return np.asarray(value, np.uint32)

    return elementwise(entry, changed, function, ["b32"] * 3, filled=True)


@implements("mov")
def move(entry: Entry, instruction: Instruction) -> Step:
    """A copy; also between one register and a vector of smaller ones, and of an address."""
    kind = instruction.parts[1]
    source, result = reader(entry, instruction.operands[1], kind), writer(entry, instruction.operands[0])

    def run(m: Machine, active: Active) -> None:
        result(m, active, source(m, active))

    return run
