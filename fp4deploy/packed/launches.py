"""Which kernels multiply the packed operands of a network's layers, to compile them ahead of time (`plugins.aot`).

Triton's, with every tile that sizes of images and batches can choose; on SM120 and SM121 also those in CUDA C++ beside
them (`plugins.gemm.convolution.block_scaled`), of which a layer's first call measures the faster one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from fp4deploy.architecture import Architecture
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.packed.file import PackedFile
from fp4deploy.packed.graph import Conv2d, ConvTranspose2d, Layer, Linear
from fp4deploy.packed.network import compiled_ahead, dilation_of, has_kernel
from fp4deploy.packed.shapes import shapes_of, weight_shape
from fp4deploy.plugins.aot.spec import Launch
from fp4deploy.plugins.gemm.convolution import block_scaled
from fp4deploy.plugins.gemm.triton.variants import empty_packed, of_rows, of_shape
from fp4deploy.rest import rest_of


def packed_launches(file: PackedFile, arch: str) -> list[Launch]:
    """The kernels that layers in NVFP4 can take on an architecture such as "sm_120", each once.

    Layers that no kernel takes have none, nor have those of a network whose rest is FP32.
    """
    if file.graph.rest == "fp32":
        return []
    return list(dict.fromkeys(_launches(file, Architecture.parse(arch).number)))


def _launches(file: PackedFile, capability: int) -> Iterator[Launch]:
    graph, dtype = file.graph, rest_of(file.graph).dtype
    shapes = shapes_of(graph)
    packed = {form.name for each in (*graph.inputs, *graph.nodes) for form in each.outputs if form.amax}
    for node in graph.nodes:
        if not isinstance(node, Layer) or node.precision != "nvfp4":
            continue
        linear = isinstance(node, Linear)
        channels = tuple(shapes[name][-1 if linear else 1] for name in node.inputs)
        outputs, *taps, _ = weight_shape(graph, node, sum(channels))
        if not (has_kernel(node, taps) and compiled_ahead(node, taps)):
            continue
        relu, bias = getattr(node, "relu", False), node.bias is not None
        if not packed.issuperset(node.inputs):
            yield from of_rows(channels[0], dtype, bias, relu, capability)
            continue
        form = node.outputs[0]
        fused = len(node.outputs) == 1 and form.amax is not None and form.axis == ("last" if linear else "channels")
        lead = (1,) * (2 - len(taps))  # a matrix, or a sequence, has one row
        place: dict[str, Any] = {}
        if isinstance(node, Conv2d):
            place = {
                "stride": (*node.stride[: len(lead)], *node.stride),
                "padding": (*(0 for _ in lead), *node.padding),
            }
        shape = (
            tuple(empty_packed(1, *lead, *(1 for _ in taps), count) for count in channels),
            empty_packed(outputs, *lead, *taps, sum(channels)),
            isinstance(node, ConvTranspose2d),
        )
        yield from of_shape(shape, dtype, bias, relu, fused, capability, **place)
        if not isinstance(node, Conv2d) or not block_scaled.supports(tuple(taps), tuple(node.stride)):
            continue
        if capability in block_scaled.ARCHITECTURES:
            whole = tuple(NVFP4_BLOCK * math.ceil(count / NVFP4_BLOCK) for count in channels)
            where = (node.stride[0], (node.padding[0], node.padding[1]), dilation_of(node, taps))
            yield from block_scaled.launches(whole, outputs, (taps[0], taps[1]), *where, dtype, fused)
