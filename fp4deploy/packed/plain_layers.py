"""Which layers in 16 bits kernels of this package compute: `small_k` and `plain` of `plugins.gemm.convolution`.

Convolutions whose sum has few elements, the first and the last layer of most networks, come from `small_k` on a GPU;
where it does not take a layer, does not compile or does not launch, torch computes it. Over volumes the slices that a
filter spans are channels of a feature map: of 3x3x3 and one channel three. They are copied for that, which of an input
is little next to the many channels that are written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from fp4deploy.packed.graph import Conv2d, Graph, Input, Layer
from fp4deploy.plugins.gemm.convolution import small_k
from fp4deploy.plugins.quantize.statistics import Moments

Pair = tuple[int, int]


def plain_kernel(node: Layer) -> bool:
    """Whether `plugins.gemm.convolution.plain` computes a layer in FP16 or BF16."""
    return _is_plain(node, "conv2d")


def _is_plain(node: Layer, *operations: str) -> bool:
    single = isinstance(node, Conv2d) and node.op in operations and node.groups == 1 and len(node.inputs) == 1
    return single and node.precision in ("fp16", "bf16")


def plain_geometry(node: Conv2d) -> tuple[Pair, Pair, Pair]:
    """Stride, padding and dilation of height and width."""
    (a, b), (c, d), (e, f) = node.stride[-2:], node.padding[-2:], node.dilation[-2:]
    return (a, b), (c, d), (e, f)


def small_k_kernel(node: object, weights: dict[str, torch.Tensor], device: torch.device) -> bool:
    """Whether `plugins.gemm.convolution.small_k` computes a node on a device.

    weights: of layers in FP16 or BF16, with torch's axes.
    """
    if not isinstance(node, Layer) or not _is_plain(node, "conv2d", "conv3d"):
        return False
    place = cast(Conv2d, node)
    outputs, channels, *depth, kh, kw = weights[place.layer].shape
    if depth and depth[0] > 1 and place.dilation[0] > 1:
        return False
    return small_k.fallback.runs(device) and small_k.supports(
        math.prod((channels, *depth)), outputs, (kh, kw), *plain_geometry(place), place.groups
    )


def read_as_given(
    graph: Graph, inputs: Sequence[Input], steps: Sequence[Any], taken: Callable[[Any], bool]
) -> set[str]:
    """Activations of inputs that nothing but such layers read: they take an image in NCHW, FP32 or FP16, as it is.

    inputs, steps: of the plan that runs. taken: `small_k_kernel` of a node.
    """
    found = set[str]()
    if graph.digits:
        return found
    kept = {each.activation for each in graph.outputs}
    for each in inputs:
        names = {form.name for form in each.outputs}
        readers = [step for step in (*steps, *graph.nodes) if names & {*step.inputs}]
        plain = not names & kept and not any(form.amax for form in each.outputs)
        image = len(each.shape) in (4, 5) and each.shape[1] % 8 != 0
        if plain and image and readers and all(map(taken, readers)):
            found |= names
    return found


def convolve_small_k(
    node: Conv2d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, moments: bool
) -> tuple[torch.Tensor, Moments | None] | None:
    """A layer by the kernel for small K, with torch's axes, and the moments of its output if asked for.

    None where sizes do not fit, or the kernel does not run after all.
    """
    if x.ndim not in (4, 5) or (x.is_cuda and weight.dtype == torch.float32):
        return None
    if not small_k.fallback.runs(x.device):  # refused since the network was loaded
        return None
    if x.ndim == 5:
        return _convolve_slices(node, x, weight, bias, moments)
    x, filters = x.permute(0, 2, 3, 1), weight.permute(0, 2, 3, 1)
    stride, padding, _ = plain_geometry(node)
    if not small_k.is_aligned(x, filters, stride, padding):
        return None
    with small_k.fallback.guard(x.device):
        y, found = small_k.conv2d(x, filters, bias, stride, padding, node.relu, moments)
        return y.permute(0, 3, 1, 2), found
    return None


def _convolve_slices(
    node: Conv2d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, moments: bool
) -> tuple[torch.Tensor, Moments | None] | None:
    """`convolve_small_k` of volumes: slices are feature maps, of 1x1x1 the rows of all slices are one."""
    image = node.model_copy(update={"stride": node.stride[1:], "padding": node.padding[1:]})
    alone = {*weight.shape[2:], *node.stride} == {1} and not any(node.padding)
    if alone:
        depth, rows, filters = x.shape[2], x.flatten(2, 3), weight.flatten(2, 3)
    else:
        padded = torch.nn.functional.pad(x.to(weight.dtype), (*(0, 0) * 2, *node.padding[:1] * 2))
        windows = padded.unfold(2, weight.shape[2], node.stride[0])  # [N, C, OD, H, W, KD]
        depth, rows = windows.shape[2], windows.permute(0, 2, 5, 1, 3, 4).flatten(0, 1).flatten(1, 2)
        filters = weight.transpose(1, 2).flatten(1, 2)
    done = convolve_small_k(image, rows, filters, bias, moments)
    if done is None:
        return None
    y, found = done
    if alone:
        return y.unflatten(2, (depth, -1)), found
    if found is not None:
        found = replace(found, per_item=depth * found.per_item, height=y.shape[2])
    return y.unflatten(0, (len(x), depth)).transpose(1, 2), found
