"""Forward passes of calibration (on a GPU in autocast, as in deployment, FP32 on a CPU); the calls of one module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fp4deploy.errors import InputError
from fp4deploy.qat.batches import first_tensor, run
from fp4deploy.rest import FP16, Rest

_rest: ContextVar[Rest] = ContextVar("rest", default=FP16)


@contextmanager
def deployed_in(rest: Rest) -> Iterator[None]:
    """Inside, forward passes are those of a network whose rest is this; FP16 outside."""
    token = _rest.set(rest)
    try:
        yield
    finally:
        _rest.reset(token)


def deployed_rest() -> Rest:
    """What the network will be deployed in."""
    return _rest.get()


def autocast(batch: object) -> torch.autocast:
    """The precision of a forward pass on the device of a batch."""
    return deployed_rest().autocast(first_tensor(batch).device.type)


class _Stop(BaseException):
    """The module has run; the rest of the network need not. No network's `except Exception` is meant by it."""


@dataclass(frozen=True)
class Call:
    """One call of a module: its arguments as they were before it ran, and the tensors of its output."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    outputs: list[Tensor]

    def again(self, module: nn.Module) -> list[Tensor]:
        """The outputs of another call with these arguments, which it may change in place."""
        arguments, keywords = _cloned((self.arguments, self.keywords))
        return floats(module(*arguments, **keywords))


@torch.no_grad()
def call_of(model: nn.Module, name: str, batch: object) -> Call:
    """The first call of the module `name` in a forward pass of the model, which ends there.

    A network that catches everything may go on after the signal, or end with an error of its own: what was asked for
    is there, and an error after it came of the signal.

    Raises:
        InputError: the forward pass does not call the module.
    """
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    found: list[Call] = []

    def enter(_module: nn.Module, inputs: tuple[object, ...], keywords: dict[str, object]) -> None:
        arguments.append(_cloned((inputs, keywords)))

    def leave(_module: nn.Module, _inputs: object, output: object) -> None:
        found.append(Call(*arguments[0], floats(output)))
        raise _Stop

    module = model.get_submodule(name)
    handles = [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        with autocast(batch):
            run(model, batch)
    except _Stop:
        pass
    except Exception:
        if not found:
            raise
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        shape = list(first_tensor(batch).shape)
        raise InputError(f"The forward pass of inputs {shape} does not call {name or 'the network'}.")
    return found[0]


def floats(output: object) -> list[Tensor]:
    """The tensors of floating point in what a module returns: a tensor, or any nest of dicts, tuples and lists."""
    return [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]


def _cloned(value: object) -> Any:
    return tree_map(lambda each: each.clone() if isinstance(each, Tensor) else each, value)


@torch.no_grad()
def order_of(model: nn.Module, names: list[str], batch: object) -> list[str]:
    """`names` of modules in the order in which they run; those that do not run are left out."""
    found: list[str] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, __, name=name: found.append(name))
        for name in names
    ]
    try:
        with autocast(batch):
            run(model, tree_map(lambda each: each[:1] if isinstance(each, Tensor) else each, batch))
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))
