"""Triton kernels compiled ahead of time, for any architecture on any machine, and launched without Triton.

    compiled = compile_launch(launch, "sm_120")                    # no GPU: a laptop, or CI
    kernel = function(launch, x.device)                            # no Triton: a cubin from a folder, and pycuda
    kernel.launch((grid_x, grid_y, 1), x, weight, out, rows, columns)

Triton compiles at the first call of a kernel, on the machine with the GPU, and needs a C compiler there for its
launcher; a container for deployment carries 640 MB of compilers for that (Triton 3.6). But its result is a cubin, the
machine code of one architecture, and any launcher can launch that (`docs/aot.md`).

**Calling convention of such a cubin.** Parameters are the runtime arguments in order, then two pointers to scratch
memory, which the kernels here do not use. A block has 32 threads for each warp. All shared memory is dynamic. Arguments
marked divisible must be multiples of 16, because Triton vectorises loads on that assumption; each launch checks them.
Triton's own launcher also specialises on integer arguments equal to 1; here nothing is specialised on a value.

**Search order.** FP4DEPLOY_KERNEL_PATH, then the cache, then Triton where it is installed; see
`fp4deploy.plugins.aot.store`.
"""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins.aot import store
from fp4deploy.plugins.aot.compile import INSTALL_TRITON, command, compile_launch, signature, triton_version
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.aot.store import Compiled
from fp4deploy.plugins.runtime import availability
from fp4deploy.plugins.runtime import launch as cuda_launch
from fp4deploy.plugins.runtime.availability import Device, why_no_launch
from fp4deploy.tracing import constant_when_compiled

_lock = threading.Lock()
_functions: dict[tuple[Launch, int], Function] = {}


@constant_when_compiled
def available(device: Device = None) -> bool:
    """True if a device can launch these kernels (default: torch's current one)."""
    return why_unavailable(device) is None


def why_unavailable(device: Device = None) -> str | None:
    """What is missing to launch these kernels, with the command that adds it; None where nothing is.

    A GPU and pycuda are enough where the kernels were compiled elsewhere; else Triton is needed too, never nvcc.

    Raises:
        InputError: FP4DEPLOY_KERNELS is neither "on" nor "off".
    """
    folders = os.environ.get("FP4DEPLOY_KERNEL_PATH", ""), os.environ.get("FP4DEPLOY_CACHE", "")
    return why_no_launch(device) or availability.why(device, lambda index: _no_kernels(index, *folders))


@constant_when_compiled
def any_compiled(device: Device, kernel: str) -> bool:
    """Whether a device can launch what is compiled already, and a folder has some variant of a kernel for it."""
    folders = os.environ.get("FP4DEPLOY_KERNEL_PATH", ""), os.environ.get("FP4DEPLOY_CACHE", "")
    index = availability.device_index(device)
    return index is not None and why_no_launch(index) is None and _has(kernel, index, *folders)


@lru_cache
def _has(kernel: str, index: int, _path: str, _cache: str) -> bool:
    """The variables decide where `store` looks."""
    folders = [*store.shipped_folders(), store.own_folder()]
    return store.any_kernel(Architecture.of_device(index).triton_name, folders, f"{kernel}-*")


@lru_cache
def _no_kernels(index: int, _path: str, _cache: str) -> str | None:
    """What a GPU that can launch kernels lacks; the variables decide where `store` looks."""
    present = Architecture.of_device(index)
    if present not in store.SUPPORTED:
        return (
            f"this GPU is {present}, the Triton kernels of this version are for "
            f"{', '.join(map(str, store.SUPPORTED))}, and a cubin runs on no other architecture: install a newer "
            "fp4deploy"
        )
    arch = present.triton_name
    folders = [*store.shipped_folders(), store.own_folder()]
    if triton_version() or store.any_kernel(arch, folders):
        return None
    return (
        f"there are no compiled Triton kernels for {arch}, and Triton, which compiles them, is missing: "
        f"{INSTALL_TRITON}, or set FP4DEPLOY_KERNEL_PATH to a folder written elsewhere by: {command(arch)}"
    )


class Function:
    """A kernel variant loaded on one device; `function` returns it."""

    __slots__ = ("_block", "_divisible", "_kernel", "_shared", "compiled")

    def __init__(self, compiled: Compiled, index: int) -> None:
        label = f"{compiled.name} ({compiled.arch}, Triton {compiled.triton})"
        self.compiled = compiled
        self._kernel = cuda_launch.load_cubin(
            index, compiled.cubin, compiled.name, signature(compiled.parameters), label
        )
        self._block, self._shared, self._divisible = 32 * compiled.num_warps, compiled.shared, compiled.divisible

    def __repr__(self) -> str:
        return repr(self._kernel)

    def launch(self, grid: int | tuple[int, ...], *args: Any) -> None:
        """Put the kernel on torch's current stream of its device.

        Args:
            grid: programs, up to three axes.
            args: the runtime arguments of the launch description, in order; tensors, None, integers, floats.

        Raises:
            TypeError: the arguments do not fit.
            InputError: an argument marked divisible is not a multiple of 16, or a pointer is not aligned to 16 bytes.
            KernelError: the driver refuses the launch.
        """
        for position in self._divisible:
            value = args[position] if position < len(args) else 0
            number = value if isinstance(value, int) else value.data_ptr() if value is not None else 0
            if number % 16:
                raise InputError(
                    f"Argument {position} of {self!r} was compiled as a multiple of 16 and is {number}: give a tensor "
                    "that is contiguous from an address aligned to 16 bytes, or describe the launch without it."
                )
        self._kernel.launch(grid, self._block, *args, None, None, shared=self._shared)

    def resources(self) -> dict[str, int]:
        """Resources of the loaded kernel as the driver reports them; see `runtime.launch.Kernel.resources`."""
        return self._kernel.resources()


def function(launch: Launch, device: Device = None) -> Function:
    """A kernel that is compiled and loaded; the second call with the same arguments is a dictionary lookup.

    Raises:
        UnavailableError: kernels cannot run on this device (see `why_unavailable`).
        KernelError: it is not compiled yet and Triton is missing; it does not load; or a CUDA graph is being captured
            and it was not loaded before.
    """
    index = availability.device_index(device)
    found = _functions.get((launch, -1 if index is None else index))
    if found is not None:
        return found
    why = why_unavailable(device)
    if why or index is None:
        raise UnavailableError(f"The kernel {launch.kernel} cannot run: {why}.")
    cuda_launch.refuse_capture(index, launch.kernel)
    compiled = compile_launch(launch, Architecture.of_device(index).triton_name)
    with _lock:
        if (launch, index) not in _functions:
            _functions[launch, index] = Function(compiled, index)
        return _functions[launch, index]
