"""The plugins as data: their tensors, attributes, and output shapes as expressions.

All packed tensors are NHWC or OHWI bytes declared as INT8, because TensorRT's Python API cannot express the size of FP4
tensors and its ONNX parser turns UINT8 constants into INT32. Every tensor has the format `LINEAR`: NHWC is the order of
its dimensions, so that no format has to be negotiated. Scales are FP32 tensors of one element, because the extra
arguments of a kernel can only be 32-bit integers.

    x_scale, w_scale   global scale, amax / (6 * 448); with 4/6 amax / (6 * 256)
    amax, out_amax     amax that a tensor is quantised with

Attributes are lists of INT32 (ONNX INTS), as in NVIDIA's own example of a quick plugin. Their order is part of the
interface: the ONNX parser passes them in the order of registration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fp4deploy.formats import NVFP4_BLOCK

NAMESPACE = "fp4deploy"
VERSION = "1"
GEOMETRY = ("kernel", "channels", "out_channels", "stride", "padding", "dilation", "relu")
Attributes = dict[str, list[int]]


@dataclass(frozen=True)
class Plugin:
    """One plugin: an entry point, its tensors in order, its attributes in order.

    transposed: a transposed convolution 2x2 with stride 2.
    sources: number of packed feature maps it reads, concatenated along the channels.
    packed: its output is packed too.
    """

    name: str
    entry: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    sources: int = 1
    packed: bool = False
    transposed: bool = False

    @property
    def identifier(self) -> str:
        """Name with namespace, as TensorRT registers it."""
        return f"{NAMESPACE}::{self.name}"

    def types(self) -> tuple[str, ...]:
        """Data types of inputs and outputs, in TensorRT's names."""
        plain = {"x": "FP16"} if self is QUANTIZE else {} if self.packed else {"out": "FP16"}
        return tuple(plain.get(name) or _type(name) for name in (*self.inputs, *self.outputs))

    def output_shapes(self, inputs: Sequence[Any], attributes: Attributes) -> list[tuple[object, ...]]:
        """Shapes of the outputs; dimensions of `inputs` are integers or TensorRT's symbolic expressions."""
        if self is QUANTIZE:
            n, c, h, w = inputs[0]
            blocks = (c + (NVFP4_BLOCK - 1)) // NVFP4_BLOCK
            return [(n, h, w, blocks * 8), (n, h, w, blocks)]
        n, h, w, count = self.pixels(inputs[0], attributes)
        if self.transposed:
            h, w = h * 2, w * 2
        blocks = -(-count // NVFP4_BLOCK)
        return [(n, h, w, 8 * blocks), (n, h, w, blocks)] if self.packed else [(n, h, w, count)]

    def pixels(self, x: Sequence[object], attributes: Attributes) -> tuple[Any, Any, Any, int]:
        """(batch, height, width, output channels) that the kernel walks: the output's; if `transposed`, the input's."""
        n, h, w = x[0], x[1], x[2]
        (count,) = attributes["out_channels"]
        if self.transposed:
            return n, h, w, count
        (stride,), (padding,), (dilation,) = (attributes[name] for name in ("stride", "padding", "dilation"))
        taller, wider = (2 * padding - dilation * (taps - 1) - 1 for taps in attributes["kernel"])
        return n, _output_size(h, taller, stride), _output_size(w, wider, stride), count


def _output_size(size: Any, more: int, stride: int) -> object:
    """(size + more) // stride + 1, without negative constants in symbolic expressions."""
    padded = size + more if more >= 0 else size - -more
    return padded // stride + 1


def _type(name: str) -> str:
    return "FP32" if name.endswith(("_scale", "amax")) or name == "bias" else "INT8"


def _convolution(name: str, sources: int, packed: bool, transposed: bool = False) -> Plugin:
    maps = ("x", "x_scales", "x_scale", "x2", "x2_scales", "x2_scale")[: 3 * sources]
    inputs = (*maps, "w", "w_scales", "w_scale", "bias", *(("out_amax",) if packed else ()))
    outputs = ("out", "out_scales") if packed else ("out",)
    entry = f"{'packed_' if packed else ''}{'two_source_' if sources == 2 else ''}gemm_entry"
    return Plugin(name, entry, inputs, outputs, GEOMETRY, sources, packed, transposed)


QUANTIZE = Plugin("nvfp4_quantize", "quantize_entry", ("x", "amax"), ("codes", "scales"), ("channels",))
CONVOLUTIONS = (
    _convolution("nvfp4_conv2d", 1, False),
    _convolution("nvfp4_conv2d_packed", 1, True),
    _convolution("nvfp4_conv2d_two", 2, False),
    _convolution("nvfp4_conv2d_two_packed", 2, True),
    _convolution("nvfp4_conv_transpose2d", 1, False, transposed=True),
    _convolution("nvfp4_conv_transpose2d_packed", 1, True, transposed=True),
)
PLUGINS = {plugin.name: plugin for plugin in (QUANTIZE, *CONVOLUTIONS)}


def convolution_plugin(sources: int, packed: bool, transposed: bool) -> Plugin:
    """The plugin of a convolution with these properties."""
    return next(
        each for each in CONVOLUTIONS if (each.sources, each.packed, each.transposed) == (sources, packed, transposed)
    )
