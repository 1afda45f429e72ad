"""Marks for torch.compile that do not import torch._dynamo, which takes two seconds of every process, and traces that
make no folder for it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import torch
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., object])


def constant_when_compiled(function: _Function) -> _Function:
    """As `torch.compiler.assume_constant_result`."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def not_compiled(function: _Function) -> _Function:
    """As `torch.compiler.disable`, which the first call applies: torch marks its own optimisers in this way."""
    return _disable_dynamo(function)  # type: ignore[return-value]


_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@cache
def make_no_folder() -> None:
    """Before torch.export, make_fx, a dispatch mode or an optimizer: let them make no folder for torch.compile, which
    they do not use.

    They import torch._dynamo and torch's tool for the bisection of compilers, which look for their state as they are
    imported: they make
    `torchinductor_USER` in the temporary folder, where another user may have taken the name, and set the environment
    variable, so that torch.compile would keep its shared libraries there later. They look in torch's own folder
    instead, where nobody bisects.
    """
    chosen = os.environ.get(_FOLDER)
    os.environ[_FOLDER] = str(Path(torch.__file__).parent)
    try:
        import_module("torch._dynamo")
        import_module("torch._inductor.compiler_bisector")
    finally:
        del os.environ[_FOLDER]
        if chosen is not None:
            os.environ[_FOLDER] = chosen


class DispatchMode(TorchDispatchMode):
    """torch's, whose first call imports torch._dynamo: it makes no folder either."""

    def __enter__(self) -> DispatchMode:
        make_no_folder()
        super().__enter__()
        return self
