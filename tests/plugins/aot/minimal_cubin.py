"""A cubin with nothing but what the checks of a kernel file read: ELF header, code, and the block it was made for."""

from __future__ import annotations

import struct


def minimal_cubin(name: str, architecture: int, warps: int, code: bytes) -> bytes:
    """An ELF file of CUDA's ABI version 8 with `.text.NAME` and `.nv.info.NAME`."""
    info = struct.pack("<BBH3I", 4, 0x10, 12, 32 * warps, 1, 1)
    names = [b"", b".shstrtab", f".text.{name}".encode(), f".nv.info.{name}".encode()]
    table = b"".join(each + b"\0" for each in names)
    contents = [b"", table, code, info]
    heads, body, start, place = b"", b"", 64, 0
    for each, content in zip(names, contents, strict=True):
        heads += struct.pack("<IIQQQQ", place, 1, 0, 0, start + len(body), len(content)) + bytes(24)
        place += len(each) + 1
        body += content
    ident = b"\x7fELF\x02\x01\x01\x33\x08" + bytes(7)
    header = ident + struct.pack(
        "<HHIQQQIHHHHHH", 2, 190, 1, 0, 0, start + len(body), architecture << 8, 64, 0, 0, 64, len(names), 1
    )
    return header + body + heads
