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

from fp4deploy.errors import named_cause

Compiled = Callable[..., Any]

# Of the quantised elements kept as codes by default. A quantiser adds one or two bits an element to what FP16 keeps;
# codes and scales take 11 bits an element less than FP16 values. So a fifth makes up for it, and decoding it takes a
# fifth of the time that decoding everything would.
BALANCED = 0.25


def codes_kept(recompute: bool | None) -> float:
    """The share of the quantised inputs that are kept as codes, of the setting `recompute`; None: `BALANCED`."""
    return BALANCED if recompute is None else float(recompute)


def backend(
    inner: Callable[[fx.GraphModule, Sequence[object]], Compiled] | None = None, keep_codes: float = 0.0
) -> Compiled:
    """A backend that applies the passes and hands the graph to `inner`, by default inductor.

    keep_codes: with inductor, this share of the quantised inputs is kept for the backward as codes (`codes`).
    """
    from fp4deploy.qat.fusion.passes import apply_passes  # with torch._dynamo

    def compile_graph(module: fx.GraphModule, inputs: Sequence[object]) -> Compiled:
        compiler: Any = inner or partial(compile_expanded, keep_codes=keep_codes)
        apply_passes(module)
        try:
            compiled: Compiled = compiler(module, inputs)
        except Exception as error:
            text = f"A part of the network could not be compiled and runs uncompiled ({named_cause(error)})."
            warnings.warn(text, stacklevel=2)
            return module.forward
        return compiled

    return compile_graph


def compile_expanded(module: fx.GraphModule, inputs: Sequence[Any], keep_codes: float = 0.0) -> Compiled:
    """Inductor, which puts in the elementary operators after differentiation (`expand`)."""
    from torch._inductor.compile_fx import compile_fx

    from fp4deploy.fusion.expand import Expand
    from fp4deploy.qat.fusion import operators
    from fp4deploy.qat.fusion.codes import KeepCodes
    from fp4deploy.qat.fusion.convolutions import FastestConvolutions

    patches: dict[str, Any] = {"post_grad_custom_pre_pass": Expand(operators.EXPANSIONS, operators)}
    patches["post_grad_custom_post_pass"] = FastestConvolutions()
    if keep_codes:
        patches["joint_custom_pre_pass"] = KeepCodes(keep_codes)
    compiled = compile_fx(module, inputs, config_patches=patches)
    assert callable(compiled)
    return compiled
