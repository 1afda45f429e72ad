"""Launching compiled kernels through pycuda, in torch's context, on its current stream, with its memory.

    clip = kernel("clip.cu", "clip", "PPqf", {"DTYPE": "__half"}, x.device)  # compiles and loads, once
    clip.launch(blocks, 256, x, out, x.numel(), 6.0)                          # a few microseconds

**Arguments.** A signature gives the C type of each parameter in the letters of Python's `struct`, with native
alignment, which is also how the driver lays out a parameter buffer:

| letter | parameter | argument |
|---|---|---|
| `P` | pointer | tensor on the kernel's device, None for a null pointer, or an address |
| `q` `Q` | `long long`, `unsigned long long` | int |
| `i` `I` | `int`, `unsigned` | int |
| `f` `d` | `float`, `double` | float or int |
| `?` `b` `B` `h` `H` | `bool` and the small integers | int |
| `64s` | a structure of 64 bytes | bytes; put `0q` before it where it must be aligned to 8 |

Values out of range and wrong counts are refused. That the signature matches the source cannot be checked: keep the two
in adjacent files.

**Cost.** A launch allocates nothing, synchronises nothing and reads no data. A module is loaded when `kernel` is first
called. That must not happen while a CUDA graph is captured, because loading allocates; the warm-up steps that torch
requires before a capture load it. `fp4deploy.plugins.runtime.context` says how a kernel runs on torch's stream.
"""

from __future__ import annotations

import re
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins.runtime.availability import Device, device_index, why_no_launch, why_unavailable
from fp4deploy.plugins.runtime.availability import available as available
from fp4deploy.plugins.runtime.context import Gpu, raw_stream
from fp4deploy.plugins.runtime.nvcc import LaunchError, Macros, compile_cubin, describe, source_path

SIGNATURE = re.compile(r"(?:[PqQiIfd?bBhH]|0q|\d+s)*")

_lock = threading.Lock()
_gpus: dict[int, Gpu] = {}
_kernels: dict[tuple, Kernel] = {}
# Each thread has its own: while one records launches, another may run kernels.
_substitute: ContextVar[Callable[..., Any] | None] = ContextVar("substitute", default=None)
_assumed_sms: ContextVar[int] = ContextVar("assumed_sms", default=1)


@contextmanager
def substituted(factory: Callable[..., object], num_sms: int = 1) -> Iterator[None]:
    """Let `kernel` return what `factory(source, name, signature, macros)` returns: for launches without a GPU.

    Other threads launch as before.

    Args:
        num_sms: multiprocessors of the GPU that the launches are for.
    """
    substitute, assumed = _substitute.set(factory), _assumed_sms.set(num_sms)
    try:
        yield
    finally:
        _substitute.reset(substitute)
        _assumed_sms.reset(assumed)


def num_sms(device: torch.device) -> int:
    """Multiprocessors of a GPU; for anything else of the one that launches are recorded for."""
    return _num_sms(device.index) if device.type == "cuda" else _assumed_sms.get()


@lru_cache
def _num_sms(index: int | None) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def kernel(
    source: str | Path,
    name: str,
    signature: str,
    macros: Macros | None = None,
    device: Device = None,
    compiled: Callable[[int], bytes] | None = None,
) -> Kernel:
    """A kernel that is compiled and loaded; the second call with the same arguments is a dictionary lookup.

    Args:
        source: name of a file in a folder `fp4deploy/plugins/*/cuda`, or an absolute path.
        name: its name; the source says `extern "C" __global__`, so that it is not mangled.
        signature: types of the parameters, see the module's table.
        macros: preprocessor macros of the variant.
        device: where it runs (default: torch's current device).
        compiled: gives the machine code for a GPU of this number where nothing compiles here, as nvcc is missing.

    Raises:
        InputError: there is no such source, or the macros or the signature are malformed.
        UnavailableError: kernels cannot run here (see `why_unavailable`).
        KernelError: it does not compile or load.
        LaunchError: a CUDA graph is being captured and it was not loaded before, or the GPU has no memory for it.
    """
    substitute = _substitute.get()
    if substitute is not None:
        return substitute(source, name, signature, macros)
    index = device_index(device)
    key = (source, name, signature, index, *(macros.items() if macros else ()))
    found = _kernels.get(key)
    return found if found is not None else _load(key, Path(source), name, signature, macros, index, compiled)


class Kernel:
    """One variant of a kernel, loaded on one device; `kernel` returns it."""

    __slots__ = (
        "_call",
        "_error",
        "_function",
        "_pack",
        "_pointers",
        "_pop",
        "_push",
        "_shared",
        "cubin",
        "device",
        "gpu",
        "label",
        "name",
        "offsets",
    )

    def __init__(self, gpu: Gpu, function: Any, name: str, label: str, signature: str, cubin: bytes = b"") -> None:
        self.device, self.name, self.cubin = gpu.index, name, cubin
        self.gpu, self._function, self.label = gpu, function, label
        self._pack, self._pointers = packing(signature)
        self.offsets = offsets(signature)
        self._shared = 0  # the most that was asked for; 48 KiB without it are static and dynamic together
        # Looked up once. pycuda's prepared calls end in `_launch_kernel`; before it they make a deprecated call that
        # stores the block size in the function, a data race between threads, and look up the packing function.
        self._call, self._push, self._pop = function._launch_kernel, gpu.context.push, gpu.driver.Context.pop
        self._error = gpu.driver.Error

    def __repr__(self) -> str:
        return f"Kernel({self.label}, cuda:{self.device})"

    def launch(self, grid: int | tuple[int, ...], block: int | tuple[int, ...], *args: object, shared: int = 0) -> None:
        """Put the kernel on torch's current stream of its device.

        Args:
            grid: blocks, up to three axes.
            block: threads in a block, up to three axes.
            args: one for each parameter in the signature.
            shared: bytes of dynamic shared memory, as far as the device allows.

        Raises:
            TypeError: the arguments do not fit the signature, or a tensor lies on another device.
            LaunchError: the driver refuses the launch, or reports the failure of an earlier kernel.
        """
        buffer = self.arguments(args)
        size = grid if isinstance(grid, tuple) else (grid,)
        threads = block if isinstance(block, tuple) else (block,)
        stream = raw_stream(self.device)
        if stream == 0:
            self._submit(size, threads, buffer, shared, None)
        else:
            with self.gpu.fork(stream) as forked:
                self._submit(size, threads, buffer, shared, forked)

    def resources(self) -> dict[str, int]:
        """Resources: registers per thread, bytes of local and static shared memory, largest block."""
        names = {"registers": "NUM_REGS", "local_bytes": "LOCAL_SIZE_BYTES", "shared_bytes": "SHARED_SIZE_BYTES"}
        names["max_threads"] = "MAX_THREADS_PER_BLOCK"
        attribute = self.gpu.driver.function_attribute
        self._push()
        try:
            return {key: self._function.get_attribute(getattr(attribute, name)) for key, name in names.items()}
        finally:
            self._pop()

    def _submit(self, grid: tuple, block: tuple, buffer: bytes, shared: int, stream: Any) -> None:
        self._push()
        try:
            if shared > self._shared:
                self._function.set_attribute(self.gpu.driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                self._shared = shared
            self._call(grid, block, buffer, shared, stream)
        except self._error as error:
            raise LaunchError(
                f"The kernel {self.label} was not launched on cuda:{self.device} with grid {grid}, block {block} and "
                f"{shared} bytes of shared memory: {error}. An illegal address or a failed launch can be caused by an "
                "earlier kernel: CUDA_LAUNCH_BLOCKING=1 shows which."
            ) from error
        finally:
            self._pop()

    def arguments(self, args: tuple[Any, ...]) -> bytes:
        """The parameter buffer of a launch.

        Raises:
            TypeError: the arguments do not fit the signature, or a tensor lies on another device.
        """
        values = list(args)
        try:
            for position in self._pointers:
                value = values[position]
                if value is None:
                    values[position] = 0
                elif not isinstance(value, int):
                    if value.get_device() != self.device:
                        raise TypeError(f"argument {position} is on {value.device}, not on cuda:{self.device}")
                    values[position] = value.data_ptr()
            return self._pack(*values)
        except (struct.error, TypeError, IndexError, AttributeError) as error:
            raise TypeError(f"The kernel {self.label} does not take these arguments: {error}.") from error


def packing(signature: str) -> tuple[Callable[..., bytes], tuple[int, ...]]:
    """The function that packs a parameter buffer, and which arguments are pointers.

    Raises:
        InputError: it contains something else than the letters of the module's table.
    """
    if not SIGNATURE.fullmatch(signature):
        raise InputError(f"The signature '{signature}' is invalid. Valid parts: P q Q i I f d ? b B h H, 0q and 64s.")
    pointers = tuple(position for position, letter in enumerate(_letters(signature)) if letter.group() == "P")
    return struct.Struct(f"@{signature}").pack, pointers


def offsets(signature: str) -> tuple[int, ...]:
    """Where each argument begins in the buffer that `packing` fills."""
    ends = ((struct.calcsize(f"@{signature[: letter.end()]}"), letter.group()) for letter in _letters(signature))
    return tuple(end - struct.calcsize(f"@{letter}") for end, letter in ends)


def _letters(signature: str) -> list[re.Match[str]]:
    """The parts of a signature that are arguments."""
    return [letter for letter in re.finditer(r"\d*.", signature) if letter.group() != "0q"]


def _load(
    key: tuple,
    source: Path,
    name: str,
    signature: str,
    macros: Macros | None,
    index: int | None,
    compiled: Callable[[int], bytes] | None,
) -> Kernel:
    device = "cpu" if index is None else index
    why = why_unavailable(device)
    if why and compiled is not None:
        why = why_no_launch(device)
    else:
        compiled = partial(machine_code, source, macros)
    if why or index is None:
        raise UnavailableError(f"The kernel {name} cannot run: {why}.")
    path = source_path(source)
    packing(signature)
    label = f"{name} of {describe(path, macros)}"
    refuse_capture(index, label)
    cubin = compiled(index)
    same = (str(path), name, signature, index, *sorted((macros or {}).items()))
    with _lock:
        if same not in _kernels:
            _kernels[same] = _on_gpu(index, cubin, name, signature, label)
        return _kernels.setdefault(key, _kernels[same])


def machine_code(source: str | Path, macros: Macros | None, index: int) -> bytes:
    """Machine code of a source for a GPU that is present; raises as `compile_cubin` does."""
    return compile_cubin(source, Architecture.of_device(index).nvcc_target, macros)


def refuse_capture(index: int, label: str) -> None:
    """Refuse to load a kernel during the capture of a CUDA graph: loading allocates, which capture does not allow.

    Raises:
        LaunchError: a CUDA graph is being captured on the device.
    """
    with torch.cuda.device(index):
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError(
                f"The kernel {label} was not loaded when the capture of a CUDA graph began, and loading allocates. "
                "Run the step once on this device before the capture."
            )


def load_cubin(index: int, cubin: bytes, name: str, signature: str, label: str) -> Kernel:
    """Load a kernel from machine code; the caller keeps it.

    Raises:
        KernelError: the driver refuses the module, or it has no such function.
    """
    with _lock:
        return _on_gpu(index, cubin, name, signature, label)


def _on_gpu(index: int, cubin: bytes, name: str, signature: str, label: str) -> Kernel:
    """The caller holds the lock."""
    if index not in _gpus:
        _gpus[index] = Gpu(index)
    return Kernel(_gpus[index], _gpus[index].function(cubin, name, label), name, label, signature, cubin)
