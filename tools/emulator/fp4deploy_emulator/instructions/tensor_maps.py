"""Tensor maps: which bytes of a tensor a tensor copy moves, and where they lie in shared memory.

Source: PTX ISA, "Tensors": "Tiled Mode", "im2col Mode", "Swizzling Modes"; CUDA Driver API, "Tensor Map Object
Management".

**Tiled.** A box of the tensor, from its coordinates on. Elements outside of the tensor are read as zeros and not
written.

**im2col.** Rows of channels of so many pixels, one row after the other. The pixels lie in a bounding box, which
begins at the lower corner and ends at the last pixel plus the upper corner (both are negative, or 0, where a filter
begins outside of the tensor). They are visited from the coordinates on with a step along each axis; behind the end of
an axis the next one advances, at last the image. Where a pixel is read, the offsets (of a tap of a filter) are added.

A tensor map is a structure that only the driver can encode. Here its 128 bytes are an encoding of the emulator's own
(`encode`) of the same sizes, strides, box, swizzle and corners that the host gives to the driver.

The swizzle permutes 16-byte words: bits 4 to 6 of an address in shared memory are XORed with bits 7 to 9 (rows of 128
bytes), bits 4 and 5 with 7 and 8 (64 bytes), or bit 4 with bit 7 (32 bytes).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4deploy_emulator.faults import Hazard
from fp4deploy_emulator.memory import GlobalMemory

Array = NDArray[Any]
MAGIC = b"fp4deploy tensor"
SIZE = 128
SWIZZLE_BITS = {0: 0, 32: 1, 64: 2, 128: 3}


@dataclass(frozen=True)
class TensorMap:
    """Address; sizes and box in elements, the innermost axis first; strides of the outer axes and swizzle in bytes.

    bits: of an element. lower, upper: corners of an im2col map, of the axes between channels and images. steps: of each
    axis. pixels: of an im2col box.
    """

    address: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    bits: int = 8
    lower: tuple[int, ...] | None = None
    upper: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    pixels: int = 0

    def bytes_at(self, first: Sequence[int], offsets: Sequence[int] = ()) -> tuple[Array, Array]:
        """Addresses (uint64) of the bytes of a box in the order of shared memory, and which lie in the tensor."""
        if len(first) != len(self.sizes):
            raise Hazard("barrier", f"a tensor copy of {len(first)} axes with a tensor map of {len(self.sizes)}")
        row = self.box[0] * self.bits // 8
        if first[0] * self.bits % 8 or self.box[0] * self.bits % 8:
            raise Hazard("misaligned", f"a tensor copy that begins at element {first[0]} of {self.bits} bits")
        start = first[0] * self.bits // 8 + np.arange(row)
        good = (start >= 0) & (start < self.sizes[0] * self.bits // 8)
        outer, inside = self._pixels(first, offsets) if self.lower is not None else self._tile(first)
        at = (outer[:, None] + start).reshape(-1)
        return (self.address + at).astype(np.uint64), (inside[:, None] & good).reshape(-1)

    def _tile(self, first: Sequence[int]) -> tuple[Array, Array]:
        """Offsets of the rows of a box, and which lie in the tensor."""
        rows, valid = np.zeros(1, np.int64), np.ones(1, bool)
        for start, count, size, stride in zip(first[1:], self.box[1:], self.sizes[1:], self.strides, strict=True):
            axis = start + np.arange(count)
            rows = (axis[:, None] * stride + rows).reshape(-1)
            valid = (((axis >= 0) & (axis < size))[:, None] & valid).reshape(-1)
        return rows, valid

    def _pixels(self, first: Sequence[int], offsets: Sequence[int]) -> tuple[Array, Array]:
        assert self.lower is not None
        middle = len(self.lower)
        rows, valid, carry = np.zeros(self.pixels, np.int64), np.ones(self.pixels, bool), np.arange(self.pixels)
        for axis in range(1, middle + 1):
            low, step = self.lower[axis - 1], self.steps[axis]
            count = (self.sizes[axis] - 1 + self.upper[axis - 1] - low) // step + 1
            if (first[axis] - low) % step or not 0 <= (first[axis] - low) // step < count:
                raise Hazard("out of bounds", f"an im2col copy begins at {tuple(first)}, outside of its bounding box")
            number = (first[axis] - low) // step + carry
            place = low + number % count * step + (offsets[axis - 1] if offsets else 0)
            carry = number // count
            rows += place * self.strides[axis - 1]
            valid &= (place >= 0) & (place < self.sizes[axis])
        image = first[middle + 1] + carry
        return rows + image * self.strides[middle], valid & (image >= 0) & (image < self.sizes[middle + 1])

    def load(self, memory: GlobalMemory, first: Sequence[int], offsets: Sequence[int] = ()) -> Array:
        """Bytes of a box; zeros outside of the tensor."""
        where, valid = self.bytes_at(first, offsets)
        found = np.zeros(where.size, np.uint8)
        found[valid] = memory.read(where[valid], 1)[:, 0]
        return found

    def places(self, start: int, count: int) -> Array:
        """Addresses in shared memory of `count` bytes from `start` on, in the order in which a box is stored."""
        linear = start + np.arange(count)
        return linear ^ ((linear >> 7 & ((1 << SWIZZLE_BITS[self.swizzle]) - 1)) << 4)


def encode(
    start: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    lower: Sequence[int] = (),
    upper: Sequence[int] = (),
    steps: Sequence[int] = (),
    pixels: int = 0,
) -> bytes:
    """128 bytes in the place of the driver's; of a tensor of bytes with up to five axes. lower and on: of im2col."""
    rank, middle = len(sizes), len(lower)
    head = struct.pack("<QBBH", start, rank, middle, swizzle)
    body = struct.pack(f"<{rank}I{rank - 1}Q{len(box)}H", *sizes, *strides, *box)
    corners = struct.pack(f"<{2 * middle}b{rank * bool(middle)}BH", *lower, *upper, *steps, pixels) if middle else b""
    return (MAGIC + head + body + corners).ljust(SIZE, b"\0")


def decode(content: bytes) -> TensorMap:
    """The tensor map that `encode` wrote.

    Raises:
        Hazard: the bytes are something else.
    """
    if content[: len(MAGIC)] != MAGIC:
        raise Hazard("barrier", "a tensor copy with an address at which there is no tensor map")
    start, rank, middle, swizzle = struct.unpack_from("<QBBH", content, len(MAGIC))
    at = len(MAGIC) + struct.calcsize("<QBBH")
    found: list[tuple[int, ...]] = []
    for form in (f"<{rank}I", f"<{rank - 1}Q", f"<{1 if middle else rank}H"):
        found.append(struct.unpack_from(form, content, at))
        at += struct.calcsize(form)
    sizes, strides, box = found
    if not middle:
        return TensorMap(start, sizes, strides, box, swizzle)
    *numbers, pixels = struct.unpack_from(f"<{2 * middle}b{rank}BH", content, at)
    corners = (tuple(numbers[:middle]), tuple(numbers[middle : 2 * middle]), tuple(numbers[2 * middle :]))
    return TensorMap(start, sizes, strides, box, swizzle, 8, *corners, pixels)
