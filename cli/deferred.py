"""Commands whose options are read when they are asked for.

Typer evaluates the annotations of every parameter of every command before it prints one line: some 500 options, a fifth
of the time of `fp4deploy --help`. A command added here has its name and help from the start, and its parameters once
it is run, completed or asked for its own help.

Commands that take the same options name them once: a parameter whose type is a dataclass stands for its fields.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from inspect import Parameter, Signature, signature
from typing import Any, TypeVar, get_type_hints

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

    def __getattr__(self, name: str) -> object:
        if name not in ("params", "callback"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(with_fields(self._function))
        command = get_command(app)
        self.params, self.callback = command.params, command.callback
        return getattr(self, name)


def with_fields(function: Callable[..., None]) -> Callable[..., None]:
    """A function with the fields of its parameters that are dataclasses as parameters of its own."""
    hints = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    parameters = []
    for name, parameter in signature(function).parameters.items():
        own = get_type_hints(groups[name], include_extras=True) if name in groups else {}
        given = [(each.name, each.default, own[each.name]) for each in fields(groups[name])] if own else []
        for key, default, hint in given or [(name, parameter.default, hints[name])]:
            parameters.append(Parameter(key, Parameter.KEYWORD_ONLY, default=default, annotation=hint))

    def called(**values: object) -> None:
        made = {
            name: kind(**{each.name: values.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        function(**values, **made)

    called.__doc__, called.__name__ = function.__doc__, function.__name__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def given_options(context: typer.Context) -> list[str]:
    """The options that stand on the command line, also with their default, by their first name."""
    return [
        each.opts[0]
        for each in context.command.params
        if each.name and (source := context.get_parameter_source(each.name)) and source.name == "COMMANDLINE"
    ]


def deferred(app: typer.Typer, name: str) -> Callable[[Function], Function]:
    """Add the decorated function to an app, as `app.command(name)` does."""

    def add(function: Function) -> Function:
        def without_parameters() -> None: ...

        without_parameters.__doc__ = function.__doc__
        without_parameters.function = function  # type: ignore[attr-defined]
        app.command(name, cls=DeferredCommand)(without_parameters)
        return function

    return add
