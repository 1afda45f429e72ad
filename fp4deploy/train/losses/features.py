"""Distillation of features: the outputs of every layer that multiplies, compared with those of the teacher.

With s the output of a layer of the student and t that of the layer of the same name in the teacher, of one shape,

    loss  =  mean over layers of  |s - t|^2 / |t|^2

Each layer weighs the same, whatever its size. The outputs are those of convolutions and linear layers themselves,
before norms and activation functions: what the error of quantisation is added to. A teacher that quantises nothing
gives each layer of the student a target of its own, where the divergence of the logits reaches early layers through
all others alone.

Source: Romero et al., "FitNets: Hints for Thin Deep Nets", 2015. Comparing every layer, and relative to the teacher's
output, is this project's choice.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.graph.costs import MULTIPLYING


class Features:
    """What the layers of two networks give in one step: the student runs first, then the teacher."""

    def __init__(self, student: nn.Module, teacher: nn.Module) -> None:
        """Watch the layers that both have, by hooks; no other forward than those of `loss` is noticed."""
        self._own: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._terms: list[torch.Tensor] = []
        own, taught = (
            {name: layer for name, layer in model.named_modules() if isinstance(layer, MULTIPLYING)}
            for model in (student, teacher)
        )
        for name in own.keys() & taught.keys():
            own[name].register_forward_hook(lambda layer, _, output, name=name: self._note(layer, name, output))
            taught[name].register_forward_hook(lambda _layer, _, output, name=name: self._compare(name, output))

    def _note(self, layer: nn.Module, name: str, output: torch.Tensor) -> None:
        if layer.training:
            self._own[name].append(output)

    def _compare(self, name: str, output: torch.Tensor) -> None:
        own = self._own[name].pop(0) if self._own[name] else None  # a layer that is called twice gives two
        if own is not None and own.shape == output.shape:
            with torch.enable_grad():  # the teacher runs without
                self._terms.append(distance(own, output))

    def loss(self) -> torch.Tensor:
        """The loss of the two forwards before it, a scalar; what they left is forgotten.

        Raises:
            InputError: the two have no layer in common.
        """
        terms, self._terms = self._terms, []
        self._own.clear()
        if not terms:
            raise InputError(
                "No layer of the teacher has the name and the shape of output of one of this network, so that "
                "distill.features compares nothing. Give a teacher of this network, or --set distill.features=0."
            )
        return torch.stack(terms).mean()


def distance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """|output - target|^2 / |target|^2 in FP32, of tensors of one shape; 0 where the target is 0."""
    with torch.autocast(output.device.type, enabled=False):
        error = (output.float() - target.detach().float()).square().sum()
        size = target.detach().float().square().sum()
    return torch.where(size > 0, error / size.clamp(min=1e-30), 0.0)
