"""Forward passes of calibration (FP16 autocast on a GPU as in deployment, FP32 on a CPU); the output of one module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp4deploy.errors import InputError


def autocast(x: Tensor) -> torch.autocast:
    """The precision of a forward pass on the device of `x`."""
    return torch.autocast(x.device.type, dtype=torch.float16, enabled=x.device.type == "cuda")


class _Stop(BaseException):
    """The module has run; the rest of the network need not. No network's `except Exception` is meant by it."""


@torch.no_grad()
def call_of(model: nn.Module, name: str, batch: Tensor) -> tuple[tuple[Any, ...], Tensor]:
    """Arguments and output of the module `name` in a forward pass of the model, which ends there.

    A network that catches everything may go on after the signal, or end with an error of its own: what was asked for
    is there, and an error after it came of the signal.

    Raises:
        InputError: the forward pass does not call the module.
    """
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
    except Exception:
        if not found:
            raise
    finally:
        handle.remove()
    if not found:
        raise InputError(f"The forward pass of images {list(batch.shape)} does not call {name or 'the network'}.")
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
