"""Functions of torch replaced for one thread.

torch's exporters take no argument for some of what they call. `unittest.mock.patch` would change it for the whole
process: other threads would call the replacement meanwhile, and two threads that replace one function would put each
other's back. Here a function that any thread replaces becomes a switch, which calls the thread's own replacement or
the original.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Function = Callable[..., Any]
_switches: dict[tuple[Any, str], _Switch] = {}
_lock = threading.Lock()


class _Switch:
    """Stands in the place of `owner.name`; replacements: the calling thread's, the innermost one last."""

    def __init__(self, owner: Any, name: str) -> None:
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

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self.current(*arguments, **options)


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Function], Function]) -> Iterator[None]:
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
