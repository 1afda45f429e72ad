"""An extension of griffe, which reads docstrings for the API reference: examples become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^([ ]*)>>> .*(?:\n(?![ ]*$).*)*", re.MULTILINE)  # up to an empty line or the end


def fenced(text: str) -> str:
    """A docstring whose examples are fenced: Markdown takes `>>>` for quotes in a quote in a quote."""
    return EXAMPLE.sub(lambda example: f"{example[1]}```pycon\n{example[0]}\n{example[1]}```", text)


class Doctests(griffe.Extension):
    """Fence the examples of every object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Called by griffe once an object is whole."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
