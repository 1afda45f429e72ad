"""A stand-in for pycuda that logs calls, and a machine with two Hopper GPUs as far as the driver can tell."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fp4deploy.plugins.aot import load as aot
from fp4deploy.plugins.runtime import availability
from fp4deploy.plugins.runtime import launch as cuda_launch


class Refused(Exception):
    """Stands for pycuda.driver.Error."""


class Full(Refused):
    """Stands for pycuda.driver.MemoryError."""


class Tensor:
    """What the driver uses of a tensor."""

    def __init__(self, address: int, device: int = 0) -> None:
        self.address, self.device = address, f"cuda:{device}" if device >= 0 else "cpu"

    def data_ptr(self) -> int:
        return self.address

    def get_device(self) -> int:
        return int(self.device[5:] or 0) if self.device != "cpu" else -1


class Pycuda(ModuleType):
    """A stand-in for pycuda.driver: a context stack for each thread, and everything that was called."""

    Error, MemoryError = Refused, Full
    function_attribute = SimpleNamespace(
        MAX_DYNAMIC_SHARED_SIZE_BYTES="shared",
        NUM_REGS="registers",
        LOCAL_SIZE_BYTES="local",
        SHARED_SIZE_BYTES="static",
        MAX_THREADS_PER_BLOCK="threads",
    )

    def __init__(self) -> None:
        super().__init__("pycuda.driver")
        self.calls: list[Any] = []
        self.stack = threading.local()
        self.Context = SimpleNamespace(pop=self.pop)

    def init(self) -> None:
        self.calls.append("init")

    def Device(self, index: int) -> Any:
        return SimpleNamespace(retain_primary_context=lambda: SimpleNamespace(push=lambda: self.push(index)))

    def push(self, index: int) -> None:
        self.stack.devices = [*getattr(self.stack, "devices", []), index]

    def pop(self) -> None:
        self.stack.devices.pop()

    def module_from_buffer(self, cubin: bytes) -> Any:
        assert self.stack.devices
        self.calls.append("load")
        return SimpleNamespace(get_function=self.get_function)

    def get_function(self, name: str) -> Any:
        if name == "missing":
            raise Refused("cuModuleGetFunction failed: named symbol not found")
        return SimpleNamespace(
            _launch_kernel=self.launch,
            set_attribute=lambda attribute, value: self.calls.append((attribute, value)),
            get_attribute=len,
        )

    def launch(self, *arguments: Any) -> None:
        self.calls.append((self.stack.devices[-1], *arguments))
        if arguments[1] == (2048,):
            raise Refused("cuLaunchKernel failed: invalid argument")

    def get_driver_version(self) -> int:
        return 12080

    def Stream(self, flags: int) -> Any:
        assert self.stack.devices
        return SimpleNamespace(handle=99, flags=flags)


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A driver that remembers nothing."""
    monkeypatch.delenv("FP4DEPLOY_KERNELS", raising=False)
    monkeypatch.setattr(cuda_launch, "_gpus", {})
    monkeypatch.setattr(cuda_launch, "_kernels", {})
    monkeypatch.setattr(aot, "_functions", {})
    for found in (availability._lacking, availability._lacking_to_launch, aot._no_kernels):
        found.cache_clear()
    yield
    for found in (availability._lacking, availability._lacking_to_launch, aot._no_kernels):
        found.cache_clear()


@pytest.fixture
def pycuda(fresh: None, monkeypatch: pytest.MonkeyPatch) -> Pycuda:
    """A machine with two Hopper GPUs and pycuda, as far as the driver can tell."""
    found = Pycuda()
    package = ModuleType("pycuda")
    package.driver = found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pycuda", package)
    monkeypatch.setitem(sys.modules, "pycuda.driver", found)
    for name, value in {
        "is_available": lambda: True,
        "init": lambda: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: "a GPU",
        "device": lambda _: nullcontext(),
        "is_current_stream_capturing": lambda: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(availability, "find_nvcc", lambda: Path("nvcc"))
    monkeypatch.setattr(availability, "nvcc_version", lambda _: "release 13.0")
    monkeypatch.setattr(availability, "supported", lambda *_: True)
    monkeypatch.setattr(cuda_launch, "compile_cubin", lambda path, arch, macros: f"{path}{arch}{macros}".encode())
    monkeypatch.setattr(cuda_launch, "raw_stream", lambda _: 0)
    return found
