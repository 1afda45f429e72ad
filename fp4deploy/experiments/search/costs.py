"""What a layer costs in FP4, FP8 and FP16: bytes of its weights, and a lower bound of its time.

The time is the roofline of `peaks`: a projection, not a measurement. FP4 tensor cores count only where the engine
multiplies in FP4 (`lowering.forecast`): in TensorRT-RTX's default form a 3x3 convolution of FP4 weights is multiplied
in FP8, and FP4 saves bytes in the file alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp4deploy.export.lowering.forecast import forecast
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.peaks import Gpu

FP16, FP8, FP4 = 2.0, 1.0, 4.5 / 8  # bytes an element; FP4 with its block scales
MOVED = {"FP16": FP16, "FP8": FP8, "FP4": FP4}
LABEL = "projected: roofline of published peaks"


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes of its weights, and milliseconds for one image, in FP4, FP8 and FP16."""

    bytes_fp4: float
    bytes_fp8: float
    bytes_fp16: float
    ms_fp4: float
    ms_fp8: float
    ms_fp16: float

    def of(self, precision: str, kind: str) -> float:
        """Bytes or ms (`kind`) in "FP4", "FP8" or "FP16"."""
        found: float = getattr(self, f"{kind}_{precision.lower()}")
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
    packed, eight, plain = FP4 * padded + 4, FP8 * weight.numel() + 2 * weight.shape[1 - axis], FP16 * weight.numel()
    compute = forecast(layer, conv).compute
    if compute == "FP4" and gpu.fp4 is None:
        compute = "FP16"

    def milliseconds(precision: str, stored: float) -> float:
        return 1e3 * gpu.seconds(precision, macs, stored + MOVED[precision] * read + FP16 * written)

    times = (milliseconds(compute, packed), milliseconds("FP8", eight), milliseconds("FP16", plain))
    return LayerCost(packed, eight, plain, *times)
