"""Launches of a plan executed by the PTX emulator: of a plan played in Python, and of the C library."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from fp4deploy.native.plan import Recorded
from fp4deploy.plugins.aot.compile import compile_launch
from fp4deploy.plugins.aot.spec import Call, Launch
from fp4deploy_emulator import machine
from fp4deploy_emulator.launch import emulate_triton, parsed
from fp4deploy_emulator.memory import GlobalMemory

ARCH, CAPABILITY = "sm_120", 120
LAUNCHER = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.POINTER(ctypes.c_uint), ctypes.c_void_p, ctypes.c_size_t)


def call(made: Call) -> None:
    """Execute one launch on tensors of the CPU."""
    emulate_triton(made, ARCH, unwritten=True)


def launch(recorded: Recorded, values: list[Any]) -> None:
    """For `replay.play`."""
    made = recorded.kernel
    assert isinstance(made, Launch)
    call(Call(made, tuple(values[: len(made.arguments)]), recorded.grid))


def compute(driver: Path, log: Path, kernels: dict[str, Launch], given: list[torch.Tensor]) -> Any:
    """Let the recording driver compute its launches by the emulator; what is returned must be kept.

    kernels: by the name that the bundle gives each; given: tensors that the caller passes.
    """
    recording = ctypes.CDLL(str(driver / "libcuda.so.1"), ctypes.RTLD_GLOBAL)
    failures: list[BaseException] = []

    def run(name: bytes, sizes: Any, parameters: int, size: int) -> None:
        try:
            memory, buffer = GlobalMemory(), ctypes.string_at(parameters, size)
            for tensor in (*given, *_allocated(log)):
                memory.add(tensor)
            compiled = compile_launch(kernels[name.decode()], ARCH)
            entry, numbers = parsed(compiled.ptx, compiled.name), sizes[:7]
            grid, block = tuple(numbers[:3]), tuple(numbers[3:6])
            about = machine.Launch(grid, block, numbers[6], buffer, "hardware", CAPABILITY, unwritten=True)
            machine.execute(entry, about, memory)
        except BaseException as error:  # it cannot pass through C
            failures.append(error)

    callback = LAUNCHER(run)
    recording.recording_driver_launcher(callback)
    return recording, callback, failures


def _allocated(log: Path) -> list[torch.Tensor]:
    """Memory of the driver, by its log."""
    words = [line.split() for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("allocate ")]
    return [
        torch.frombuffer((ctypes.c_uint8 * int(size)).from_address(int(at)), dtype=torch.uint8) for _, at, size in words
    ]
