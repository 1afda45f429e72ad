"""What pycuda holds of one GPU: torch's context, the loaded modules, streams beside torch's.

**Context.** The CUDA runtime, and so torch, works in the *primary* context of a device; a context of pycuda's own would
not know torch's pointers. `Device(i).retain_primary_context()` is torch's. Whoever calls pycuda pushes it and pops it
again: that serves every thread and every device, whatever was current before. It cannot stay pushed, because pycuda
aborts the process when a thread ends with a context on its stack.

**Streams.** pycuda cannot wrap a foreign stream: it has no counterpart of `torch.cuda.ExternalStream`. torch's default
stream is CUDA's default stream, which pycuda calls `None`. Beside any other stream stands one of pycuda's own: an
event forks it from torch's before the launch, another joins it to torch's after. The order is as if the kernel ran on
torch's stream. Eagerly that is two records and two waits a launch, three microseconds of the host. In a CUDA graph an
event is only an edge between two kernels, and a replay knows no streams: kernels of ours between torch's replay as fast
as on a stream that needs no fork. Only a long run of ours alone is slower, because each joins torch's stream anew and
the edges of the run add up until a kernel of torch's follows (600 in a row: 5.6 us each instead of 0.7, on an H200).

**Nothing is destroyed.** A destructor of pycuda's that runs at the end of the process, or in another thread than the
first, finds no context and complains or aborts. The driver frees everything when the process ends.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from functools import lru_cache
from typing import Any

import torch

from fp4deploy.plugins.runtime.nvcc import KernelError

_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: no implicit order with the default stream


class Gpu:
    """One CUDA device, its primary context retained; made once a process by the driver."""

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
        """A function of a module; the module is loaded the first time. Not for two threads at once.

        Raises:
            KernelError: the driver refuses the module, or it has no such function.
        """
        digest = hashlib.sha256(cubin).digest()
        self.context.push()
        try:
            if digest not in self._modules:
                self._modules[digest] = _keep(self.driver.module_from_buffer(cubin))
            return _keep(self._modules[digest].get_function(name))
        except self.driver.Error as error:
            raise KernelError(
                f"The kernel {label} was not loaded on cuda:{self.index}: {error}. Its source must declare it "
                f'extern "C" __global__, and nvcc must not be newer than the driver (CUDA {_release(self.driver)}).'
            ) from error
        finally:
            self.driver.Context.pop()

    def fork(self, stream: int) -> Fork:
        """pycuda's stream beside torch's current stream, whose handle the caller has looked up."""
        found = self._forks.get(stream)
        if found is not None:
            return found
        self.context.push()
        try:
            twin = _keep(self.driver.Stream(_NON_BLOCKING))
        finally:
            self.driver.Context.pop()
        return self._forks.setdefault(stream, Fork(twin, self.index))


class Fork:
    """A stream of pycuda's beside one of torch's.

    What is launched inside `with fork as stream` runs after all that torch's stream holds and before all it gets later.
    """

    def __init__(self, twin: Any, index: int) -> None:
        self._twin = twin
        self._theirs = torch.cuda.current_stream(index)
        self._ours = torch.cuda.ExternalStream(twin.handle, device=index)
        self._begin, self._end = torch.cuda.Event(), torch.cuda.Event()
        self._lock = threading.Lock()  # two threads can share a stream of torch's, but not these events

    def __enter__(self) -> Any:
        self._lock.acquire()
        self._begin.record(self._theirs)
        self._begin.wait(self._ours)
        return self._twin

    def __exit__(self, *failure: object) -> None:
        try:
            self._end.record(self._ours)
            self._end.wait(self._theirs)
        finally:
            self._lock.release()


@lru_cache
def library() -> Any:
    """The driver itself, for what pycuda has not; None where it is missing or older than CUDA 12.0."""
    try:
        found = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return found if hasattr(found, "cuTensorMapEncodeTiled") and hasattr(found, "cuLaunchKernelEx") else None


def raw_stream(index: int) -> int:
    """Handle of torch's current stream, 0 for the default one; the short way that torch's own code generator takes."""
    return torch._C._cuda_getCurrentRawStream(index)


def _release(driver: Any) -> str:
    version = driver.get_driver_version()
    return f"{version // 1000}.{version % 1000 // 10}"


def _keep(thing: Any) -> Any:
    """Make an object immortal."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
    return thing
