"""Average pooling with another divisor, which ONNX has no attribute for and torch's exporter drops without a word.

    avg_pool(x, divisor_override=d)  =  avg_pool(x, count_include_pad=True) * (elements of the window / d)

With `ceil_mode` the last window may be cut, and its average has fewer elements than the window: that is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fp4deploy.errors import InputError

AXES = {torch._C._nn.avg_pool2d: 2, torch._C._nn.avg_pool3d: 3}
NAMES = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


def _averages(axes: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Average pooling with another divisor as one with its own, and a product."""
    given = dict(zip(NAMES, args, strict=False)) | kwargs
    divisor = given.get("divisor_override")
    if divisor is None:
        return call(*args, **kwargs)
    if given.get("ceil_mode"):
        raise InputError(
            f"Average pooling with ceil_mode and divisor_override={divisor} has no form in ONNX. Set "
            "ceil_mode=False, or leave divisor_override out."
        )
    kernel = given["kernel_size"]
    sides = [kernel] * axes if isinstance(kernel, int) else [*kernel] * (axes // len(kernel))
    pooled = call(**(given | {"count_include_pad": True, "divisor_override": None}))
    # Whole numbers: the file has the numbers of a network's code in FP16, and their quotient would be rounded.
    return (pooled.float() * math.prod(sides) / divisor).to(pooled.dtype)


DIVISORS = {function: partial(_averages, axes) for function, axes in AXES.items()}  # for `replacement.Rewriting`
