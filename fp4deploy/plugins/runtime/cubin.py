"""Reading compiled code: registers and spills from a cubin, matrix instructions and parameters from PTX.

A cubin is an ELF file. Its section `.nv.info` is a list of attributes, each {format, attribute, 16 bits}. Where the
format is 4, the 16 bits are a size, and so many bytes follow: a symbol and a value of 32 bits. Registers per thread are
attribute 0x2f (EIATTR_REGCOUNT), bytes of stack per thread 0x11 (EIATTR_FRAME_SIZE). Kernels here have no calls and no
arrays in local memory, so that any stack is spilled registers; `cuobjdump --dump-resource-usage` prints the same two
figures as REG and STACK. `.nv.info.NAME` holds those of one kernel: attribute 0x10 (EIATTR_REQNTID) is the block that
it was compiled for. The compute capability is in the flags of the ELF header: bits 8 to 15 from version 8 of the ABI
on, before that bits 0 to 7.

The PTX shows a *silent fallback*: Triton compiles an FP4 GEMM also where no FP4 instruction fits the tile. It then
decodes the operands to FP16 and multiplies those, which is correct and slow.

| instruction | multiplies | on |
|---|---|---|
| `tcgen05.mma ... kind::mxf4nvf4.block_scale` | E2M1 with a scale for 16 | SM100, 103, 107, 110 |
| `mma.sync ... kind::mxf4nvf4.block_scale` | the same, from registers | SM120, 121 |
| either, `kind::mxf8f6f4.block_scale` | E4M3 with a scale for 32 | both |
| `wgmma.mma_async` | FP16, from shared memory, four warps together | SM90 |
| `mma.sync` | FP16, from registers | SM80 on |

An instruction of machine code has 128 bits from SM70 on. Bits 105 to 108 say for how many cycles its warp waits before
the next one; `main_loop` adds them up over the loop that multiplies. A branch is the operation 0x947 or 0x547, its
offset, in words of 4 bytes, bits 16 to 23 and 34 to 63.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Collection, Iterator
from typing import NamedTuple

NATIVE = "kind::mxf4nvf4"
_REGISTERS, _FRAME = 0x2F, 0x11
_BLOCKS = (0x10, 0x05)  # EIATTR_REQNTID, EIATTR_MAX_THREADS: three values of 32 bits
_CUDA = 190  # e_machine
_ABI = 8  # version from which the flags hold the compute capability in their second byte
_SIZED = 4  # format of an attribute whose 16 bits count the bytes that follow
_BRANCHES, _OPERATION, _STALL = (0x947, 0x547), 0xFFF, 105  # by a predicate of the thread, of the warp
_MATRIX = {0xDF0: "HGMMA", 0x23C: "HMMA"}  # of SM90; SM80 on
_MATRIX |= {0x47F: "OMMA", 0x47A: "QMMA", 0x5EA: "UTCOMMA", 0xDEA: "UTCQMMA"}  # FP4 and FP8 of SM120, of SM100
_FORMS = r"tcgen05\.mma|wgmma\.mma_async|mma\.sync"


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack per thread; the largest of all functions in the cubin.

    Raises:
        ValueError: this is not a cubin, or it has no such attributes.
    """
    found: dict[int, int] = {}
    try:
        for attribute, values in _attributes(cubin, b".nv.info"):
            if len(values) == 2:
                found[attribute] = max(values[1], found.get(attribute, 0))
        return found[_REGISTERS], found.get(_FRAME, 0)
    except _MALFORMED as error:
        raise ValueError(f"not a cubin with a register count ({type(error).__name__}: {error})") from None


class Loop(NamedTuple):
    """A step of a kernel's main loop, of one warp: cycles that it waits, instructions, and those that multiply."""

    stall: int
    issued: int
    matrix: int


def main_loop(cubin: bytes, name: str) -> Loop | None:
    """The shortest loop that multiplies on tensor cores; None where there is none, as of an unrolled sum.

    Raises:
        ValueError: this is not a cubin with code of this kernel.
    """
    body = shortest_loop(cubin, name, _MATRIX)
    if body is None:
        return None
    matrix = sum(each & _OPERATION in _MATRIX for each in body)
    return Loop(sum(each >> _STALL & 0xF for each in body), len(body), matrix)


def shortest_loop(cubin: bytes, name: str, operations: Collection[int]) -> list[int] | None:
    """Machine code of the shortest loop with one of these operations, an instruction of 128 bits each.

    Raises:
        ValueError: this is not a cubin with code of this kernel.
    """
    try:
        code = _section(cubin, f".text.{name}".encode())
    except _MALFORMED as error:
        raise ValueError(f"not a cubin with code of {name} ({type(error).__name__}: {error})") from None
    words = [int.from_bytes(code[at : at + 16], "little") for at in range(0, len(code) - 15, 16)]
    found = []
    for at, word in enumerate(words):
        back = (word >> 34 & (1 << 30) - 1) - (word >> 63 << 30 & 1 << 30)
        begin = at + 1 + (back << 8 | word >> 16 & 0xFF) // 4
        if word & _OPERATION in _BRANCHES and 0 <= begin < at:
            body = words[begin : at + 1]
            found += [body] if any(each & _OPERATION in operations for each in body) else []
    return min(found, key=len, default=None)


def require_code(cubin: bytes, name: str, architecture: int, warps: int) -> None:
    """Compare what is said of a cubin with what is in it.

    Args:
        name: the kernel, which must have code.
        architecture: compute capability as one number, 120.
        warps: of a block.

    Raises:
        ValueError: this is not a cubin, or it is another kernel, for another GPU, or for another block.
    """
    try:
        (machine,) = struct.unpack_from("<H", cubin, 18)
        (flags,) = struct.unpack_from("<I", cubin, 48)
        found = (flags >> 8 if cubin[8] >= _ABI else flags) & 0xFF
        code = _section(cubin, f".text.{name}".encode())
        blocks = [values for form, values in _attributes(cubin, f".nv.info.{name}".encode()) if form in _BLOCKS]
    except _MALFORMED as error:
        raise ValueError(f"not a cubin of {name} ({type(error).__name__}: {error})") from None
    if machine != _CUDA or not code:
        raise ValueError(f"not a cubin with code of {name}")
    if found != architecture:
        raise ValueError(f"machine code for sm_{found}, not sm_{architecture}")
    if blocks and blocks[0] != (32 * warps, 1, 1):
        raise ValueError(f"machine code for blocks of {blocks[0]} threads, not {warps} warps")


_MALFORMED = (struct.error, ValueError, IndexError, KeyError, OverflowError)


def _attributes(cubin: bytes, section: bytes) -> Iterator[tuple[int, tuple[int, ...]]]:
    info = _section(cubin, section)
    position = 0
    while position + 4 <= len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, position)
        position += 4
        if form == _SIZED:
            if size % 4 == 0:
                yield attribute, struct.unpack_from(f"<{size // 4}I", info, position)
            position += size


def _section(elf: bytes, name: bytes) -> bytes:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names = struct.unpack_from("<HHH", elf, 58)
    heads = [struct.unpack_from("<IIQQQQ", elf, table + index * size) for index in range(count)]
    for head in heads:
        start = heads[names][4] + head[0]
        if elf[start : elf.index(b"\0", start)] == name:
            return elf[head[4] : head[4] + head[5]]
    raise ValueError(f"no section {name.decode()}")


def matrix_instructions(ptx: str) -> tuple[str, ...]:
    """The distinct kinds of matrix instructions, such as ("tcgen05.mma kind::mxf4nvf4",) or ("mma.sync m16n8k16 f16",).

    `kind::` where the instruction has one, else the type of the operands; the shape where it is part of the name.
    """
    found = set()
    for match in re.finditer(rf"(?:{_FORMS})[.\w:]*", ptx):
        whole = match.group()
        name = re.match(_FORMS, whole)
        assert name is not None
        kind = re.search(r"kind::\w+", whole)
        shape = re.search(r"\.(m\d+n\d+k\d+)", whole)
        # d.a.b or d.a.b.c: the second of the types is that of the left operand.
        types = re.findall(r"\.(f16|bf16|tf32|f32|e4m3|e5m2|s8|u8|f64)(?=\.|$)", whole)
        operand = kind.group() if kind else types[1] if len(types) > 1 else ""
        found.add(" ".join(filter(None, [name.group(), shape.group(1) if shape else "", operand])))
    return tuple(sorted(found))


def entry_point(ptx: str) -> tuple[str, tuple[str, ...]]:
    """Name and PTX types of the parameters of the only entry point: ("kernel", ("u64", "u32", "f32")).

    Raises:
        ValueError: there is none, or more than one.
    """
    ((name, parameters),) = re.findall(r"\.entry\s+(\w+)\s*\((.*?)\)", ptx, re.DOTALL)
    return name, tuple(re.findall(r"\.param\s+\.(\w+)", parameters))


def target(ptx: str) -> str:
    """The architecture that PTX targets, such as "sm_90a"; empty where there is no `.target`."""
    found = re.search(r"^\.target\s+(\w+)", ptx, re.MULTILINE)
    return found.group(1) if found else ""
