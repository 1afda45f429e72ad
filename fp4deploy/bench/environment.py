"""The machine a number was measured on (versions, CPU, GPU), recorded with every number; and what it can do."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.architecture import Architecture
from fp4deploy.errors import UnavailableError
from fp4deploy.requirements import LIBRARIES, Fault, package_version, reasons
from fp4deploy.system.processors import cores

PACKAGES = ("torch", "onnx", "onnxruntime", "tensorrt_rtx", "tensorrt", "triton", "pycuda", "numpy")


@dataclass(frozen=True)
class Gpu:
    """One CUDA device as torch sees it."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def arch(self) -> str:
        """Architecture as `build --arch` takes it, such as "sm120"."""
        return str(Architecture(*self.capability))


@dataclass(frozen=True)
class Tool:
    """A library or program fp4deploy can use.

    version: None where it cannot be used. fault: then why.
    """

    name: str
    purpose: str
    version: str | None
    install: str
    fault: Fault | None = None


def gpus() -> list[Gpu]:
    """CUDA devices torch can use; empty on a machine without one."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(Gpu(properties.name, (properties.major, properties.minor), properties.total_memory))
    return found


def environment() -> dict[str, Any]:
    """Everything a reader needs to place a measurement, as JSON values."""
    import torch

    versions = {name: version for name in PACKAGES if (version := package_version(name))}
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "gpus": [{"name": gpu.name, "arch": gpu.arch, "memory_bytes": gpu.memory_bytes} for gpu in gpus()],
        "packages": versions,
    }


def cpu_name() -> str:
    """Marketing name of the CPU, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def nvcc_version() -> str | Fault:
    """Release of the CUDA compiler the kernels are built with, or why there is none."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    program = compiler.find_nvcc()
    if program is None:
        return Fault()
    try:
        printed = compiler.nvcc_version(program)
    except UnavailableError as error:
        return Fault("does not run", str(error))
    return printed.removeprefix("release ").split(",")[0].strip() or "unknown version"


def tools() -> list[Tool]:
    """The libraries and programs that decide what this machine can do."""
    from fp4deploy.plugins.runtime.nvcc import INSTALL_NVCC

    found = [(each.name, each.purpose, each.version(), each.install) for each in LIBRARIES.values()]
    found.append(("nvcc", "compiles the CUDA kernels for the GPU present", nvcc_version(), INSTALL_NVCC))
    return [
        Tool(name, purpose, None, install, state) if isinstance(state, Fault) else Tool(name, purpose, state, install)
        for name, purpose, state, install in found
    ]


def abilities(found: list[Tool], devices: list[Gpu]) -> list[tuple[str, bool, str]]:
    """What this machine can do: (task, yes or no, how or what is missing)."""
    from fp4deploy.plugins import why_unavailable
    from fp4deploy.plugins.aot import load as aot

    missing = {tool.name: f"{tool.name} {tool.fault}: {tool.install}" for tool in found if tool.fault}
    blackwell = [gpu for gpu in devices if gpu.capability >= (10, 0)]
    no_fp4 = f"no Blackwell GPU ({devices[0].arch} has no FP4 tensor cores)" if devices else "no NVIDIA GPU"
    no_gpu = None if blackwell else no_fp4
    neither = (
        "neither tensorrt nor tensorrt_rtx can be used" if {"tensorrt", "tensorrt_rtx"} <= missing.keys() else None
    )
    no_kernels = why_unavailable()
    place = devices[0].name if devices else f"the CPU, {cores()} cores"
    checks = [
        ("train", missing.get("torch"), f"on {place}"),
        (
            "run CUDA kernels",
            no_kernels and f"{no_kernels}; the torch reference does the same work, slower",
            "compiled by nvcc once, launched by pycuda",
        ),
        (
            "export and verify",
            reasons(*map(missing.get, ("torch", "onnx", "onnxruntime"))),
            "ONNX, checked in ONNX Runtime on the CPU",
        ),
        ("compile Triton kernels", missing.get("triton"), "for any GPU, by fp4deploy kernels"),
        ("run Triton kernels", aot.why_unavailable(), "compiled by Triton once, or read from FP4DEPLOY_KERNEL_PATH"),
        ("build SM120/121 engines", missing.get("tensorrt_rtx"), "TensorRT-RTX, no GPU needed"),
        ("build engines for the GPU present", reasons(no_gpu, missing.get("tensorrt")), "TensorRT"),
        ("run engines", reasons(no_gpu, neither), f"on {blackwell[0].name}" if blackwell else ""),
    ]
    return [(task, lacking is None, how if lacking is None else lacking) for task, lacking, how in checks]
