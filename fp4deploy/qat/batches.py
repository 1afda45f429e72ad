"""Batches as a caller has them: tensors, dicts of arguments, or samples of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from fp4deploy.errors import InputError

Arguments = Sequence[Any] | Mapping[str, Any]  # of a forward


def batches_of(batches: Any) -> Iterable[object]:
    """One batch, a tensor or a dict of arguments, as the only one of several; several as they are."""
    return [batches] if isinstance(batches, torch.Tensor | Mapping) else batches


def arguments_of(model: nn.Module, batch: object) -> Arguments:
    """The arguments of the forward among the elements of a batch.

    Of a tuple or a list, such as (images, labels), the first elements: as many as the forward needs. A dict, or a first
    element that is a tuple, holds all arguments.

    Raises:
        InputError: there are fewer elements than the forward needs.
    """
    if isinstance(batch, Mapping):
        return dict(batch)  # of a tokenizer it is a class of its own, which torch does not look into
    if not isinstance(batch, tuple | list):
        batch = (batch,)
    elif batch and isinstance(batch[0], tuple | list | Mapping):
        return batch[0]
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    inner = getattr(model, "_orig_mod", getattr(model, "module", model))  # of torch.compile, of DataParallel
    arguments = signature(inner.forward).parameters.values()
    needed = [each.name for each in arguments if each.kind in positional and each.default is Parameter.empty]
    if len(batch) < max(1, len(needed)):
        raise InputError(
            f"The forward of {type(inner).__name__} needs {', '.join(needed)}; elements of the batch: {len(batch)}."
        )
    return batch[: max(1, len(needed))]


def run(model: nn.Module, batch: object) -> Any:
    """What a network gives for a batch."""
    return applied(model, arguments_of(model, batch))


def applied(model: nn.Module, arguments: torch.Tensor | Arguments) -> object:
    """What a module gives for one tensor, several, or a dict by the names of its arguments."""
    if isinstance(arguments, torch.Tensor):
        return model(arguments)
    return model(**arguments) if isinstance(arguments, Mapping) else model(*arguments)


def first_tensor(batch: object) -> torch.Tensor:
    """The first of a batch's tensors, which says device and number of samples.

    Raises:
        InputError: it holds none.
    """
    found = next((each for each in _leaves(batch) if isinstance(each, torch.Tensor)), None)
    if found is None:
        raise InputError(f"A batch holds no tensor but {type(batch).__name__}. Give tensors, or dicts of them.")
    return found


def _leaves(batch: object) -> Iterator[object]:
    """What a batch holds, also in mappings that torch does not know, as of a tokenizer."""
    for each in tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch):
        if isinstance(each, Mapping):
            yield from _leaves(each)
        else:
            yield each
