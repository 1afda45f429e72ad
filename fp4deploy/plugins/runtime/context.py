"""The state that pycuda keeps for one GPU: torch's context, the loaded modules, streams forked from torch's.

**Context.** The CUDA runtime, and so torch, works in the *primary* context of a device; torch's pointers are not valid
in a context that pycuda creates. `Device(i).retain_primary_context()` gives the primary context. Every call of pycuda
pushes it before and pops it after: this works in every thread and for every device, whatever was current before. It
cannot stay pushed, because pycuda aborts the process when a thread ends with a context on its stack.

**Streams.** pycuda cannot wrap a stream of another library: it has no counterpart of `torch.cuda.ExternalStream`.
torch's default stream is CUDA's default stream, which is `None` in pycuda. For any other stream of torch's, pycuda gets
a stream of its own: one event forks it from torch's stream before the launch, another joins it to torch's stream after.
The order is as if the kernel ran on torch's stream. In eager mode that costs two records and two waits a launch, three
microseconds of host time. In a CUDA graph an event is only an edge between two nodes: where our kernels alternate with
torch's, they replay as fast as on a stream without a fork. Only many of our kernels in a row are slower, because each
joins torch's stream and the edges accumulate until a kernel of torch's follows (600 in a row: 5.6 us each instead of
0.7, on an H200).

**Nothing is destroyed.** pycuda's destructors print an error or abort if they run at the end of the process or in
another thread, where no context is current. The driver frees everything when the process ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.plugins.runtime.nvcc import KernelError, LaunchError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream


class Gpu:
    """One CUDA device and its primary context; `runtime.launch` creates one per device and process."""

    def __init__(self, index: int) -> None:
        import pycuda.driver

        torch.cuda.init()
        self.driver: Any = pycuda.driver
        self.driver.init()
        self.index = index
        self.context = _keep(self.driver.Device(index).retain_primary_context())
        self._modules: dict[bytes, Any] = {}
        self._forks: dict[int, Fork] = {}

    def function(self, cubin: bytes, name: str, label: str) -> Any:
        """A function of a module, which is loaded the first time. Not thread-safe.

        Raises:
            KernelError: the driver refuses the module, or it has no such function.
            LaunchError: it has no memory for the module.
        """
        digest = hashlib.sha256(cubin).digest()
        self.context.push()
        try:
            if digest not in self._modules:
                self._modules[digest] = _keep(self.driver.module_from_buffer(cubin))
            return _keep(self._modules[digest].get_function(name))
        except self.driver.Error as error:
            refused = LaunchError if isinstance(error, self.driver.MemoryError) else KernelError
            raise refused(
                f"The kernel {label} was not loaded on cuda:{self.index}: {error}. Its source must declare it "
                f'extern "C" __global__, and nvcc must not be newer than the driver (CUDA {_release(self.driver)}).'
            ) from error
        finally:
            self.driver.Context.pop()

    def fork(self, stream: int) -> Fork:
        """The stream of pycuda's that is forked from torch's current stream, whose handle is `stream`."""
        found = self._forks.get(stream)
        if found is not None:
            return found
        self.context.push()
        try:
            ours = _keep(self.driver.Stream(_NON_BLOCKING))
        finally:
            self.driver.Context.pop()
        return self._forks.setdefault(stream, Fork(ours, self.index))


class Fork:
    """A stream of pycuda's that is forked from one of torch's and joined to it.

    A kernel launched in `with fork as stream` runs after all work that is on torch's stream by then, and before all
    work that is added later.
    """

    def __init__(self, ours: Any, index: int) -> None:
        self._pycuda_stream = ours
        self._theirs = torch.cuda.current_stream(index)
        self._ours = torch.cuda.ExternalStream(ours.handle, device=index)
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()
        self._lock = threading.Lock()  # threads can share a stream of torch's, but not these events

    def __enter__(self) -> Any:
        self._lock.acquire()
        self._begin.record(self._theirs)
        self._begin.wait(self._ours)
        return self._pycuda_stream

    def __exit__(self, *failure: object) -> None:
        try:
            self._end.record(self._ours)
            self._end.wait(self._theirs)
        finally:
            self._lock.release()


@lru_cache
def library() -> Any:
    """The driver library, for calls that pycuda lacks; None where it is missing or older than CUDA 12.0."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuTensorMapEncodeTiled") and hasattr(found, "cuLaunchKernelEx") else None


def raw_stream(index: int) -> int:
    """Handle of torch's current stream, 0 for the default one; this is faster than `torch.cuda.current_stream`."""
    return torch._C._cuda_getCurrentRawStream(index)


def _release(driver: Any) -> str:
    version = driver.get_driver_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def _keep(thing: object) -> Any:
    """Keep an object alive for the whole process, by a reference that is never released."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
