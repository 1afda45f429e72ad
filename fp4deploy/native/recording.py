"""Launches on tensors without data, recorded: which tensors are constants, inputs and outputs, where the others lie.

Tensors are told apart by their storages, so that views of one are one buffer. The recording keeps every tensor that it
has seen: a storage that was freed could be given to another tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from fp4deploy.models.checkpoint import digest
from fp4deploy.native.arena import Lifetime, place
from fp4deploy.native.plan import STAGES, Argument, Buffer, Constant, CudaKernel, Recorded
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy.plugins.runtime.launch import packing

META = torch.device("meta")
Entry = tuple[Launch | CudaKernel, tuple[int, int, int], int | None, int | None, tuple[Any, ...]]


@dataclass
class Recording:
    """What `runtime.launch.substituted` and the launchers of Triton calls write to.

    launches: by stage: kernel, grid, block, shared memory, and values with tensors.
    constants: each with the tensor that stands for it.
    roles: storage -> "constant", "input" or "output", and its number. alias: storage -> another, the same memory.
    """

    launches: dict[str, list[Entry]] = field(default_factory=lambda: {stage: [] for stage in STAGES})
    constants: dict[Constant, torch.Tensor] = field(default_factory=dict)
    roles: dict[int, tuple[str, int]] = field(default_factory=dict)
    alias: dict[int, int] = field(default_factory=dict)
    contents: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    stage: str = "body"

    def cuda(self, source: str | Path, name: str, signature: str, macros: Any = None) -> Any:
        """In place of `runtime.launch.kernel`."""
        packing(signature)
        kernel = CudaKernel(str(source), name, signature, tuple(sorted((macros or {}).items())))
        return _Substitute(partial(self.add, kernel))

    def triton(self, call: Call) -> None:
        """In place of `arguments.run`."""
        self.launches[self.stage].append((call.launch, call.grid, None, None, (*call.values, None, None)))
        self._keep(call.values)

    def add(self, kernel: CudaKernel, grid: Any, block: Any, *arguments: Any, shared: int = 0) -> None:
        """One launch of a CUDA kernel."""
        size = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)[:3]
        self.launches[self.stage].append((kernel, cast(Any, size), int(block), shared, arguments))
        self._keep(arguments)

    def _keep(self, values: Sequence[object]) -> None:
        self.kept += [each for each in values if isinstance(each, torch.Tensor)]

    @contextmanager
    def at(self, stage: str) -> Iterator[None]:
        """Launches belong to this stage."""
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def role(self, tensor: torch.Tensor, kind: str, number: int) -> torch.Tensor:
        """Say that a tensor is no part of the arena."""
        self.kept.append(tensor)
        self.roles[_storage(tensor)] = (kind, number)
        return tensor

    def constant(self, kind: str, name: str, like: torch.Tensor, **about: Any) -> torch.Tensor:
        """A tensor of the file on the GPU, `like` without data; each once."""
        constant = Constant(kind, name, like.nbytes, **about)
        if constant not in self.constants:
            self.constants[constant] = self.role(like, "constant", len(self.constants))
        return self.constants[constant]

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor that is kept with the plan, without data but with its strides."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = tensor.as_strided((extent,), (1,)).clone().view(torch.uint8)
        name = digest(memory)
        self.contents[name] = memory
        like = self.constant("stored", name, torch.empty(memory.shape, dtype=torch.uint8, device=META))
        return like.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def same(self, tensor: torch.Tensor, other: torch.Tensor) -> None:
        """Say that two tensors are the same memory."""
        self.alias[_storage(tensor)] = _storage(other)

    def placed(self) -> tuple[dict[str, tuple[Recorded, ...]], int]:
        """The launches with their buffers, and the bytes of the arena."""
        times = _times({stage: len(each) for stage, each in self.launches.items()})
        lives: dict[int, Lifetime] = {}
        for stage, launches in self.launches.items():
            for number, (*_, values) in enumerate(launches):
                when = times[stage] + number
                for value in values:
                    if isinstance(value, torch.Tensor) and _storage(value) not in self.roles:
                        storage = self.alias.get(_storage(value), _storage(value))
                        size = value.untyped_storage().nbytes()
                        known = lives.get(storage, Lifetime(size, when, when))
                        lives[storage] = Lifetime(size, min(known.first, when), max(known.last, when))
        offsets, total = place(list(lives.values()))
        where = dict(zip(lives, offsets, strict=True))
        stages = {
            stage: tuple(
                Recorded(kernel, grid, block, shared, tuple(self._argument(value, where) for value in values))
                for kernel, grid, block, shared, values in launches
            )
            for stage, launches in self.launches.items()
        }
        return stages, total

    def _argument(self, value: object, where: dict[int, int]) -> Argument:
        if not isinstance(value, torch.Tensor):
            return cast("int | float | None", value)
        storage, offset = _storage(value), int(value.storage_offset()) * value.element_size()
        if storage in self.roles:
            kind, number = self.roles[storage]
            if offset:
                raise AssertionError(f"an argument begins {offset} bytes inside a {kind}")
            return Buffer(kind, number)
        return Buffer("arena", where[self.alias.get(storage, storage)] + offset)


@dataclass(frozen=True)
class _Substitute:
    """What `runtime.launch.kernel` returns while a plan is recorded."""

    launch: Any


def _times(counts: dict[str, int]) -> dict[str, int]:
    """The time of the first launch of each stage; the stages of the input, and those of the output, share theirs."""
    first = max(counts[stage] for stage in STAGES if stage.startswith("input"))
    return {
        stage: 0 if stage.startswith("input") else first + (0 if stage == "body" else counts["body"])
        for stage in STAGES
    }


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
