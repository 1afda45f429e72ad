"""Convolutions of a compiled training step by the fastest kernel: a pass over the differentiated graph.

    aten.convolution            -> fp4deploy.fastest_convolution          forward
    aten.convolution_backward   -> fp4deploy.fastest_gradients            dX and dW; the bias gradient becomes a sum

A compiler calls cuDNN for what it does not generate, and generates no weight gradient. What is faster is measured when
the compiled code runs for the first time (`plugins.gemm.convolution.fastest`). Only convolutions that a kernel of this
package computes are replaced, in channels_last and of feature maps that are large enough for a kernel to make up for
its call; all others stay the compiler's.
"""

from __future__ import annotations

import operator as python
from typing import Any, cast

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

from fp4deploy.plugins.gemm.convolution import fastest, narrow_wgrad, small_k
from fp4deploy.plugins.runtime.torch_library import operator
from fp4deploy.qat.operators import gemms
from fp4deploy.qat.operators.gemms import ConvGemms

aten, ops = torch.ops.aten, torch.ops.fp4deploy
LARGE = 16 << 20  # bytes that a convolution moves at least: 4 us of a Hopper GPU


def _gemms(weight: torch.Tensor, stride: list[int], padding: list[int]) -> ConvGemms:
    return ConvGemms(tuple(weight.shape[2:]), tuple(stride), tuple(padding), (1, 1), 1)


def _channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last)


@operator(
    "fastest_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding) -> Tensor",
    lambda *arguments: _channels_last(_convolution(*arguments)),
    "CompositeExplicitAutograd",
)
def _fastest_convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int]
) -> torch.Tensor:
    return _channels_last(_gemms(weight, stride, padding).multiply(x, weight, bias))


def _convolution(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stride: list[int], padding: list[int]
) -> torch.Tensor:
    found: torch.Tensor = aten.convolution(x, weight, bias, stride, padding, [1, 1], False, [0, 0], 1)
    return found


def _like_operands(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dx: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    first = torch.empty_like(x, memory_format=torch.channels_last) if dx else x.new_empty(0)
    return first, torch.empty_like(weight)


@operator(
    "fastest_gradients(Tensor gradient, Tensor x, Tensor weight, int[] stride, int[] padding, bool dx)"
    " -> (Tensor, Tensor)",
    _like_operands,
    "CompositeExplicitAutograd",
)
def _fastest_gradients(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, stride: list[int], padding: list[int], dx: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    found = _gemms(weight, stride, padding).backward(gradient, x, weight, (dx, True, False))
    first = _channels_last(found[0]) if dx else x.new_empty(0)
    return first, torch.empty_like(weight).copy_(found[1])


class FastestConvolutions(CustomGraphPass):
    """The pass, after the compiler's own."""

    def __call__(self, graph: fx.Graph) -> None:
        for node in list(graph.nodes):
            arguments = node.args
            if node.target is aten.convolution.default and _has_kernel(arguments, *arguments[:2], *arguments[3:9]):
                with graph.inserting_before(node):
                    new = _call(graph, ops.fastest_convolution.default, arguments[:5], node.meta["val"])
                node.replace_all_uses_with(new)
                graph.erase_node(node)
            if node.target is aten.convolution_backward.default and arguments[10][1]:
                _replace_backward(graph, node)

    def uuid(self) -> object:
        return get_hash_for_files((__file__, *(str(each.__file__) for each in (fastest, small_k, narrow_wgrad, gemms))))


def _has_kernel(
    arguments: Any,
    x: Any,
    weight: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> bool:
    """Whether a kernel of this package may compute one of the products."""
    values = [each.meta["val"] for each in arguments if isinstance(each, fx.Node)]
    operands = x.meta["val"], weight.meta["val"]
    if transposed or groups != 1 or operands[0].ndim != 4 or set(dilation) != {1}:
        return False
    maps = [value for value in values if value.ndim == 4 and value is not operands[1]]
    if not all(value.is_contiguous(memory_format=torch.channels_last) for value in maps):
        return False
    large = sum(value.numel() * value.element_size() for value in values) >= LARGE
    place = fastest.Place((stride[0], stride[1]), (padding[0], padding[1]))
    return large and fastest.may_have_kernel(*operands, place)


def _replace_backward(graph: fx.Graph, node: fx.Node) -> None:
    gradient, x, weight, _, stride, padding, *places, mask = cast(Any, node.args)
    if not _has_kernel((gradient, x, weight), x, weight, stride, padding, *places):
        return
    values = [*node.meta["val"]]
    values[0] = values[0] if mask[0] else x.meta["val"].new_empty(0)
    with graph.inserting_before(node):
        operands = gradient, x, weight, stride, padding, mask[0]
        both = _call(graph, ops.fastest_gradients.default, operands, tuple(values[:2]))
        results = [_call(graph, python.getitem, (both, at), values[at]) for at in range(2)]
        results += [_call(graph, aten.sum.dim_IntList, (gradient, [0, 2, 3]), values[2])] if mask[2] else []
    for user in list(node.users):
        user.replace_all_uses_with(results[cast(int, user.args[1])])
        graph.erase_node(user)
    graph.erase_node(node)


def _call(graph: fx.Graph, target: Any, arguments: tuple[Any, ...], value: object) -> fx.Node:
    node = graph.call_function(target, arguments)
    node.meta = {"val": value}
    return node
