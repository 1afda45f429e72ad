"""What a layer costs in FP4 and in FP16: bytes of its weights, and a lower bound of its time.

The time is the roofline, max(operations / peak, bytes / bandwidth), with published peaks: a projection, not a
measurement. FP4 tensor cores count only where the engine multiplies in FP4 (`lowering.forecast`): with TensorRT-RTX's
default form a 3x3 convolution of FP4 weights runs in FP16, and FP4 saves the bytes of its weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.formats import NVFP4_BLOCK

FP16, FP4 = 2.0, 4.5 / 8  # bytes an element; FP4 with its block scales
LABEL = "projected: roofline of published peaks"


@dataclass(frozen=True)
class Gpu:
    """Published peaks: TFLOP/s dense with FP32 accumulation, and TB/s. `fp4` is None where tensor cores have no FP4."""

    name: str
    arch: str
    fp4: float | None
    fp16: float
    bandwidth: float
    source: str


GPUS = (
    Gpu("B200", "sm_100", 9000.0, 2250.0, 8.0, "NVIDIA Blackwell Architecture Technical Brief, HGX B200"),
    Gpu("RTX 5090", "sm_120", 1676.0, 209.5, 1.792, "NVIDIA RTX Blackwell GPU Architecture whitepaper, appendix A"),
    Gpu("H200", "sm_90", None, 989.5, 4.8, "NVIDIA H200 Tensor Core GPU datasheet, half of the sparse figure"),
)


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes of its weights, and milliseconds for one image, in FP4 and in FP16."""

    bytes_fp4: float
    bytes_fp16: float
    ms_fp4: float
    ms_fp16: float


def find_gpu(arch: str) -> Gpu:
    """The GPU whose peaks stand for an architecture.

    Raises:
        InputError: none is known for it.
    """
    wanted = arch.lower().replace("sm", "sm_").replace("__", "_")
    found = next((gpu for gpu in GPUS if gpu.arch == wanted), None)
    if found is None:
        valid = ", ".join(gpu.arch.replace("_", "") for gpu in GPUS)
        raise InputError(f"--arch {arch}: no published peaks are known for it. Valid: {valid}.")
    return found


@torch.no_grad()
def layer_costs(
    model: nn.Module, names: Mapping[str, nn.Module], image: torch.Tensor, gpu: Gpu, conv: str
) -> dict[str, LayerCost]:
    """Cost of each named layer for one image [1, C, H, W]; `conv` as of `fp4deploy build`."""
    seen: dict[str, tuple[int, int, int]] = {}

    def watch(name: str) -> Any:
        def hook(layer: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            seen[name] = (inputs[0].numel(), output.numel(), _macs(layer, inputs[0], output))

        return hook

    handles = [layer.register_forward_hook(watch(name)) for name, layer in names.items()]
    try:
        model(image[:1])
    finally:
        for handle in handles:
            handle.remove()
    return {name: _cost(names[name], *counts, gpu, conv) for name, counts in seen.items()}


def _macs(layer: Any, x: torch.Tensor, y: torch.Tensor) -> int:
    weight = layer.weight
    if isinstance(layer, nn.Linear):
        return y.numel() * weight.shape[1]
    if isinstance(layer, nn.ConvTranspose2d):
        return x.numel() * weight[0].numel()
    return y.numel() * weight[0].numel()


def _cost(layer: Any, read: int, written: int, macs: int, gpu: Gpu, conv: str) -> LayerCost:
    weight = layer.weight
    axis = 0 if isinstance(layer, nn.ConvTranspose2d) else 1
    padded = weight.numel() // weight.shape[axis] * (weight.shape[axis] + -weight.shape[axis] % NVFP4_BLOCK)
    packed, plain = FP4 * padded + 4, FP16 * weight.numel()
    native = forecast(layer, conv).compute == "FP4" and gpu.fp4 is not None
    peak = gpu.fp4 if native and gpu.fp4 is not None else gpu.fp16

    def milliseconds(tflops: float, count: float) -> float:
        return 1e3 * max(2 * macs / (tflops * 1e12), count / (gpu.bandwidth * 1e12))

    moved = FP4 * read if native else FP16 * read
    return LayerCost(
        packed,
        plain,
        milliseconds(peak, packed + moved + FP16 * written),
        milliseconds(gpu.fp16, plain + FP16 * (read + written)),
    )
