"""Which layers are a single GEMM of their input, and which are convolutions over several taps.

    1x1 convolution of one group, Linear, ConvTranspose 2x2 with stride 2      a single GEMM: FP4 tensor cores take it
    every other convolution                                                   implicit GEMM over taps

TensorRT multiplies FP4 in MatMul only and has no FP4 convolution, so that the second kind runs in FP8 or FP16 there
unless im2col or a plugin makes it a GEMM. Recipes that mix FP8 and FP4 choose by this, and `export.lowering` by the
same rule.
"""

from __future__ import annotations

from torch import nn

from fp4deploy.graph.own_linear import weight_axis


def is_pointwise(layer: nn.Module) -> bool:
    """A 1x1 convolution of one group."""
    return isinstance(layer, nn.Conv2d) and layer.groups == 1 and tuple(layer.kernel_size) == (1, 1)


def is_upsampling(layer: nn.Module) -> bool:
    """A ConvTranspose 2x2 with stride 2: every output pixel reads one tap."""
    return (
        isinstance(layer, nn.ConvTranspose2d)
        and (tuple(layer.kernel_size), tuple(layer.stride), tuple(layer.dilation)) == ((2, 2), (2, 2), (1, 1))
        and layer.groups == 1
        and not any(layer.padding)
        and not any(layer.output_padding)
    )


def is_single_gemm(layer: nn.Module) -> bool:
    """Whether FP4 tensor cores compute the layer without im2col."""
    linear = isinstance(layer, nn.Linear) or weight_axis(layer) is not None
    return linear or is_pointwise(layer) or is_upsampling(layer)
