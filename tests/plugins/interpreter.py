"""TRITON_INTERPRET=1 python -m tests.plugins.interpreter SCRIPT [ARGUMENTS]: a script in Triton's interpreter, sooner.

For each call of a device function the interpreter searches `triton.language` for functions to replace, a quarter of its
time. Here it does so only where `arange` of a module that the function sees is not replaced yet.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


def call(self: InterpretedFunction, *arguments: Any, **options: Any) -> Any:
    """A call of a device function."""
    seen = [each for each in self.fn.__globals__.values() if each is language or each is language.core]
    if any(language.core.is_builtin(each.arange) for each in seen):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **options)


if __name__ == "__main__":
    InterpretedFunction.__call__ = call
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
