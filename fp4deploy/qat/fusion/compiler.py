"""A backend of torch.compile: the passes of this folder, then inductor.

torch.compile captures the network piece by piece where it has to (control flow that depends on values, calls that
cannot be traced). Each piece goes through the passes on its own; one that inductor fails on runs uncompiled, with a
warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import fx

Compiled = Callable[..., Any]


def backend(
    inner: Callable[[fx.GraphModule, Sequence[Any]], Compiled] | None = None, keep_codes: bool = False
) -> Compiled:
    """A backend that applies the passes and hands the graph to `inner`, by default inductor.

    keep_codes: with inductor, quantised inputs are kept for the backward as codes (`codes`).
    """
    from fp4deploy.qat.fusion.passes import apply_passes  # with torch._dynamo

    def compile_graph(module: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        compiler: Any = inner or partial(compile_expanded, keep_codes=keep_codes)
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


def compile_expanded(module: fx.GraphModule, inputs: Sequence[Any], keep_codes: bool = False) -> Compiled:
    """Inductor, which puts in the elementary operators after differentiation (`expand`)."""
    from torch._inductor.compile_fx import compile_fx

    from fp4deploy.qat.fusion.codes import KeepCodes
    from fp4deploy.qat.fusion.expand import Expand

    patches: dict[str, Any] = {"post_grad_custom_pre_pass": Expand()}
    if keep_codes:
        patches["joint_custom_pre_pass"] = KeepCodes()
    compiled = compile_fx(module, inputs, config_patches=patches)
    assert callable(compiled)
    return compiled
