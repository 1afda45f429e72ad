"""What GPUs reach: published peaks, and rates and bandwidths that were measured, of which `timing` makes times.

Dense rates with FP32 accumulation. What is derived from them for a GPU that this project has not run on is a projection
and says so. Where nobody's measurement is known, a GPU is taken to reach the share of its peaks that the H200 does:
78 % of the FP16 rate (`torch.mm` of 8192) and 86 % of the bandwidth (a copy), by `fp4deploy profile`, H200,
2026-11-27 (`limits` in benchmarks/results/layers_h200.json).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fp4deploy.architecture import Architecture
from fp4deploy.errors import InputError

RATE_SHARE, BANDWIDTH_SHARE = 769.3 / 989.5, 4.125 / 4.8
CORES = 128  # FP32 multiply-accumulates of a multiprocessor in a cycle, of SM90, SM100 and SM120


@dataclass(frozen=True)
class Gpu:
    """TFLOP/s, TOP/s and TB/s; `fp4` is None where tensor cores have no FP4.

    clock: GHz; l2: bytes; both of the H200 as it ran (benchmarks/results/layer_times_h200.json).
    reached: precision -> TFLOP/s that others measured; "MXFP8" is FP8 by the block-scaled instruction.
    """

    name: str
    arch: Architecture
    num_sms: int
    clock: float
    l2: int
    fp4: float | None
    fp8: float
    int8: float
    fp16: float
    bandwidth: float
    source: str
    reached: Mapping[str, float] = field(default_factory=dict, hash=False)
    reached_source: str = ""

    def rate(self, precision: str) -> float:
        """Operations a second that kernels reach in "FP4", "FP8", "MXFP8", "INT8", "FP16", "BF16", "TF32" or "FP32".

        Of FP16 where there is no FP4. TF32 has half the rate of FP16 on every GPU here, and FP32 is not multiplied by
        tensor cores but by `CORES` of each multiprocessor.
        """
        if precision == "TF32":
            return self.rate("FP16") / 2
        if precision == "FP32":
            return RATE_SHARE * 2e9 * CORES * self.num_sms * self.clock
        peak = {"FP4": self.fp4, "FP8": self.fp8, "MXFP8": self.fp8, "INT8": self.int8}.get(precision) or self.fp16
        precision = "FP16" if precision == "BF16" or (precision == "FP4" and self.fp4 is None) else precision
        return 1e12 * self.reached.get(precision, RATE_SHARE * peak)

    @property
    def bytes_per_second(self) -> float:
        """That a copy reaches, read and written."""
        return 1e12 * BANDWIDTH_SHARE * self.bandwidth

    def macs_per_cycle(self, precision: str) -> float:
        """Multiply-accumulates of one multiprocessor in a cycle of `clock`, at `rate`."""
        return self.rate(precision) / (2e9 * self.num_sms * self.clock)


GPUS = (
    Gpu(
        *("B200", Architecture(10, 0), 148, 1.856, 126 << 20, 9000.0, 4500.0, 4500.0, 2250.0, 8.0),
        source="NVIDIA Blackwell Architecture Technical Brief, HGX B200",
    ),
    Gpu(
        *("RTX 5090", Architecture(12, 0), 170, 2.407, 96 << 20, 1676.0, 419.0, 838.0, 209.5, 1.792),
        source="NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A",
        reached={"FP4": 1215.0, "FP8": 507.0, "MXFP8": 918.0, "FP16": 255.0},
        reached_source="comments of QuACK's gemm_sm120.py, 2026-07-29: CUTLASS in NVFP4, plain FP8 and BF16 mma, and "
        "block-scaled FP8 with scales of 1, 918 to 1,005",
    ),
    Gpu(
        *("H200", Architecture(9, 0), 132, 1.98, 60 << 20, None, 1979.0, 1979.0, 989.5, 4.8),
        source="NVIDIA H200 Tensor Core GPU datasheet, half of the sparse figures",
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
