"""Commands whose options are read when they are asked for.

Typer evaluates the annotations of every parameter of every command before it prints one line: some 500 options, a fifth
of the time of `fp4deploy --help`. A command added here has its name and help from the start, and its parameters once
it is run, completed or asked for its own help.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand
from typer.main import get_command

Function = TypeVar("Function", bound=Callable[..., None])


class DeferredCommand(TyperCommand):
    """A command that reads the signature of its function at the first use of `params` or `callback`."""

    def __init__(self, *, callback: Any, **settings: Any) -> None:
        super().__init__(callback=callback, **settings)
        self._function = callback.function
        del self.params, self.callback

    def __getattr__(self, name: str) -> Any:
        if name not in ("params", "callback"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(self._function)
        command = get_command(app)
        self.params, self.callback = command.params, command.callback
        return getattr(self, name)


def deferred(app: typer.Typer, name: str) -> Callable[[Function], Function]:
    """Add the decorated function to an app, as `app.command(name)` does."""

    def add(function: Function) -> Function:
        def without_parameters() -> None: ...

        without_parameters.__doc__ = function.__doc__
        without_parameters.function = function  # type: ignore[attr-defined]
        app.command(name, cls=DeferredCommand)(without_parameters)
        return function

    return add
