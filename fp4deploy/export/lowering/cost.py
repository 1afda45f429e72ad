"""FP8 or FP16 for a convolution that has no FP4 form: what `--conv auto` decides by.

An FP4 layer that stays a convolution is computed from decoded operands either way. Per image, with X elements of the
input, W of the weight and Y of the output, the two forms move and multiply

    form                                        bytes                                          tensor cores
    FP16 convolution, weights stored in FP4     X (2 + 2 + 2) + W (0.5625 + 2 + 2) + 2 Y       FP16
    FP8 convolution                             X (2 + 1 + 1) + W + 2 Y                        FP8, twice the rate

the FP16 form reads the input, writes it quantised and decoded, and reads that; weights are read as codes, written
decoded, and read. The cost is the time of `timing.library` on an RTX 5090 (SM120), whose factors were fitted to cuDNN
and cuBLAS on an H200. By this model FP8 wins wherever a GPU has FP8 tensor cores. Nobody has timed either form in
TensorRT: a projection, which the ledger says as the reason. `--conv qdq` keeps FP16 and the smaller weights.

Time decides, because accuracy does not speak against FP8: emulated, `auto` scores no less than the canonical file
beyond what three seeds show, on three data sets (docs/gpus.md, accuracy of the forms). For a network of one's own
`build --data` measures it, and takes `qdq` where the accuracy is not shown to be kept.
"""

from __future__ import annotations

import math

from fp4deploy.export.lowering.fp8 import can_be_fp8
from fp4deploy.export.lowering.gemm import geometry
from fp4deploy.export.lowering.pattern import Fp4Layer
from fp4deploy.peaks import Gpu, find_gpu
from fp4deploy.timing.library import library_time

GPU = "sm120"
REASON = "no FP4 convolution in TensorRT: an FP8 one, {ratio:.1f} times as fast as FP16 by the time model, not measured"


def prefers_fp8(layer: Fp4Layer) -> str | None:
    """Why a convolution of one group becomes FP8, None where it stays FP16 or its shape is not known."""
    plan = geometry(layer)
    if plan is None or layer.shape is None or not can_be_fp8(layer):
        return None
    pixels = math.prod(plan.size)
    weights = layer.out_channels * layer.shape[0] * math.prod(layer.kernel)
    half, eight = seconds(find_gpu(GPU), math.prod(layer.shape), weights, layer.out_channels * pixels, pixels)
    return REASON.format(ratio=half / eight) if eight < half else None


def seconds(gpu: Gpu, read: int, weights: int, written: int, pixels: int) -> tuple[float, float]:
    """Projected seconds of the FP16 and of the FP8 form.

    Args:
        read, weights, written: elements of X, W and Y. pixels: of the output.
    """
    outputs = written / pixels
    product = (pixels, outputs, weights / outputs)
    half = library_time("FP16", *product, 6 * read + (0.5625 + 4) * weights + 2 * written, gpu)
    return half.ms / 1e3, library_time("FP8", *product, 4 * read + weights + 2 * written, gpu).ms / 1e3
