"""Layers by kernels that are not ours: cuDNN and cuBLAS, which were timed, and TensorRT, which was not.

Nobody sees their tiles. They are taken to be 128 x 128 outputs, so that a layer of few outputs leaves multiprocessors
idle, unless K is divided: the share of the idle ones that counts is one of the fitted factors.
"""

from __future__ import annotations

import math

from fp4deploy.peaks import Gpu
from fp4deploy.precisions import ELEMENT_BYTES
from fp4deploy.timing.model import Time, Work, time_of

TILE, STEP = 128, 64
BYTES = {
    "FP32": 4.0,
    "TF32": 4.0,
    "BF16": 2.0,
    "FP16": 2.0,
    "FP4": ELEMENT_BYTES["nvfp4"],
    "FP8": ELEMENT_BYTES["fp8"],
    "INT8": ELEMENT_BYTES["int8"],
}


def library_work(
    precision: str, rows: float, columns: float, depth: float, moved: float, gpu: Gpu, transposed: bool = False
) -> Work:
    """The work of a GEMM of [rows, depth] and [depth, columns], or of a convolution as one, that moves so many bytes.

    transposed: a transposed convolution, whose columns are outputs of several pixels.

    All precisions have the same factors, each at its own rate: FP16 and FP8 were timed, no other was.
    """
    rate = gpu.macs_per_cycle(precision)
    ideal = rows * columns * depth / (gpu.num_sms * rate)
    waves = math.ceil(math.ceil(rows / TILE) * math.ceil(columns / TILE) / gpu.num_sms)
    cycles = {"tensor": ideal, "idle": max(0.0, waves * TILE**2 * depth / rate - ideal), "steps": depth / STEP}
    steps = rows * columns * depth / TILE**2
    cycles |= {"waves": waves, "scatter": transposed * rows * columns / (128 * gpu.num_sms)}
    return Work("library", cycles, moved, steps * 2 * TILE * BYTES[precision])


def library_time(precision: str, rows: float, columns: float, depth: float, moved: float, gpu: Gpu) -> Time:
    """`library_work` as a time; the operands come from memory, as of a layer in a network that is larger than L2."""
    return time_of(library_work(precision, rows, columns, depth, moved, gpu), gpu, warm=False)
