"""Bias and norm correction: what quantisation shifts in every channel is put back where it costs nothing.

Bias. The mean of a channel's output moves by E[y - y']; a layer's bias takes it back, exactly on the images seen.

Norm. After a normalisation the channel has an affine map of its own, y = w n + b. The pair (w, b) that brings the
quantised network's y' closest to y in squared error is the linear regression of y on y':

    slope = cov(y, y') / var(y')      w <- slope w      b <- slope (b - mean(y')) + mean(y)

It takes back a shift and a scale, and where noise was added it shrinks, as the best linear estimate does.

Layers are corrected in the order in which they run, each with those before it corrected.

Sources: Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019 (bias, by data);
Finkelstein et al., "Fighting Quantization Bias With Bias", 2019; Li et al., "Norm Tweaking: High-Performance Low-Bit
Quantization of Large Language Models", 2023 (norms; the regression is this project's).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fp4deploy.ptq.forward import call_of, order_of
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.qat.plan import NORMS, channel_axis

if TYPE_CHECKING:
    from fp4deploy.system.progress import Phase

CHOICES = ("none", "bias", "norm", "both")
MIN_SLOPE, MAX_SLOPE = 0.5, 2.0  # of a slope: beyond that the channel carries nothing to scale


@torch.no_grad()
def correct(
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[object],
    choice: str,
    progress: Phase = lambda phase, done, of: None,
) -> list[str]:
    """Correct a quantised model towards its full-precision `reference`, in place.

    Returns:
        Names of the layers that were corrected, in the order in which they run.
    """
    if choice == "none":
        return []
    wanted = [name for name, layer in model.named_modules() if _kind(layer) in _kinds(choice)]
    names = order_of(model, wanted, batches[0])
    for number, name in enumerate(names):
        progress("correction of the layers", number, len(names))
        mean, other_mean, variance, covariance = _moments(model, reference, name, batches)
        layer: Any = model.get_submodule(name)
        if _kind(layer) == "bias":
            layer.bias.add_((mean - other_mean).to(layer.bias.dtype))
            continue
        slope = (covariance / variance.clamp(min=1e-12)).clamp(MIN_SLOPE, MAX_SLOPE)
        slope = torch.where(variance > 1e-12, slope, 1.0).to(layer.weight.dtype)
        layer.weight.mul_(slope)
        layer.bias.copy_(slope * (layer.bias - other_mean) + mean)
    return names


def _kinds(choice: str) -> tuple[str, ...]:
    return ("bias", "norm") if choice == "both" else (choice,)


def _kind(layer: object) -> str:
    if isinstance(layer, QuantizedLayer) and layer.bias is not None:
        return "bias"
    affine = isinstance(layer, NORMS) and getattr(layer, "weight", None) is not None
    return "norm" if affine and getattr(layer, "bias", None) is not None else ""


def _moments(
    model: nn.Module, reference: nn.Module, name: str, batches: Sequence[object]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(mean of y, mean of y', variance of y', covariance) of each channel, float32 [C]."""
    sums: list[Tensor] = []
    layer = model.get_submodule(name)
    for batch in batches:
        y, other = (_channels(call_of(each, name, batch).outputs[0], layer) for each in (reference, model))
        sums.append(torch.stack([y.mean(1), other.mean(1), other.square().mean(1), (y * other).mean(1)]))
    mean, other_mean, square, product = torch.stack(sums).mean(0).unbind()
    moments = (mean, other_mean, square - other_mean.square(), product - mean * other_mean)
    return tuple(each.float() for each in moments)  # type: ignore[return-value]


def _channels(y: Tensor, layer: nn.Module) -> Tensor:
    """[C, everything else], float64 sums being too slow on a GPU: float32."""
    return y.float().movedim(channel_axis(layer, y), 0).flatten(1)
