"""From the arguments of a launch to the emulator: parameter buffers, tensors, compiled kernels.

Addresses are those of the tensors in this process. What a launch on a GPU passes is passed here too, in the layout that
the PTX declares: pointers, integers and floats with their natural alignment.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.plugins.aot.compile import compile_launch
from fp4deploy.plugins.aot.spec import Call
from fp4deploy.plugins.runtime.nvcc import KernelError
from fp4deploy_emulator import instructions  # noqa: F401  registers what `machine` executes
from fp4deploy_emulator.device import DeviceRun
from fp4deploy_emulator.faults import Fault
from fp4deploy_emulator.machine import WARP, Launch, Statistics, execute
from fp4deploy_emulator.memory import GlobalMemory
from fp4deploy_emulator.ptx import Entry, parse

Edit = Callable[[str], str]
FORMATS = {1: "<B", 2: "<H", 4: "<I", 8: "<Q"}


def emulate_triton(
    call: Call,
    arch: str,
    outputs: Collection[torch.Tensor] = (),
    model: str = "hardware",
    edit: Edit | None = None,
    grid: tuple[int, int, int] | None = None,
    gpu: int | None = None,
    unwritten: bool = False,
) -> Statistics:
    """Compile the kernel of a call for an architecture and execute it; tensors are on the CPU.

    outputs: tensors whose content is undefined before. edit: changes the PTX. grid: instead of the call's. gpu: a CUDA
    device that executes the same launch (`device`). unwritten: see `Launch`.
    """
    compiled = compile_launch(call.launch, arch)
    shape = (WARP * compiled.num_warps, 1, 1)
    entry = parsed(edit(compiled.ptx) if edit else compiled.ptx, compiled.name)
    values = [*call.values, *[0] * (len(entry.parameters) - len(call.values))]
    capability = Architecture.parse(arch).number
    return run(entry, grid or call.grid, shape, compiled.shared, values, outputs, capability, model, (), unwritten, gpu)


def run(
    entry: Entry,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    values: Sequence[Any],
    outputs: Collection[torch.Tensor],
    capability: int,
    model: str,
    reachable: Collection[torch.Tensor] = (),
    unwritten: bool = False,
    gpu: int | None = None,
) -> Statistics:
    """Execute a kernel.

    reachable: tensors whose addresses it finds in memory. unwritten: see `Launch`. gpu: see `emulate_triton`.
    """
    memory = GlobalMemory()
    addresses = {each.data_ptr() for each in outputs}
    for each in (*values, *reachable):
        if isinstance(each, torch.Tensor):
            memory.add(each, each.data_ptr() in addresses)
    launch = Launch(grid, block, shared, parameters(entry, values), model, capability, unwritten=unwritten)
    twin = None
    if gpu is not None:
        try:
            twin = DeviceRun(entry, memory, gpu)
            twin.launch(replace(launch, parameters=parameters(entry, twin.values(values))))
        except KernelError as error:
            raise Fault(f"On the GPU: {error}") from error
    statistics = execute(entry, launch, memory)
    if twin is not None:
        statistics.device_wrong, statistics.device_bytes = twin.different()
    missing = memory.unwritten()
    if missing:
        raise Fault(f"{entry.name} left {missing} bytes of its outputs unwritten.")
    return statistics


def parameters(entry: Entry, values: Sequence[Any]) -> bytes:
    """The parameter buffer.

    Raises:
        Fault: too few or too many values.
    """
    if len(values) != len(entry.parameters):
        raise Fault(f"{entry.name} has {len(entry.parameters)} parameters, and {len(values)} were given.")
    last = entry.parameters[-1]
    buffer = bytearray(last.offset + last.size)
    for parameter, value in zip(entry.parameters, values, strict=True):
        buffer[parameter.offset : parameter.offset + parameter.size] = _bits(value, parameter.size)
    return bytes(buffer)


def _bits(value: Any, size: int) -> bytes:
    if isinstance(value, bytes):
        return value.ljust(size, b"\0")
    if isinstance(value, torch.Tensor):
        value = value.data_ptr()
    if isinstance(value, float):
        return struct.pack("<f" if size == 4 else "<d", value)
    return struct.pack(FORMATS[size], (value or 0) % (1 << 8 * size))


@lru_cache(64)
def parsed(ptx: str, name: str) -> Entry:
    """A kernel of a module, parsed once."""
    return parse(ptx, name)
