"""Functions of torch replaced for one thread: those that its exporters call, and those that a module calls.

torch's exporters take no argument for some of what they call. `unittest.mock.patch` would change it for the whole
process: other threads would call the replacement meanwhile, and two threads that replace one function would put each
other's back. Here a function that any thread replaces becomes a switch, which calls the thread's own replacement or
the original. What a module calls goes through a mode of torch (`Rewriting`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.overrides import TorchFunctionMode

Function = Callable[..., Any]
Table = Mapping[Any, Function]  # function -> handler(call, arguments of the function), which may `call` it
_switches: dict[tuple[Any, str], _Switch] = {}
_lock = threading.Lock()


class _Switch:
    """Stands in the place of `owner.name`; replacements: the calling thread's, the innermost one last."""

    def __init__(self, owner: object, name: str) -> None:
        self.original: Function = getattr(owner, name)
        self.descriptor = vars(owner)[name]  # of a class: its classmethod
        self.threads = 0
        self._own = threading.local()

    @property
    def replacements(self) -> list[Function]:
        own: list[Function] = self._own.__dict__.setdefault("replacements", [])
        return own

    @property
    def current(self) -> Function:
        return self.replacements[-1] if self.replacements else self.original

    def __call__(self, *arguments: object, **options: object) -> object:
        return self.current(*arguments, **options)


@contextmanager
def replaced(owner: object, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
    """Inside, the function `owner.name` is `make(function)` for this thread.

    Args:
        owner: a module, or a class whose function takes no instance.
        make: the replacement, of what was called before.

    >>> import math
    >>> with replaced(math, "floor", lambda floor: lambda x: floor(x) + 1):
    ...     math.floor(1.5)
    2
    >>> math.floor(1.5)
    1
    """
    key = (owner, name)
    with _lock:
        switch = _switches.get(key)
        if switch is None:
            switch = _switches[key] = _Switch(owner, name)
            setattr(owner, name, switch)
        switch.threads += 1
    try:
        switch.replacements.append(make(switch.current))
        try:
            yield
        finally:
            switch.replacements.pop()
    finally:
        with _lock:
            switch.threads -= 1
            if not switch.threads:
                setattr(owner, name, _switches.pop(key).descriptor)


class Rewriting(TorchFunctionMode):
    """While it is entered, a handler computes each call of a function that it is the handler of.

    One mode for all tables: each mode that is entered is called for whatever a module does, reading a shape too.

    >>> import torch
    >>> with Rewriting({torch.sin: lambda call, x: 2 * call(x)}):
    ...     torch.sin(torch.tensor(0.5)) == 2 * torch.tensor(0.5).sin()
    tensor(True)
    """

    def __init__(self, *tables: Table) -> None:
        """tables: of handlers of one function the last one is called first, and may call the others."""
        super().__init__()
        self.handlers: dict[Function, list[Function]] = {}
        for table in tables:
            for function, handler in table.items():
                self.handlers.setdefault(function, []).append(handler)

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        """Call, or compute what the call does."""
        call = func
        for handler in self.handlers.get(func, ()):
            call = partial(handler, call)
        return call(*args, **(kwargs or {}))
