"""Launches that begin before the kernel in front has ended: its last blocks and the first reads of a weight overlap.

A product of a few rows is over in some ten microseconds, and for one or two of them the GPU is idle: the last blocks of
a kernel end, the first of the next begin and wait for memory. With the launch attribute "programmatic stream
serialization" a kernel begins earlier and waits for the one in front by an instruction, `griddepcontrol.wait`.
`gemv_tma.cu` reads **codes and scales before** that instruction; activations, amax and bias are read, and the
output is written, **after** it.

**When that is allowed.** Codes and scales must be complete without waiting for the kernel in front. They are if a
launch in order on the same stream has used this weight before: what wrote them had ended when it began, and kernels of
a stream begin one after the other. So the first launch with a weight on a stream is one in order, and so is every one

- after codes or scales were changed: they have another address, or another of torch's counts (`Tensor._version`);
- with inference tensors, which have no such count;
- while a CUDA graph is captured, where nothing runs yet.

A weight that was freed is no danger: another one in its place is another `Nvfp4Tensor` and begins in order. What torch
does not count is for the caller to tell, by `forget`: writing into codes or scales by `tensor.data`, by a replayed
graph, by a collective of torch.distributed, by kernels of one's own.

**Why chains are safe.** A kernel writes after its wait: all that were launched before it have ended then, because each
has waited for the one in front of it. So no output overtakes a reader, and memory that torch hands on is free. A kernel
lets the next one in only after its own wait: what still runs while the next one reads its weight is this one alone,
which writes nothing but its output. Kernels of others behind it wait for all of it, as ever.

pycuda launches without attributes, lays out parameters itself, which it cannot for those that are aligned to 64 bytes,
and does not give the handle of a function that the driver would want. So the same machine code is loaded once more,
through ctypes, into the same context; a launch needs no fork (see `runtime.context`), because the driver
takes torch's stream as it is.
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

from fp4deploy.formats import Nvfp4Tensor
from fp4deploy.plugins.runtime.context import library, raw_stream
from fp4deploy.plugins.runtime.launch import Kernel, refuse_capture
from fp4deploy.plugins.runtime.nvcc import KernelError

enabled = True  # False launches everything in order, to compare
_SERIALIZATION, _DYNAMIC_SHARED, _CARVEOUT = 6, 8, 9  # of CUlaunchAttributeID and CUfunction_attribute
State = tuple[int, int, int, int]


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60))


class _Config(ctypes.Structure):
    _fields_ = (
        *(("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("shared", ctypes.c_uint)),
        *(("stream", ctypes.c_void_p), ("attributes", ctypes.POINTER(_Attribute)), ("count", ctypes.c_uint)),
    )


@dataclass
class _Record:
    """The streams on which a weight in this state was used by a launch in order."""

    weight: weakref.ref[Nvfp4Tensor]
    state: State
    streams: set[int] = field(default_factory=set)


_functions: dict[Kernel, ctypes.c_void_p] = {}
_records: dict[int, _Record] = {}  # by id of the weight


def launch(
    kernel: Kernel, code: Callable[[], bytes], weight: Nvfp4Tensor, grid: int, block: int, args: tuple, shared: int
) -> None:
    """Launch a kernel behind the one in front where `weight` is known to be complete, else in order.

    code: gives the kernel's machine code, for the second loading.

    Raises:
        TypeError: the arguments do not fit the signature, or a tensor lies on another device.
        KernelError: the driver does not load the code, refuses the launch, or reports the failure of an earlier kernel;
            or a CUDA graph is being captured and the kernel was not loaded before.
    """
    if kernel not in _functions:  # already now, because loading may wait for the GPU
        refuse_capture(kernel.device, kernel.label)
        _functions[kernel] = _load(kernel, code(), shared)
    stream = raw_stream(kernel.device)
    record = _record(weight) if enabled and not _capturing(kernel.device) else None
    known = record is not None and stream in record.streams
    _submit(kernel, _config(grid, block, shared, stream, known), kernel.arguments(args))
    if record is not None:
        record.streams.add(stream)
        _records[id(weight)] = record


def forget(weight: Nvfp4Tensor) -> None:
    """Launch in order next: codes or scales were written where torch does not count it."""
    _records.pop(id(weight), None)


def _record(weight: Nvfp4Tensor) -> _Record | None:
    """Of the weight as it is, a new one after a change; None where changes are not counted."""
    state, record = _state(weight), _records.get(id(weight))
    if state is None:
        return None
    if record is not None and record.weight() is weight and record.state == state:
        return record
    return _Record(_until_freed(weight), state)


def _until_freed(weight: Nvfp4Tensor) -> weakref.ref[Nvfp4Tensor]:
    key = id(weight)
    return weakref.ref(weight, lambda _: _records.pop(key, None))


def _state(weight: Nvfp4Tensor) -> State | None:
    codes, scales = weight.codes, weight.scales
    if codes.is_inference() or scales.is_inference():
        return None
    return codes.data_ptr(), codes._version, scales.data_ptr(), scales._version


def _capturing(device: int) -> bool:
    if torch.cuda.current_device() == device:
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def _load(kernel: Kernel, code: bytes, shared: int) -> ctypes.c_void_p:
    what = f"The kernel {kernel.label} was not loaded on cuda:{kernel.device}"
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    kernel.gpu.context.push()
    try:
        _check(library().cuModuleLoadData(ctypes.byref(module), code), what)
        _check(library().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), what)
        _check(library().cuFuncSetAttribute(function, _DYNAMIC_SHARED, shared), what)
        _check(library().cuFuncSetAttribute(function, _CARVEOUT, 100), what)
    finally:
        kernel.gpu.driver.Context.pop()
    return function


def _submit(kernel: Kernel, config: _Config, buffer: bytes) -> None:
    """Each parameter is handed over by itself: where a GPU wants it is for the driver to know."""
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
    """Where a thread puts the parameters of a kernel, and the places of each; the driver copies them."""
    content = ctypes.create_string_buffer(size)
    first = ctypes.addressof(content)
    return content, (ctypes.c_void_p * len(kernel.offsets))(*(first + at for at in kernel.offsets))


@lru_cache(4096)
def _config(grid: int, block: int, shared: int, stream: int, behind: bool) -> _Config:
    attributes = (_Attribute * 1)(_Attribute(id=_SERIALIZATION, value=1))
    return _Config((grid, 1, 1), (block, 1, 1), shared, stream, attributes, int(behind))


def _check(result: int, what: str) -> None:
    if result:
        text = ctypes.c_char_p()
        library().cuGetErrorString(result, ctypes.byref(text))
        said = (text.value or b"no text").decode()
        raise KernelError(f"{what}: CUDA error {result}, {said}. It can be an earlier kernel's.")
