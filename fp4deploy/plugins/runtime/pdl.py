"""Programmatic dependent launch (PDL): a kernel starts while the kernel before it in the stream is still running.

A small-M GEMM takes some ten microseconds, and one or two of them are lost between two kernels: the last thread blocks
of one kernel (the primary) finish, the first blocks of the next one (the secondary) start and wait for memory. With the
launch attribute `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION` the secondary kernel starts early, and the PTX
instruction `griddepcontrol.wait` makes it wait until the primary has finished. `gemv_tma.cu` reads **codes and scales
of the weight before** that instruction. Activations, amax and bias are read, and the output is written, **after** it.

**Kernels of packed inference** read nothing early: before their first access to global memory they execute
`begin_after_primary` (`dependent_launch.cuh`, `triton.decode`), and what overlaps is the start of one kernel
with the end of the one before. `launch_secondary` is right for such a kernel whatever is before it in the stream.

**Opt-in for weights.** Reading a weight before the primary kernel has finished is correct only if nothing before it in
the stream can still be writing the weight. Launches are therefore in stream order, unless the weight was declared
constant with `freeze` (users call `FP4WeightCache.freeze`). A launch with a frozen weight is a secondary kernel, except

- the first one on each stream: the kernels that packed or copied the weight may still run; from the second one on they
  have finished, because a launch in stream order lies between;
- while a CUDA graph is captured, where nothing runs yet;
- after torch changed codes or scales all the same (another address, or another `Tensor._version`): the weight is no
  longer frozen then. This finds some mistakes, not all: a write through `tensor.data`, by a replayed graph or by
  another library changes neither.

**Why a chain of secondary kernels is safe.** A kernel writes only after its wait, and then all kernels launched before
it have finished, because each of them waited for the one before. So no output overwrites what an earlier kernel still
reads, and torch may reuse memory as usual. A kernel allows the next one to start (`griddepcontrol.launch_dependents`)
only after its own wait: while the next one reads its weight, only this one still runs, and it writes nothing but its
output. Kernels launched without the attribute wait for all earlier ones as always.

**Why not through pycuda.** pycuda launches without attributes, cannot pass a parameter that is aligned to 64 bytes (a
tensor map), and does not expose the function handle. So the same machine code is loaded a second time into the same
context, through ctypes. Such a launch takes torch's stream as it is, without the forked stream of `runtime.context`.

**Why ctypes and not cuda-bindings.** cuda-bindings (12.9 and 13.0 were compared) has all of these calls, its
`CUlaunchConfig` has the bytes of `_Config`, and a launch costs the host as much. It would be a second dependency, of
more than 100 MB, for the same bytes, and whoever has pycuda alone would lose these kernels.

Source: CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, `griddepcontrol`.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.runtime.context import library, raw_stream
from fp4deploy.plugins.runtime.launch import Kernel, refuse_capture
from fp4deploy.plugins.runtime.nvcc import LaunchError

enabled = True  # False: every launch in stream order, for comparisons
EARLIEST = 90  # compute capability from which kernels can be secondary
_SERIALIZATION, _DYNAMIC_SHARED, _CARVEOUT = 6, 8, 9  # of CUlaunchAttributeID and CUfunction_attribute
State = tuple[int, int | None, int, int | None]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


@dataclass
class _Record:
    """A frozen weight as it was when it was frozen, and the streams that have had a launch in stream order with it."""

    weight: weakref.ref[Nvfp4Tensor]
    state: State
    streams: set[int] = field(default_factory=set)


_functions: dict[Kernel, ctypes.c_void_p] = {}
_dynamic: dict[Kernel, int] = {}  # bytes of dynamic shared memory that a function was allowed
_records: dict[int, _Record] = {}  # frozen weights, by id


def freeze(weight: Nvfp4Tensor) -> None:
    """Declare that codes and scales of `weight` are never written again: launches may read them early from now on.

    It holds as long as the object lives; what is freed is forgotten.
    """
    if _record(weight) is None:
        key = id(weight)
        reference = weakref.ref(weight, lambda _: _records.pop(key, None))
        _records[key] = _Record(reference, _state(weight))


def launch_secondary(kernel: Any, grid: int | tuple[int, ...], block: int, *args: Any, shared: int = 0) -> None:
    """Launch a kernel that begins with `begin_after_primary` as a secondary kernel, before SM90 in stream order.

    kernel: of `runtime.launch.kernel`; the other arguments are those of its `launch`. What is substituted for a kernel
    is launched by itself.

    Raises:
        TypeError, KernelError: as `launch`.
    """
    if not isinstance(kernel, Kernel) or not _supported(kernel.device):
        kernel.launch(grid, block, *args, shared=shared)
        return
    _ready(kernel, lambda: kernel.cubin, shared)
    x, y, z, *_ = (*(grid if isinstance(grid, tuple) else (grid,)), 1, 1)
    config = _config((x, y, z), (block, 1, 1), shared, raw_stream(kernel.device), enabled)
    _submit(kernel, config, kernel.arguments(args))


def secondary_kernels(index: int | None) -> bool:
    """Whether a GPU and its driver launch secondary kernels."""
    return enabled and _supported(index)


@lru_cache
def _supported(index: int | None) -> bool:
    return Architecture.of_device(index).number >= EARLIEST and library() is not None


def launch(
    kernel: Kernel, code: Callable[[], bytes], weight: Nvfp4Tensor, grid: int, block: int, args: tuple, shared: int
) -> None:
    """Launch as a secondary kernel if `weight` is frozen and known to be complete, else in stream order.

    code: returns the kernel's machine code, for the second loading.

    Raises:
        TypeError: the arguments do not fit the signature, or a tensor lies on another device.
        KernelError: the driver refuses the code or the launch, or reports the failure of an earlier kernel; or a CUDA
            graph is being captured and the kernel was not loaded before.
    """
    _ready(kernel, code, shared)
    stream = raw_stream(kernel.device)
    record = _record(weight) if enabled and not is_capturing(kernel.device) else None
    secondary = record is not None and stream in record.streams
    config = _config((grid, 1, 1), (block, 1, 1), shared, stream, secondary)
    _submit(kernel, config, kernel.arguments(args))
    if record is not None:
        record.streams.add(stream)


def launch_in_order(
    kernel: Kernel,
    code: Callable[[], bytes],
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    buffer: bytes,
    shared: int,
) -> None:
    """Launch a kernel in stream order, with any alignment of its parameters, whose bytes are `buffer`.

    Raises:
        KernelError: as `launch`.
    """
    _ready(kernel, code, shared)
    _submit(kernel, _config(grid, block, shared, raw_stream(kernel.device), False), buffer)


def _ready(kernel: Kernel, code: Callable[[], bytes], shared: int) -> None:
    """Load it before the first launch, because loading may synchronise with the GPU, and allow it its shared memory."""
    if kernel not in _functions:
        refuse_capture(kernel.device, kernel.label)
        _functions[kernel] = _load(kernel, code())
    if shared > _dynamic.get(kernel, 0):  # launches of one kernel differ in it
        _allow(kernel, shared)


def _record(weight: Nvfp4Tensor) -> _Record | None:
    """That of a frozen weight; None where it is not frozen or, as far as torch knows, was changed since."""
    record = _records.get(id(weight))
    return record if record is not None and record.weight() is weight and record.state == _state(weight) else None


def _state(weight: Nvfp4Tensor) -> State:
    codes, scales = weight.codes, weight.scales
    return codes.data_ptr(), _version(codes), scales.data_ptr(), _version(scales)


def _version(x: torch.Tensor) -> int | None:
    """torch's count of writes; inference tensors have none."""
    return None if x.is_inference() else x._version


def is_capturing(device: int | None) -> bool:
    """Whether a CUDA graph is captured on a device's current stream; None: on that of the current device."""
    if device is None or torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _load(kernel: Kernel, code: bytes) -> ctypes.c_void_p:
    what = f"The kernel {kernel.label} was not loaded on cuda:{kernel.device}"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    kernel.gpu.context.push()
    try:
        _check(library().cuModuleLoadData(ctypes.byref(module), code), what)
        _check(library().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), what)
        # The same for all that are launched here: a multiprocessor has to be idle to change its carveout.
        _check(library().cuFuncSetAttribute(function, _CARVEOUT, 100), what)
    finally:
        kernel.gpu.driver.Context.pop()
    return function


def _allow(kernel: Kernel, shared: int) -> None:
    """Let a launch ask for so much dynamic shared memory; without it, static and dynamic share a limit."""
    what = f"The kernel {kernel.label} was not given {shared} bytes of shared memory on cuda:{kernel.device}"
    kernel.gpu.context.push()
    try:
        _check(library().cuFuncSetAttribute(_functions[kernel], _DYNAMIC_SHARED, shared), what)
    finally:
        kernel.gpu.driver.Context.pop()
    _dynamic[kernel] = shared


def _submit(kernel: Kernel, config: _Config, buffer: bytes) -> None:
    """Parameters are passed one by one, so that the driver decides on their layout."""
    content, places = _room(kernel, len(buffer), threading.get_ident())
    content.raw = buffer
    kernel.gpu.context.push()
    try:
        result = library().cuLaunchKernelEx(ctypes.byref(config), _functions[kernel], places, None)
    finally:
        kernel.gpu.driver.Context.pop()
    _check(result, f"The kernel {kernel.label} was not launched on cuda:{kernel.device}")


@lru_cache(4096)
def _room(kernel: Kernel, size: int, thread: int) -> tuple[Any, Any]:
    """A buffer for the parameters of a kernel, one for each host thread, and the address of each parameter.

    The driver copies them during the launch.
    """
    content = ctypes.create_string_buffer(size)
    first = ctypes.addressof(content)
    return content, (ctypes.c_void_p * len(kernel.offsets))(*(first + at for at in kernel.offsets))


@lru_cache(4096)
def _config(
    grid: tuple[int, int, int], block: tuple[int, int, int], shared: int, stream: int, secondary: bool
) -> _Config:
    attributes = (_Attribute * 1)(_Attribute(id=_SERIALIZATION, value=1))
    return _Config(grid, block, shared, stream, attributes, int(secondary))


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(text))
        said = (text.value or b"no text").decode()
        raise LaunchError(f"{what}: CUDA error {result}, {said}. It can be an earlier kernel's.")
