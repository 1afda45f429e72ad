"""Inputs and outputs of networks with one tensor or several: how they are called, and fed to ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from fp4deploy.errors import InputError
from fp4deploy.export.verify.numbers import rest_numbers
from fp4deploy.graph.capture import Inputs
from fp4deploy.qat.batches import applied
from fp4deploy.rest import FP16, Rest


def call(model: nn.Module, inputs: Inputs, rest: Rest = FP16) -> list[torch.Tensor]:
    """The outputs of a module, in order, for one tensor, several, or a dict by the names of its arguments.

    Numbers in its code are rounded to the rest's precision, as the file has them (`numbers`). It gets copies, since it
    may change its input in place, which others read as well.
    """
    with rest_numbers(model, rest):
        return leaves(applied(model, tree_map(torch.clone, inputs)))


def floats(x: torch.Tensor) -> torch.Tensor:
    """Floating point numbers as float32; whole ones and bools as they are."""
    return x.float() if x.is_floating_point() else x


def leaves(outputs: object) -> list[torch.Tensor]:
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
