"""Of the command line: what the callback of each option makes of values, and what it sets for children."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import click
from fp4deploy.cli.main import app

from tests.cli.test_main import commands
from tests.contract.results.plain import Answer, plain

VALUES = (None, True, False, 0, 1, -1, 0.5, float("nan"), "x", "1,2", "a=1", "32x48", ["a"], ["a=1", "b=2"])


def called(command: Any, parameter: Any) -> list[Any]:
    found = []
    for value in VALUES:
        context = click.Context(command, info_name="x")
        with mock.patch.dict(os.environ, clear=False):
            before = dict(os.environ)
            try:
                answer = plain(parameter.callback(context, parameter, value))
            except Exception as error:
                answer = type(error).__name__
            changed = {key: each for key, each in os.environ.items() if before.get(key) != each}
        found.append([answer, changed] if changed else answer)
    return found


def callbacks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in commands(app).items():
        for parameter in command.params:
            if parameter.callback is not None and not parameter.is_eager:
                text = f"{parameter.name} {called(command, parameter)}"
                found.setdefault(text, []).append(name)
    return {text: sorted(names) for text, names in found.items()}


RESULTS: dict[str, Answer] = {"callbacks": lambda: [callbacks()]}
