"""LayerNorm, of a sum where there is one, and its NVFP4 values as one operator: what a kernel does in one pass.

total, y, q = layer_norm_values(x, other, weight, bias, scale, eps, plain)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fp4deploy.fusion.values import Scale, elementary_values
from fp4deploy.plugins.quantize import layer_norm
from fp4deploy.plugins.runtime.torch_library import operator

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def layer_norm_values(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: Scale,
    eps: float,
    plain: bool,
) -> Results:
    """(x + other, its LayerNorm over the last axis, the NVFP4 values of that), each rounded to the dtype of `x`.

    Args:
        x, other: [..., C] of one dtype.
        weight, bias: float32 [C].
        scale: of the values, as of `fusion.values`.
        plain: whether the second result is asked for; else it is of no elements. So is the first without `other`.
    """
    function = torch.ops.fp4deploy.layer_norm_values
    found: Results = function(x, other, weight, bias, scale.sixth, scale.encode, scale.amax, eps, scale.exponent, plain)
    return found


def _fake_layer_norm_values(x, other, *rest):  # type: ignore[no-untyped-def]
    like = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    none = x.new_empty(0)
    return none if other is None else like, torch.empty_like(like) if rest[-1] else none.clone(), torch.empty_like(like)


@operator(
    "layer_norm_values(Tensor x, Tensor? other, Tensor? weight, Tensor? bias, Tensor sixth, Tensor encode, Tensor amax,"
    " float eps, int? exponent, bool plain) -> (Tensor, Tensor, Tensor)",
    _fake_layer_norm_values,
    "CompositeExplicitAutograd",
)
def _layer_norm_values(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    sixth: torch.Tensor,
    encode: torch.Tensor,
    amax: torch.Tensor,
    eps: float,
    exponent: int | None,
    plain: bool,
) -> Results:
    none = x.new_empty(0)
    if layer_norm.supports(x.shape[-1], x.dtype, x.device):
        unit = 0.0 if exponent is None else 2.0**exponent
        added = None if other is None else other.contiguous()
        with layer_norm.fallback.guard(x.device):
            total, y, q = layer_norm.layer_norm(x.contiguous(), added, weight, bias, amax, eps, unit, plain)
            return none if other is None else total, y, q
    total = x if other is None else x + other
    y = F.layer_norm(total.to(torch.float32), x.shape[-1:], weight, bias, eps).to(x.dtype)
    q = elementary_values(y, sixth, encode, amax, -1, exponent, x.dtype)
    return none if other is None else total.contiguous(), y.contiguous() if plain else none.clone(), q.contiguous()
