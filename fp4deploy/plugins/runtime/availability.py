"""Whether kernels run on a device, and what is missing where they do not.

Three kinds of kernels ask here: CUDA C++ that nvcc compiles (`why_unavailable`), machine code that is compiled already
(`why_no_launch`) and torch's own FP4 GEMM (`plugins.gemm.scaled_mm`). Each names what *it* lacks, by `why`; the
switch FP4DEPLOY_KERNELS and the CPU are the same for all.
"""

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
from fp4deploy.requirements import LIBRARIES, reasons
from fp4deploy.tracing import constant_when_compiled

Device: TypeAlias = "torch.device | str | int | None"
OLDEST = Architecture(8, 0)
SWITCH = "FP4DEPLOY_KERNELS"


@constant_when_compiled
def available(device: Device = None) -> bool:
    """True if kernels can be compiled and launched on a device (default: torch's current one)."""
    return why_unavailable(device) is None


def why_unavailable(device: Device = None) -> str | None:
    """All that is missing, with the command that adds it; None where kernels run.

    Raises:
        InputError: FP4DEPLOY_KERNELS is neither "on" nor "off".
    """
    return why(device, _lacking)


def why_no_launch(device: Device = None) -> str | None:
    """As `why_unavailable`, for kernels that are compiled already: a GPU and pycuda are enough, and no nvcc."""
    return why(device, _lacking_to_launch)


def why(device: Device, lacking: Callable[[int], str | None]) -> str | None:
    """Why a kind of kernel does not run on a device; `lacking` says what a CUDA device lacks for it.

    Raises:
        InputError: FP4DEPLOY_KERNELS is neither "on" nor "off".
    """
    switch = os.environ.get(SWITCH, "on")
    if switch not in ("on", "off", ""):
        raise InputError(f"{SWITCH} is '{switch}'. Valid: on (the default), off.")
    if switch == "off":
        return f"switched off by {SWITCH}=off"
    index = device_index(device)
    return "the tensors are on the CPU, not on a CUDA device" if index is None else lacking(index)


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
    if nvcc is None:
        return reasons(_lacking_to_launch(index), f"nvcc is missing: {INSTALL_NVCC}")
    try:
        release = nvcc_version(nvcc)
    except UnavailableError as error:
        return reasons(str(error), _lacking_to_launch(index))
    compiler = old = None
    if os.name == "posix" and not any(map(shutil.which, ("g++", "gcc", "clang++"))):
        compiler = "nvcc needs a C++ compiler on PATH: install g++"
    if torch.cuda.is_available():
        target = Architecture.of_device(index).nvcc_target
        if not supported(nvcc, target):
            old = f"nvcc ({release}) is too old for {target}: {INSTALL_NVCC}"
    return reasons(_lacking_to_launch(index), compiler, old)


@lru_cache
def _lacking_to_launch(index: int) -> str | None:
    gpu = None
    if not torch.cuda.is_available():
        gpu = "no NVIDIA GPU that torch can use"
    elif (found := Architecture.of_device(index)) < OLDEST:
        name = torch.cuda.get_device_name(index)
        gpu = f"{name} is {found}, and {OLDEST} is the oldest architecture that the kernels support"
    return reasons(gpu, LIBRARIES["pycuda"].why_missing())
