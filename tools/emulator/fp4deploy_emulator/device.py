"""The same launch on a GPU: what the emulator computes is compared with what the hardware computes, byte by byte.

The GPU gets the PTX that the emulator executes, which the driver assembles, and a copy of every tensor that the launch
reaches, with the content that the emulator begins with. After both have run, every byte of every tensor is compared,
also those that the kernel should leave alone.

Addresses differ. They are replaced where the host put them: in the parameters, in tensor maps (the driver encodes those
of the GPU), and in tables of addresses, which are words of 8 bytes that are the address of a tensor of the launch.
Each copy has the alignment of its tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.runtime.launch import Kernel, load_cubin
from fp4deploy.plugins.runtime.pdl import launch_in_order
from fp4deploy.plugins.runtime.tma import encode
from fp4deploy_emulator.instructions.tensor_maps import MAGIC, decode
from fp4deploy_emulator.machine import Launch
from fp4deploy_emulator.memory import GlobalMemory, Range
from fp4deploy_emulator.ptx import Entry

ALIGNMENT = 256
WORD = 8
LETTERS = {1: "B", 2: "H", 4: "I", 8: "Q"}  # of a launch signature, by size


@dataclass
class Copy:
    """A tensor's bytes on the GPU. words: positions of addresses in it, which the GPU has others for."""

    range: Range
    room: torch.Tensor
    first: int
    words: NDArray[Any] = field(default_factory=lambda: np.zeros(0, np.int64))

    @property
    def address(self) -> int:
        """On the GPU."""
        return self.room.data_ptr() + self.first

    @property
    def content(self) -> torch.Tensor:
        """uint8, on the GPU."""
        return self.room[self.first : self.first + self.range.content.size]


class DeviceRun:
    """One launch on the GPU; its results stay there until they are compared.

    Raises:
        KernelError: the driver does not take the PTX.
    """

    def __init__(self, entry: Entry, memory: GlobalMemory, index: int = 0) -> None:
        self.entry, self.index = entry, index
        self.code = entry.text.encode() + b"\0"
        signature = "".join(LETTERS.get(each.size, f"{each.size}s") for each in entry.parameters)
        self.kernel: Kernel = load_cubin(index, self.code, entry.name, signature, f"{entry.name} (PTX)")
        self.copies = {each.start: self._copy(each) for each in memory.ranges}
        for copy in self.copies.values():
            self._fill(copy)

    def launch(self, how: Launch) -> None:
        """Run the kernel to its end; `how.parameters`: with the addresses of the GPU.

        Raises:
            KernelError: the kernel fails.
        """
        launch_in_order(self.kernel, lambda: self.code, how.grid, how.block, how.parameters, how.shared)
        torch.cuda.synchronize(self.index)

    def values(self, values: Sequence[Any]) -> list[Any]:
        """The arguments of a launch with the addresses of the GPU."""
        return [self._value(each) for each in values]

    def different(self) -> tuple[int, int]:
        """Bytes that differ from the emulator's, and all."""
        wrong = total = 0
        for copy in self.copies.values():
            got, mine = copy.content.cpu().numpy(), copy.range.content
            same = got == mine
            same.reshape(-1)[(copy.words[:, None] * WORD + np.arange(WORD)).reshape(-1)] = True
            wrong, total = wrong + int((~same).sum()), total + same.size
        return wrong, total

    def _copy(self, each: Range) -> Copy:
        room = torch.empty(each.content.size + 2 * ALIGNMENT, dtype=torch.uint8, device=f"cuda:{self.index}")
        return Copy(each, room, (each.start - room.data_ptr()) % ALIGNMENT)

    def _fill(self, copy: Copy) -> None:
        content = copy.range.content.copy()
        words = content[: content.size // WORD * WORD].view(np.uint64)
        copy.words = np.flatnonzero(np.isin(words, np.array(list(self.copies), np.uint64)))
        for at in copy.words.tolist():
            words[at] = self.copies[int(words[at])].address
        copy.content.copy_(torch.from_numpy(content))

    def _value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._moved(value.data_ptr()) if value.numel() else 0
        if isinstance(value, bytes) and value.startswith(MAGIC):
            tensor = decode(value)
            sizes, strides, box = tensor.sizes, tensor.strides, tensor.box
            return encode(self.kernel.gpu, self._moved(tensor.address), sizes, strides, box, tensor.swizzle)
        return value

    def _moved(self, address: int) -> int:
        start = max(start for start in self.copies if start <= address)
        return self.copies[start].address + address - start


def why_not(index: int, architecture: Architecture) -> str:
    """Why a GPU does not run code of an architecture; empty where it does."""
    if not torch.cuda.is_available():
        return "there is no CUDA GPU that torch can use"
    present = Architecture.of_device(index)
    return "" if present == architecture else f"the GPU present is {present}"
