"""Layers that read FP32 in a network traced in FP16, or in BF16: they compute in FP32, as the code asks.

    with torch.autocast(x.device.type, enabled=False):
        x = self.conv(x.float())

Trained in FP32, or under autocast, this convolution computes in FP32. Traced in FP16 its parameters are FP16, and torch
refuses operands of unequal types. By `MIXED_TYPES` layers and products with operands of FP16 and FP32 are given
FP32. Like torch's arithmetic of both types they give FP32, which lasts until the code casts back (`x.to(y.dtype)`) or a
quantised layer reads it, whose result is FP16.

Numbers of which the code makes a tensor of an activation's type, `x.new_tensor(1e-10)`, are traced in FP32 with a cast
behind them: in FP16 this one would be 0 before anybody could see that FP16 does not hold it (`graph.wide`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

NARROW = {torch.float16, torch.bfloat16}
OF_ONE_TYPE = (
    F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear, F.bilinear,
    torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__, torch.einsum,
    torch.mm, torch.Tensor.mm, torch.bmm, torch.Tensor.bmm, torch.addmm, torch.baddbmm, F.scaled_dot_product_attention,
    F.layer_norm, F.group_norm, F.batch_norm, F.instance_norm, F.prelu,  # norms of both are torch's alone, not ONNX's
    F.grid_sample, torch.cat, torch.concat, torch.concatenate, torch.stack,
)  # fmt: skip


def _of_one_type(call: Callable[..., Any], *args: object, **kwargs: object) -> object:
    given = args, kwargs
    if _is_mixed(given):
        given = tree_map_only(torch.Tensor, _in_fp32, given)
    return call(*given[0], **given[1])


def _of_numbers(call: Callable[..., Any], *args: object, **kwargs: object) -> object:
    like = args[0] if isinstance(args[0], torch.Tensor) else None  # x.new_tensor(number)
    dtype = kwargs.get("dtype") or (like.dtype if like is not None else None)
    if dtype not in NARROW or any(isinstance(each, torch.Tensor) for each in args[like is not None :]):
        return call(*args, **kwargs)
    return call(*args, **kwargs | {"dtype": torch.float32}).to(dtype)


OF_NUMBERS = (torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor)
MIXED_TYPES = dict.fromkeys(OF_ONE_TYPE, _of_one_type) | dict.fromkeys(OF_NUMBERS, _of_numbers)  # for `Rewriting`


def _is_mixed(arguments: object) -> bool:
    found = {each.dtype for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)}
    return torch.float32 in found and bool(found & NARROW)


def _in_fp32(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in NARROW else x


def one_type_of_norms(graph: ir.Graph) -> None:
    """Cast what an RMSNormalization reads to the type of its scale, where an optimizer has fused a cast into it.

    x (FP16) to FP32, normalised, times an FP32 scale, becomes one node of both types, whose result ONNX infers as FP16.
    """
    for node in list(graph):
        if node.op_type != "RMSNormalization":
            continue
        x, scale = node.inputs[0], node.inputs[1]
        if x is None or scale is None or scale.dtype is None or x.dtype in (None, scale.dtype):
            continue
        cast = ir.node("Cast", [x], {"to": scale.dtype}, name=f"{node.name}.cast")
        cast.outputs[0].name, cast.outputs[0].dtype, cast.outputs[0].shape = f"{node.name}.cast", scale.dtype, x.shape
        graph.insert_before(node, cast)
        node.replace_input_with(0, cast.outputs[0])
