"""Whether kernels run on a device, and what is missing where they do not."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from functools import lru_cache
from typing import TypeAlias

import torch

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError, UnavailableError
from fp4deploy.plugins.runtime.nvcc import INSTALL_NVCC, find_nvcc, nvcc_version, supported

Device: TypeAlias = "torch.device | str | int | None"
OLDEST = Architecture(8, 0)


@torch.compiler.assume_constant_result
def available(device: Device = None) -> bool:
    """True if kernels can be compiled and launched on a device (default: torch's current one)."""
    return why_unavailable(device) is None


def why_unavailable(device: Device = None) -> str | None:
    """All that is missing, with the command that adds it; None where kernels run.

    Raises:
        InputError: FP4DEPLOY_KERNELS is neither "on" nor "off".
    """
    return _why(device, _lacking)


def why_no_launch(device: Device = None) -> str | None:
    """As `why_unavailable`, for kernels that are compiled already: a GPU and pycuda are enough, and no nvcc."""
    return _why(device, _lacking_to_launch)


def _why(device: Device, lacking: Callable[[int], str | None]) -> str | None:
    wish = os.environ.get("FP4DEPLOY_KERNELS", "on")
    if wish not in ("on", "off", ""):
        raise InputError(f"FP4DEPLOY_KERNELS is '{wish}'. Valid: on (the default), off.")
    if wish == "off":
        return "switched off by FP4DEPLOY_KERNELS=off"
    index = device_index(device)
    return "tensors on the CPU need no CUDA kernel" if index is None else lacking(index)


def device_index(device: Device) -> int | None:
    """Number of a CUDA device; None for the CPU. None means torch's current device, 0 where there is no GPU at all."""
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != "cuda":
            return None
        device = device.index
    if device is not None:
        return device
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


@lru_cache
def _lacking(index: int) -> str | None:
    nvcc = find_nvcc()
    release = None
    lacks = []
    try:
        release = nvcc_version(nvcc) if nvcc else None
    except UnavailableError as error:
        lacks.append(str(error))
    lacks += [reason] if (reason := _lacking_to_launch(index)) else []
    if nvcc is None:
        lacks.append(f"nvcc is missing: {INSTALL_NVCC}")
    elif os.name == "posix" and not any(map(shutil.which, ("g++", "gcc", "clang++"))):
        lacks.append("nvcc needs a C++ compiler on PATH: install g++")
    elif release and torch.cuda.is_available():
        arch = Architecture.of_device(index).nvcc_target
        if not supported(nvcc, arch):
            lacks.append(f"nvcc ({release}) is too old for {arch}: {INSTALL_NVCC}")
    return "; ".join(lacks) or None


@lru_cache
def _lacking_to_launch(index: int) -> str | None:
    lacks = []
    if not torch.cuda.is_available():
        lacks.append("no NVIDIA GPU that torch can use")
    else:
        arch = Architecture.of_device(index)
        if arch < OLDEST:
            name = torch.cuda.get_device_name(index)
            lacks.append(f"{name} is {arch}, and {OLDEST} is the oldest architecture that the kernels support")
    try:
        import pycuda.driver  # noqa: F401
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("pycuda")
        lacks.append(f"pycuda {'is missing' if missing else f'does not load ({error})'}: pip install pycuda")
    return "; ".join(lacks) or None


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
