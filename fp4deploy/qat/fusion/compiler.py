"""A backend of torch.compile: the passes of this folder, then inductor.

torch.compile captures the network piece by piece where it has to (control flow that depends on values, calls that
cannot be traced). Each piece goes through the passes on its own; one that inductor fails on runs uncompiled, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

Compiled = Callable[..., Any]


def backend(inner: Callable[[fx.GraphModule, Sequence[Any]], Compiled] | None = None) -> Compiled:
    """A backend that applies the passes and hands the graph to `inner`, by default inductor."""
    from fp4deploy.qat.fusion.passes import apply_passes  # with torch._dynamo

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        compiler: Any = inner or compile_expanded
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


def compile_expanded(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
    """Inductor, which puts in the elementary operators after differentiation (`expand`)."""
    from torch._inductor.compile_fx import compile_fx

    from fp4deploy.qat.fusion.expand import Expand

    compiled = compile_fx(module, inputs, config_patches={"post_grad_custom_pre_pass": Expand()})
    assert callable(compiled)
    return compiled
