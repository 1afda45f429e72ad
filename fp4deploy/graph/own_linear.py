"""Linear layers of classes outside torch, by what they compute: x W^T + b, or x W + b with a weight [in, out].

    class Conv1D(nn.Module):                                        of transformers, in GPT-2
        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], self.nf)

A class is tried once for each shape, on small whole numbers. `qat.computed` has its quantised class, and `capture`
reads it as one linear node.
"""

from __future__ import annotations

import types
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.graph.copies import copied

ROWS = 3


def weight_axis(layer: nn.Module) -> int | None:
    """The axis of input channels in the weight of a layer that is linear and no `nn.Linear`; None of any other.

    >>> class Transposed(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.weight = nn.Parameter(torch.ones(32, 16))
    ...
    ...     def forward(self, x):
    ...         return x @ self.weight
    >>> weight_axis(Transposed()), weight_axis(nn.Embedding(4, 16))
    (0, None)
    """
    own = {name for name, each in layer._parameters.items() if each is not None}
    weight = layer._parameters.get("weight")
    if own - {"bias"} != {"weight"} or cast(Any, weight).ndim != 2 or layer._modules or layer._buffers:
        return None
    if type(layer).__module__.startswith("torch.") or not cast(Any, weight).is_floating_point():
        return None
    bias = layer._parameters.get("bias")
    settings = {
        name: each for name, each in vars(layer).items() if name not in _OF_EVERY_MODULE
    }  # forward may read them
    key = (type(layer), tuple(cast(Any, weight).shape), None if bias is None else tuple(bias.shape), str(settings))
    plain = all(isinstance(each, bool | int | float | str | None | torch.dtype) for each in settings.values())
    if plain and key in _TRIED:
        return _TRIED[key]
    with torch.device("cpu"):  # a library may be making the network without data, on the device "meta"
        axis = _tried(layer)
    if plain:
        _TRIED[key] = axis
    return axis


_TRIED: dict[tuple[object, ...], int | None] = {}  # of each class, shape and settings: what its forward computes
_OF_EVERY_MODULE = vars(nn.Module()).keys()


@torch.no_grad()
def _tried(layer: nn.Module) -> int | None:
    try:
        trial = copied(layer)
    except Exception:  # anyone's code
        return None
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:  # small whole ones: their sums are exact
        return torch.randint(-2, 3, shape, generator=generator).float()

    given = {name: numbers(*each.shape) for name, each in trial._parameters.items() if each is not None}
    trial._parameters.update({name: nn.Parameter(each, False) for name, each in given.items()})
    for axis in range(2):
        weight = given["weight"].movedim(axis, -1)
        x = numbers(1, ROWS, weight.shape[1])
        try:
            wanted = nn.functional.linear(x, weight, given.get("bias"))
            if all(torch.equal(trial.train(training)(x), wanted) for training in (True, False)):
                return axis
        except Exception:  # an input of other channels; anyone's code
            continue
    return None


def call_linear(model: nn.Module) -> None:
    """Let such layers call F.linear, in place, so that a trace has that operator."""
    for layer in model.modules():
        if (axis := weight_axis(layer)) is not None:
            layer.forward = types.MethodType(_forwards[axis], layer)


def _channels_first(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight.T, self._parameters.get("bias"))


def _channels_last(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return nn.functional.linear(x, self.weight, self._parameters.get("bias"))


_forwards = (_channels_first, _channels_last)  # by the axis of input channels
