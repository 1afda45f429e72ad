"""TRITON_INTERPRET=1 python -m tests.plugins.interpreter MODULE...: {module: its `results()`}, as JSON.

Triton reads the variable when it is imported, so that this is a process of its own. torch and Triton are imported once:
each module runs in a fork, and what one replaces in the package the others do not see.

Most of the interpreter's time goes into what is left out here:

- for each call of a device function it searches `triton.language` for functions to replace. Here it does so only where
  `arange` of a module that the function sees is not replaced yet;
- it makes a table of all types for each operand, to find one in it;
- it computes integer sums and products a second time in 64 bits, to find overflows. No size here is near 2^31.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from typing import Any

import numpy as np
from triton import language
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction


def call(self: InterpretedFunction, *arguments: Any, **options: Any) -> Any:
    """A call of a device function."""
    seen = [each for each in self.fn.__globals__.values() if each is language or each is language.core]
    if any(language.core.is_builtin(each.arange) for each in seen):
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*arguments, **options)


def by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function of a type, called once for each; blocks of a type have the answer of its scalars."""
    found: dict[str, Any] = {}

    def kept(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in found:
            found[name] = find(kind.scalar)
        return found[name]

    return kept


def results(module: str) -> Any:
    return import_module(module).results()


if __name__ == "__main__":
    InterpretedFunction.__call__ = call
    interpreter._get_np_dtype = by_name(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    np.seterr(all="ignore")  # it divides by an amax of 0, as the kernels do
    modules = sys.argv[1:]
    for module in modules:
        import_module(module)
    with get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        json.dump(dict(zip(modules, pool.map(results, modules, chunksize=1), strict=True)), sys.stdout)
