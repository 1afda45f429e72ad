"""What the plugins are, as data: tensors, attributes, and the shapes of outputs as expressions.

All packed tensors are NHWC or OHWI bytes carried as INT8, because the Python side of TensorRT cannot size FP4 tensors
and its ONNX parser turns UINT8 constants into INT32. Everything is `LINEAR` in memory; that an image is NHWC is said by
its shape, so that no format has to be negotiated. Scalars that change numbers are FP32 tensors of one element: extra
arguments of a kernel can be 32-bit integers only.

    x_scale, w_scale   global scale, amax / (6 * 448); with 4/6 amax / (6 * 256)
    amax, out_amax     what is quantised to, an amax

Attributes are lists of INT32 (ONNX INTS), the form in which NVIDIA's own example of a quick plugin gets numbers from an
ONNX node.
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
    """One plugin: a kernel entry, its tensors in order, its attributes in order.

    `up`: a transposed convolution 2x2 with stride 2. `sources`: how many packed images it reads. `packed`: so is its
    output.
    """

    name: str
    entry: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    sources: int = 1
    packed: bool = False
    up: bool = False

    @property
    def identifier(self) -> str:
        """Name with namespace, as TensorRT registers it."""
        return f"{NAMESPACE}::{self.name}"

    def types(self) -> tuple[str, ...]:
        """Types of inputs and outputs in TensorRT's words."""
        plain = {"x": "FP16"} if self is QUANTIZE else {} if self.packed else {"out": "FP16"}
        return tuple(plain.get(name) or _type(name) for name in (*self.inputs, *self.outputs))

    def output_shapes(self, inputs: Sequence[Any], attributes: Attributes) -> list[tuple[Any, ...]]:
        """Shapes of the outputs; extents of `inputs` are integers or TensorRT's symbolic expressions."""
        if self is QUANTIZE:
            n, c, h, w = inputs[0]
            blocks = (c + (NVFP4_BLOCK - 1)) // NVFP4_BLOCK
            return [(n, h, w, blocks * 8), (n, h, w, blocks)]
        n, h, w, count = self.pixels(inputs[0], attributes)
        if self.up:
            h, w = h * 2, w * 2
        blocks = -(-count // NVFP4_BLOCK)
        return [(n, h, w, 8 * blocks), (n, h, w, blocks)] if self.packed else [(n, h, w, count)]

    def pixels(self, image: Sequence[Any], attributes: Attributes) -> tuple[Any, Any, Any, int]:
        """(images, height, width, output channels) that the kernel walks: the output's, going up the input's."""
        n, h, w = image[0], image[1], image[2]
        (count,) = attributes["out_channels"]
        if self.up:
            return n, h, w, count
        (stride,), (padding,), (dilation,) = (attributes[name] for name in ("stride", "padding", "dilation"))
        taller, wider = (2 * padding - dilation * (taps - 1) - 1 for taps in attributes["kernel"])
        return n, _walk(h, taller, stride), _walk(w, wider, stride), count


def _walk(size: Any, more: int, stride: int) -> Any:
    """(size + more) // stride + 1, without negative constants in expressions."""
    moved = size + more if more >= 0 else size - -more
    return moved // stride + 1


def _type(name: str) -> str:
    return "FP32" if name.endswith(("_scale", "amax")) or name == "bias" else "INT8"


def _product(name: str, sources: int, packed: bool, up: bool = False) -> Plugin:
    images = ("x", "x_scales", "x_scale", "x2", "x2_scales", "x2_scale")[: 3 * sources]
    inputs = (*images, "w", "w_scales", "w_scale", "bias", *(("out_amax",) if packed else ()))
    outputs = ("out", "out_scales") if packed else ("out",)
    entry = f"{'packed_' if packed else ''}{'two_' if sources == 2 else ''}product_entry"
    return Plugin(name, entry, inputs, outputs, GEOMETRY, sources, packed, up)


QUANTIZE = Plugin("nvfp4_quantize", "quantize_entry", ("x", "amax"), ("codes", "scales"), ("channels",))
PRODUCTS = (
    _product("nvfp4_conv2d", 1, False),
    _product("nvfp4_conv2d_packed", 1, True),
    _product("nvfp4_conv2d_two", 2, False),
    _product("nvfp4_conv2d_two_packed", 2, True),
    _product("nvfp4_conv_transpose2d", 1, False, up=True),
    _product("nvfp4_conv_transpose2d_packed", 1, True, up=True),
)
PLUGINS = {plugin.name: plugin for plugin in (QUANTIZE, *PRODUCTS)}


def product_plugin(sources: int, packed: bool, up: bool) -> Plugin:
    """The plugin of a product."""
    return next(each for each in PRODUCTS if (each.sources, each.packed, each.up) == (sources, packed, up))
