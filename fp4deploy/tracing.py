"""Marks for torch.compile that do not import torch._dynamo, which takes two seconds of every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._compile import _disable_dynamo

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_when_compiled(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: _Function) -> _Function:
    """As `torch.compiler.disable`, which the first call applies: torch marks its own optimisers in this way."""
    return _disable_dynamo(function)  # type: ignore[return-value]
