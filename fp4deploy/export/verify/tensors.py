"""Inputs and outputs of networks with one tensor or several: how they are called, fed to ONNX Runtime, and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fp4deploy.errors import InputError
from fp4deploy.export.verify.numbers import rest_numbers
from fp4deploy.graph.capture import Inputs
from fp4deploy.models.heads import Head, agreeing
from fp4deploy.rest import FP16, Rest

CLOSE = 0.01  # of the largest value, where an output has no classes to compare


def call(model: nn.Module, inputs: Inputs, rest: Rest = FP16) -> list[torch.Tensor]:
    """The outputs of a module, in order, for one tensor, several, or a dict by the names of its arguments.

    Numbers in its code are rounded to the rest's precision, as the file has them (`numbers`). It gets copies, since it
    may change its input in place, which others read as well.
    """
    with rest_numbers(model, rest):
        return leaves(applied(model, tree_map(torch.clone, inputs)))


def applied(model: nn.Module, inputs: Inputs) -> Any:
    """What a module gives for one tensor, several, or a dict by the names of its arguments."""
    if isinstance(inputs, torch.Tensor):
        return model(inputs)
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


def leaves(outputs: Any) -> list[torch.Tensor]:
    """The tensors of a tensor, tuple or dict, in order."""
    return list(tree_leaves(outputs))


def named(inputs: Inputs, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Inputs by the names of a graph's inputs.

    Raises:
        InputError: there are not as many, or a name is missing.
    """
    given = dict(inputs) if isinstance(inputs, Mapping) else None
    if given is None:
        tensors: list[Any] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
        given = dict(zip(names, tensors, strict=False)) if len(tensors) == len(names) else {}
    if set(given) != set(names):
        raise InputError(f"The file reads {', '.join(names)}. Give one tensor for each, or a dict by these names.")
    return given


def feed(inputs: Inputs, names: Sequence[str]) -> dict[str, NDArray[Any]]:
    """As `named`, as arrays."""
    return {name: tensor.detach().cpu().numpy().copy() for name, tensor in named(inputs, names).items()}


def same_outputs(
    expected: Sequence[torch.Tensor], given: Sequence[torch.Tensor], head: Head | None = None
) -> list[torch.Tensor]:
    """Where outputs mean the same, one tensor of bools each: the class of several channels (`heads.agreeing`), of whole
    numbers the value, and of one channel or none the value to a hundredth of the largest.
    """
    found = []
    for one, other in zip(expected, given, strict=True):
        classes = head is not None or (one.is_floating_point() and one.ndim > 1 and one.shape[1] > 1)
        found.append(agreeing(one, other, head) if classes else _close(one, other))
    return found


def largest_difference(expected: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> float:
    """The largest absolute difference of two values; NaN where one is."""
    apart = [float((one - other).abs().max()) for one, other in zip(expected, given, strict=True) if one.numel()]
    return float(np.max(apart)) if apart else 0.0


def _close(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if not one.is_floating_point():
        return one == other
    return (one - other).abs() <= CLOSE * one.abs().max().clamp(min=1e-30)
