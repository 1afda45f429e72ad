"""Layers that read a plain activation and quantise it themselves: W4A8, FP8 and INT8.

`gather_gemm` multiplies the codes of W4A8 and FP8. Where it does not, operands are decoded to FP32 numbers that TF32
holds exactly, so that a GPU may multiply them in TF32: elements of MXFP4 and MXFP8 with the powers of two of their
blocks, of weights when the network is opened; of FP8 and INT8 the codes by themselves, in each call, whose sum is
multiplied with both scales. Sums are FP32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp4deploy.formats import (
    EIGHT_BITS,
    EightBitTensor,
    Mxfp4Tensor,
    Mxfp8Tensor,
    fake_quantize_mxfp8,
    fp8_scale,
    quantize_mxfp8,
)
from fp4deploy.formats.fp8 import quantize_fp8_by
from fp4deploy.packed.graph import Layer, Linear
from fp4deploy.packed.operators import convolve
from fp4deploy.packed.shapes import weight_order
from fp4deploy.plugins.gemm.training import whole_blocks


@dataclass(frozen=True)
class OwnWeight:
    """The weight of such a layer.

    values: with torch's axes, float32, or of FP8 and INT8 the codes. scales: their float32 [O]. amax: of their input.
    """

    values: torch.Tensor
    scales: torch.Tensor | None = None
    amax: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


@dataclass(frozen=True)
class KernelWeight:
    """The weight of such a layer as `gather_gemm` reads it, [O, KH, KW, C]; scale: of the layer's input, in FP8."""

    values: Mxfp4Tensor | EightBitTensor
    scale: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        scales = self.values.scales if isinstance(self.values, Mxfp4Tensor) else self.values.scale
        return self.values.codes.nbytes + scales.nbytes

    def quantized(self, x: torch.Tensor) -> Mxfp8Tensor | EightBitTensor:
        """What the weight is multiplied with; x: [N, H, W, C]."""
        if self.scale is None:
            return quantize_mxfp8(x.float())
        return whole_blocks(quantize_fp8_by(x, self.scale))


def own_weight(node: Layer, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> OwnWeight:
    """From the file's tensors of a layer; shape: of the weight there, [O, KH, KW, C] or [O, C]."""
    if node.precision in EIGHT_BITS:
        codes, scales, amax = parts
        return OwnWeight(codes.permute(weight_order(node, codes.ndim)), scales, amax)
    codes, scales = parts
    values = Mxfp4Tensor(codes, scales, torch.Size(shape)).dequantize()
    return OwnWeight(values.permute(weight_order(node, values.ndim)))


def kernel_weight(node: Layer, parts: Sequence[torch.Tensor], shape: Sequence[int]) -> KernelWeight:
    """As `own_weight`, for the kernel."""
    window = (1, 1) if isinstance(node, Linear) else ()
    outputs, *rest = shape
    codes, scales, *amax = parts
    codes = codes.view(outputs, *window, *codes.shape[1:])
    if amax:
        return KernelWeight(whole_blocks(EightBitTensor(codes, scales.float())), fp8_scale(amax[0]))
    scales = scales.view(outputs, *window, *scales.shape[1:])
    return KernelWeight(Mxfp4Tensor(codes, scales, torch.Size((outputs, *window, *rest))))


def multiply(node: Layer, inputs: list[torch.Tensor], weight: OwnWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """The layer's output, float32, of plain inputs with torch's axes and of a bias [O]."""
    bias = None if bias is None else bias.float()
    if weight.scales is None or weight.amax is None:
        axis = -1 if isinstance(node, Linear) else 1
        return convolve(node, [fake_quantize_mxfp8(x.float(), axis) for x in inputs], weight.values, bias)
    quantize, relu = EIGHT_BITS[node.precision].quantize, getattr(node, "relu", False)
    given = [quantize(x, amax=weight.amax) for x in inputs]
    plain = node.model_copy(update={"relu": False}) if relu else node
    total = convolve(plain, [each.codes.float() for each in given], weight.values.float(), None)
    channels = (-1,) if isinstance(node, Linear) else (-1, *(1,) * (total.ndim - 2))
    outputs = total.shape[-1 if isinstance(node, Linear) else 1]
    scales = weight.scales.repeat(outputs // len(weight.scales))  # a transposed convolution's are those of every group
    y = total.mul_((given[0].scale * scales).view(channels))
    y = y if bias is None else y.add_(bias.view(channels))
    return y.relu_() if relu else y
