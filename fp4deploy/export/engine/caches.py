"""Where the caches of engine libraries lie: what was measured or compiled on one GPU is of use there alone.

    <cache folder>/engines/<kind>-<library>-<version>-<GPU>-<driver>.cache

kind: "timing" (the builder of TensorRT: times of kernels) or "runtime" (TensorRT-RTX: kernels compiled when an engine
was loaded). Another version of the library, another GPU or another driver has another file, so that none has to be
invalidated. The folder and the entries are those of `plugins.runtime.cache`.
"""

from __future__ import annotations

import re
from pathlib import Path

from fp4deploy.plugins.runtime.cache import cache_folder, keep_entry, read_entry

PROC = Path("/proc/driver/nvidia/version")


def driver_version(proc: Path = PROC) -> str:
    """Version of the NVIDIA driver, such as "580.95.05"; that of its CUDA interface where the system does not tell."""
    try:
        found = re.search(r"(\d+\.\d+(\.\d+)?)", proc.read_text(encoding="utf-8", errors="replace").partition("\n")[0])
    except OSError:
        found = None
    if found:
        return found[1]
    import torch

    version = torch._C._cuda_getDriverVersion() if torch.cuda.is_available() else 0  # type: ignore[attr-defined]
    return f"cuda{version // 1000}.{version % 1000 // 10}" if version else "none"


def entry(kind: str, library: str, version: str) -> Path | None:
    """The file of a cache for the GPU present; None without a GPU."""
    import torch

    if not torch.cuda.is_available():
        return None
    parts = (kind, library, version, torch.cuda.get_device_name(), driver_version())
    return cache_folder() / "engines" / f"{'-'.join(re.sub('[^A-Za-z0-9.]+', '_', part) for part in parts)}.cache"


def read(path: Path | None) -> bytes:
    """What is in a cache; nothing where it is missing or damaged."""
    return (read_entry(path) or b"") if path is not None else b""


def keep(path: Path | None, content: bytes, before: bytes = b"") -> None:
    """Write a cache that has changed; one that cannot be written is a warning."""
    if path is not None and content and content != before:
        keep_entry(path, content)
