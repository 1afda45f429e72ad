"""Reading cubins and PTX: small written ones, whole and damaged. `test_compile_aot.py` reads real ones."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from fp4deploy.plugins.runtime import cubin


def elf(sections: dict[bytes, bytes]) -> bytes:
    """The least ELF file with these sections."""
    names = b"\0" + b"\0".join([*sections, b".names"]) + b"\0"
    bodies = [*sections.values(), names]
    heads, position = [bytes(64)], 64
    for name, body in zip([*sections, b".names"], bodies, strict=True):
        heads.append(struct.pack("<IIQQQQIIQQ", names.index(name), 1, 0, 0, position, len(body), 0, 0, 1, 0))
        position += len(body)
    start = b"\x7fELF\x02" + bytes(35) + struct.pack("<Q", position) + bytes(10)
    return start + struct.pack("<HHH", 64, len(heads), len(heads) - 1) + b"".join(bodies) + b"".join(heads)


def test_resources_of_a_cubin() -> None:
    flag = struct.pack("<BBH", 3, 0x2F, 999)  # a format without bytes behind it
    info = flag + b"".join(
        struct.pack("<BBHII", 4, attribute, 8, symbol, value)
        for attribute, symbol, value in [(0x2F, 9, 96), (0x11, 9, 0), (0x11, 8, 16), (0x12, 9, 64)]
    )
    assert cubin.resources(elf({b".text": b"code", b".nv.info": info})) == (96, 16)


DAMAGED: list[Callable[[bytes], bytes]] = [
    lambda _: b"",
    lambda whole: whole[:20],
    lambda whole: whole[:-30],
    lambda whole: whole.replace(b".nv.info", b".nv.onfi"),
    lambda whole: whole.replace(b"\x7fELF", b"\x7fEIF"),
]


@pytest.mark.parametrize("damage", DAMAGED)
def test_files_that_are_no_cubins(damage: Callable[[bytes], bytes]) -> None:
    whole = elf({b".nv.info": struct.pack("<BBHII", 4, 0x2F, 8, 9, 96)})
    with pytest.raises(ValueError, match="not a cubin with a register count"):
        cubin.resources(damage(whole))


def test_instructions_in_ptx() -> None:
    ptx = """
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 };
    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r3 };
    mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 { %r1 }, { %r3 };
    mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 { %r1 };
    wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {%r1};
    @%p1 tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [ %r1 + 0 ], %rd1;
    tcgen05.mma.cta_group::1.kind::f16 [ %r1 + 0 ], %rd1;
    tcgen05.wait::ld.sync.aligned;
    """
    assert cubin.matrix_instructions(ptx) == (
        "mma.sync m16n8k16 bf16",
        "mma.sync m16n8k16 f16",
        "mma.sync m16n8k64 kind::mxf4nvf4",
        "tcgen05.mma kind::f16",
        "tcgen05.mma kind::mxf4nvf4",
        "wgmma.mma_async m64n256k16 f16",
    )
