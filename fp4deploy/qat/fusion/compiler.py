"""A backend of torch.compile: the passes of this folder, then inductor.

torch.compile captures the network piece by piece where it has to (control flow that depends on values, calls that
cannot be traced). Each piece goes through the passes on its own; one that inductor fails on runs uncompiled, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from fp4deploy.qat.fusion.passes import apply_passes

Compiled = Callable[..., Any]


def backend(inner: str | Callable[[fx.GraphModule, Sequence[Any]], Compiled] = "inductor") -> Compiled:
    """A backend that applies the passes and hands the graph to `inner`, a backend or its name."""

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        compiler: Any = torch._dynamo.lookup_backend(inner) if isinstance(inner, str) else inner
        apply_passes(module)
        try:
            compiled: Compiled = compiler(module, inputs)
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            text = f"{type(error).__name__}: {lines[0][:200]}"
            warnings.warn(f"A part of the network could not be compiled and runs uncompiled ({text}).", stacklevel=2)
            return module.forward
        return compiled

    return compile_graph
