"""Forward passes of calibration (on a GPU in autocast, as in deployment, FP32 on a CPU); the output of one module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

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


def autocast(x: Tensor) -> torch.autocast:
    """The precision of a forward pass on the device of `x`."""
    return deployed_rest().autocast(x.device.type)


class _Stop(BaseException):
    """The module has run; the rest of the network need not."""


@torch.no_grad()
def call_of(model: nn.Module, name: str, batch: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments and output of the module `name` in a forward pass of the model, which ends there."""
    found: list[tuple[tuple[Any, ...], Tensor]] = []

    def take(_module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
        found.append((inputs, output))
        raise _Stop

    handle = model.get_submodule(name).register_forward_hook(take)
    try:
        with autocast(batch):
            model(batch)
    except _Stop:
        pass
    finally:
        handle.remove()
    return found[0]


@torch.no_grad()
def order_of(model: nn.Module, names: list[str], batch: Tensor) -> list[str]:
    """`names` of modules in the order in which they run; those that do not run are left out."""
    found: list[str] = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, __, name=name: found.append(name))
        for name in names
    ]
    try:
        with autocast(batch):
            model(batch[:1])
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(found))
