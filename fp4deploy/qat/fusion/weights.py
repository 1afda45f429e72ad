"""The weights of all layers in two launches, where their recipe is the plain one.

A quantiser a layer costs three launches for a tensor that a GPU reads in a microsecond. `fake_quantize_weights` takes a
table of all of them, and writes the dtype that the convolutions read.
"""

from __future__ import annotations

import torch

from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.plugins import available
from fp4deploy.plugins.quantize.weights import fake_quantize_weights, weight_fits
from fp4deploy.qat.fusion import traced


@torch.compiler.allow_in_graph
def quantize_together(axes: tuple[int, ...], *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fake-quantise every weight along its contraction axis with its own amax, straight through.

    Returns:
        Under autocast the weights in its dtype, otherwise in their own.
    """
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        result: tuple[torch.Tensor, ...] = _QuantizeWeights.apply(axes, dtype, *weights)
        return result
    pairs = zip(weights, axes, strict=True)
    return tuple(traced.quantize_weight(weight, "1d", (axis, axis), (1, 1), None) for weight, axis in pairs)


def can_collect(
    weight: torch.Tensor, block: str, axes: tuple[int, int], groups: tuple[int, int], four_over_six: traced.Choice
) -> bool:
    """The kernels for many weights take this one: on a GPU, plain 1-D blocks, none of which crosses a group."""
    plain = block == "1d" and four_over_six is None and weight.is_cuda and weight_fits(weight)
    whole = groups[-1] == 1 or weight.shape[axes[-1]] // groups[-1] % NVFP4_BLOCK == 0
    return plain and whole and available(weight.device)


class _QuantizeWeights(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: object, axes: tuple[int, ...], dtype: torch.dtype, *weights: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return fake_quantize_weights(weights, axes, dtype)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, *(gradient.float() for gradient in gradients)
