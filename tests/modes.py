"""In which mode modules run: what only looks at a network must not drop out, move statistics or record gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook


class Mode(NamedTuple):
    """training: of a module whose forward runs; gradients: are recorded for what it reads or holds."""

    training: bool
    gradients: bool


LOOKS, LEARNS = Mode(training=False, gradients=False), Mode(training=True, gradients=True)


@contextmanager
def modes(*kinds: type[nn.Module]) -> Iterator[set[Mode]]:
    """The modes in which modules of some kinds, by default any, run inside on data: a tracing has none."""
    seen: set[Mode] = set()

    def look(module: nn.Module, given: tuple[Any, ...]) -> None:
        tensors = [each for each in given if isinstance(each, torch.Tensor)]
        if isinstance(module, kinds or nn.Module) and all(
            type(x) is torch.Tensor and x.device.type != "meta" for x in tensors
        ):
            held = any(each.requires_grad for each in (*tensors, *module.parameters()))
            seen.add(Mode(module.training, torch.is_grad_enabled() and held))

    handle = register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()
