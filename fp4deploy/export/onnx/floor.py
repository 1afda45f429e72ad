"""Operators as Python and torch mean them, where torch's exporter writes others: division of sizes, rounded down;
squeezing.

    h // 2          Div(h, 2)                               sizes are not negative
    -(-h // 2)      Neg(Div(Sub(-h, Mod(-h, 2)), 2))        without its remainder the division is exact

ONNX's Div of integers rounds towards zero; its Mod has the sign of the divisor, as Python's. torch's exporter writes
Div alone, which is one too much for a negative dividend that leaves a remainder. torch's `squeeze` leaves
axes of other sizes than 1 as they are, which ONNX's refuses.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch

from fp4deploy.errors import InputError

aten = torch.ops.aten
OF_THE_FIRST = ("Cast", "Gather", "Reshape", "Squeeze", "Unsqueeze")  # whose other inputs are no sizes
OF_ALL = ("Add", "Div", "Max", "Min", "Mul")  # of values that are not negative: not negative


def floor_divide(dividend: Any, divisor: Any) -> Any:
    """`dividend // divisor` of two sizes, for torch's exporter: ONNX values or numbers."""
    from onnxscript import opset18 as op

    if _is_count(dividend) and _is_count(divisor):
        return op.Div(dividend, divisor)
    return op.Div(op.Sub(dividend, op.Mod(dividend, divisor)), divisor)


def smoothed(self: Any, output_size: Any, align_corners: bool, scales_h: Any = None, scales_w: Any = None) -> Any:
    """`interpolate(mode="bilinear", antialias=True)`, for torch's exporter: by the factors that the network gives, if
    any. They are not the quotients of the sizes, which the exporter takes.
    """
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten__upsample_bilinear2d_aa

    if align_corners:
        raise InputError(
            "interpolate: antialias=True with align_corners=True has no form in ONNX. Leave one of them out."
        )
    if scales_h is None or scales_w is None:
        return aten__upsample_bilinear2d_aa(self, output_size, align_corners)
    factors: Any = op.Constant(value_floats=[1.0, 1.0, float(scales_h), float(scales_w)])
    # A window ends where the image does.
    return op.Resize(self, None, factors, None, antialias=1, exclude_outside=1, mode="linear")


def squeezed(self: Any, dim: Any) -> Any:
    """`squeeze` of named axes, for torch's exporter: of those that are of size 1."""
    from onnxscript import opset18 as op

    named = (dim,) if isinstance(dim, int) else dim
    axes = [axis for axis in named if len(self.shape) and self.shape[axis] == 1]
    constant: Any = op.Constant(value_ints=axes)
    return op.Squeeze(self, constant) if axes else op.Identity(self)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.floordiv: floor_divide,
    aten._upsample_bilinear2d_aa.default: smoothed,
    **dict.fromkeys((aten.squeeze.dim, aten.squeeze.dims), squeezed),
}


def _is_count(size: ir.Value | int) -> bool:
    """Whether a size cannot be negative: axes of tensors and numbers, without differences."""
    waiting, seen = [size], set()
    while waiting:
        value = waiting.pop()
        if isinstance(value, int):
            if value < 0:
                return False
            continue
        node = value.producer()
        if node is None:
            return False
        if node in seen or node.op_type == "Shape":
            continue
        seen.add(node)
        if node.op_type == "Constant":
            waiting += _numbers(node)
        elif node.op_type in OF_THE_FIRST or node.op_type in OF_ALL:
            waiting += [each for each in node.inputs[: 1 if node.op_type in OF_THE_FIRST else None] if each is not None]
        else:
            return False
    return True


def _numbers(constant: ir.Node) -> list[int]:
    tensor = constant.attributes.get_tensor("value") if "value" in constant.attributes else None
    return [-1] if tensor is None else [int(each) for each in tensor.numpy().reshape(-1)]
