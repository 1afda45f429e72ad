"""Published peaks of GPUs, from which times are projected where none can be measured: the roofline

    time >= max(operations / peak of the precision, bytes / bandwidth)

Dense rates with FP32 accumulation. What is derived from them is a projection and says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError


@dataclass(frozen=True)
class Gpu:
    """TFLOP/s, TOP/s and TB/s; `fp4` is None where tensor cores have no FP4."""

    name: str
    arch: Architecture
    fp4: float | None
    fp8: float
    int8: float
    fp16: float
    bandwidth: float
    source: str

    def seconds(self, precision: str, macs: float, moved: float) -> float:
        """Projected seconds of so many multiply-accumulates and bytes; precision: "FP4", "FP8", "INT8" or "FP16"."""
        peak = {"FP4": self.fp4, "FP8": self.fp8, "INT8": self.int8}.get(precision) or self.fp16
        return max(2 * macs / (peak * 1e12), moved / (self.bandwidth * 1e12))


GPUS = (
    Gpu(
        "B200",
        Architecture(10, 0),
        9000.0,
        4500.0,
        4500.0,
        2250.0,
        8.0,
        "NVIDIA Blackwell Architecture Technical Brief, HGX B200",
    ),
    Gpu(
        "RTX 5090",
        Architecture(12, 0),
        1676.0,
        419.0,
        838.0,
        209.5,
        1.792,
        "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A",
    ),
    Gpu(
        "H200",
        Architecture(9, 0),
        None,
        1979.0,
        1979.0,
        989.5,
        4.8,
        "NVIDIA H200 Tensor Core GPU datasheet, half of the sparse figures",
    ),
)


def find_gpu(arch: str) -> Gpu:
    """The GPU whose peaks stand for an architecture.

    Raises:
        InputError: none is known for it.
    """
    wanted = Architecture.find(arch)
    found = next((gpu for gpu in GPUS if gpu.arch == wanted), None)
    if found is None:
        valid = ", ".join(str(gpu.arch) for gpu in GPUS)
        raise InputError(f"--arch {arch}: no published peaks are known for it. Valid: {valid}.")
    return found
