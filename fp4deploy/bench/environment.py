"""The machine a number was measured on: versions, CPU, GPU; recorded beside every number."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp4deploy.architecture import Architecture
from fp4deploy.errors import UnavailableError

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
    """A library or program fp4deploy can use; `version` is None where it is missing."""

    name: str
    purpose: str
    version: str | None
    install: str


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

    from fp4deploy.plugins.runtime.availability import cores

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


def is_machine(value: Any) -> bool:
    """Whether a JSON value has the shape of `environment`."""
    try:
        return (
            all(gpu["name"] and gpu["arch"] for gpu in value["gpus"])
            and isinstance(value["packages"], dict)
            and value.keys() >= {"cpu", "cores", "platform", "python"}
        )
    except (KeyError, TypeError, AttributeError):
        return False


def cpu_name() -> str:
    """Marketing name of the CPU, or its architecture where the system does not tell."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def package_version(module: str) -> str | None:
    """Installed version of an importable package, without importing it; None where it is missing."""
    for name in (module, module.replace("_", "-")):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def working_version(module: str) -> str | None:
    """Version of a module that really imports: bindings without their shared library count as missing."""
    try:
        found = importlib.import_module(module)
    except Exception:
        return None
    return str(getattr(found, "__version__", None) or package_version(module.partition(".")[0]) or "unknown version")


def nvcc_version() -> str | None:
    """Release of the CUDA compiler the kernels are built with; None where there is none that runs."""
    from fp4deploy.plugins.runtime import nvcc as compiler

    program = compiler.find_nvcc()
    try:
        printed = compiler.nvcc_version(program) if program else None
    except UnavailableError:
        return None
    return printed and (printed.removeprefix("release ").split(",")[0].strip() or "unknown version")


def tools() -> list[Tool]:
    """The libraries and programs that decide what this machine can do."""
    from fp4deploy.plugins.runtime.nvcc import INSTALL_NVCC

    python = [
        ("torch", "trains; runs checkpoints", "pip install torch"),
        ("onnx", "writes and checks the ONNX graph", "pip install onnx"),
        ("onnxruntime", "verifies the export; runs .onnx", "pip install onnxruntime"),
        (
            "tensorrt_rtx",
            "builds SM120/121 engines, also without a GPU; runs them on RTX 50",
            "pip install tensorrt-rtx",
        ),
        ("tensorrt", "builds and runs engines for SM100 and later, on such a GPU", "pip install tensorrt"),
        ("pycuda", "launches the CUDA kernels", "pip install pycuda  (needs the CUDA driver)"),
        ("triton", "for FP4 kernels (this version has none)", "pip install triton"),
    ]
    # pycuda alone imports without the CUDA driver it needs.
    modules = {"pycuda": "pycuda.driver"}
    found = [
        Tool(name, purpose, working_version(modules.get(name, name)), install) for name, purpose, install in python
    ]
    nvcc = Tool("nvcc", "compiles the CUDA kernels for the GPU present", nvcc_version(), INSTALL_NVCC)
    return [*found, nvcc]


def abilities(found: list[Tool], devices: list[Gpu]) -> list[tuple[str, bool, str]]:
    """What this machine can do: (task, yes or no, how or what is lacking)."""
    from fp4deploy.plugins import why_unavailable
    from fp4deploy.plugins.runtime.availability import cores

    have = {tool.name for tool in found if tool.version}
    blackwell = [gpu for gpu in devices if gpu.capability >= (10, 0)]
    engine_libraries = have & {"tensorrt", "tensorrt_rtx"}
    lacking = [] if blackwell else [f"no Blackwell GPU ({devices[0].arch} has no FP4)" if devices else "no GPU"]
    no_library = [] if engine_libraries else ["neither tensorrt nor tensorrt_rtx is installed"]
    no_tensorrt = [] if "tensorrt" in have else ["tensorrt is missing"]
    no_kernels = why_unavailable()
    instead = [f"{no_kernels}; the torch reference does the same work, slower"] if no_kernels else []
    place = devices[0].name if devices else f"the CPU, {cores()} cores"
    checks = [
        ("train", _missing(have, "torch"), f"on {place}"),
        ("run CUDA kernels", instead, "compiled by nvcc once, launched by pycuda"),
        (
            "export and verify",
            _missing(have, "torch", "onnx", "onnxruntime"),
            "ONNX, checked in ONNX Runtime on the CPU",
        ),
        ("build SM120/121 engines", _missing(have, "tensorrt_rtx"), "TensorRT-RTX, no GPU needed"),
        ("build engines for the GPU present", [*lacking, *no_tensorrt], "TensorRT"),
        ("run engines", [*lacking, *no_library], f"on {blackwell[0].name}" if blackwell else ""),
    ]
    return [(task, not lacks, how if not lacks else "; ".join(lacks)) for task, lacks, how in checks]


def _missing(have: set[str], *needed: str) -> list[str]:
    return [f"{name} is missing" for name in needed if name not in have]
