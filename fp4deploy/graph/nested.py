"""Dicts among the arguments of a network, as inputs of a file, which are tensors.

unet(sample=x, timestep=t, added_cond_kwargs={"text_embeds": e, "time_ids": i})          SDXL, of diffusers
inputs of its file: sample, timestep, added_cond_kwargs_text_embeds, added_cond_kwargs_time_ids
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from inspect import Parameter, Signature
from typing import Any, TypeVar

from torch import nn

Module = TypeVar("Module", bound=nn.Module)


def flat_inputs(inputs: object) -> Any:
    """Inputs whose dicts within a dict are tensors of their own, named NAME_KEY; others as they are.

    >>> flat_inputs({"x": 1, "more": {"y": 2}})
    {'x': 1, 'more_y': 2}
    """
    found: dict[str, Any] = {}
    for name, given in inputs.items() if isinstance(inputs, Mapping) else ():
        found |= {f"{name}_{key}": x for key, x in given.items()} if isinstance(given, Mapping) else {name: given}
    return found or inputs


def taking_flat_inputs(model: Module, inputs: object) -> Module:
    """A module that takes `flat_inputs(inputs)` by name; it shares all else with `model`, or is it."""
    if not isinstance(inputs, Mapping) or not any(isinstance(given, Mapping) for given in inputs.values()):
        return model
    keys = {name: [*given] if isinstance(given, Mapping) else None for name, given in inputs.items()}

    def forward(self: nn.Module, **flat: object) -> object:
        inner = {f"{name}_{key}" for name, each in keys.items() for key in each or ()}
        nested = {name: {key: flat[f"{name}_{key}"] for key in each} for name, each in keys.items() if each is not None}
        return type(self).forward(self, **nested, **{name: x for name, x in flat.items() if name not in inner})

    own = [Parameter("self", Parameter.POSITIONAL_ONLY)]
    read = [Parameter(name, Parameter.KEYWORD_ONLY) for name in flat_inputs(inputs)]
    forward.__signature__ = Signature([*own, *read])  # type: ignore[attr-defined]  # which torch.export reads
    taken = copy.copy(model)
    taken.forward = types.MethodType(forward, taken)
    return taken
