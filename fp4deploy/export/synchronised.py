"""Comparing the twin with torch layer by layer, each from torch's own operands.

FP4 amplifies: an accumulation in another order changes a sum's last bit, now and then that moves an element over a
rounding boundary of E2M1, the element differs by a whole step, and the next layer's sums differ by far more than a last
bit. In a large network this reaches a floor that has nothing to do with the export: on a UNet of scale 1.0 at 352 x 480
the classes of 0.36 % of the pixels differ between torch and the twin, and of as many between torch's own NCHW and
channels_last kernels.

So each product of the twin is fed with torch's fake-quantised activation of that layer, while the twin's own quantiser
still runs on what the twin computed, and is compared with torch's. Every operator between two quantisers is checked on
exact operands, nothing is amplified, and an error shows in the layer where it is made.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import TensorProto, helper
from torch import nn

from fp4deploy.export.session import portable_session
from fp4deploy.formats import BLOCK
from fp4deploy.qat import QuantizedLayer, quantized_layers

PRODUCTS = ("Conv", "ConvTranspose", "MatMul", "Gemm")
FED = ".from_torch"


@dataclass(frozen=True)
class SynchronisedAgreement:
    """pixels, differing: as in the free comparison, every product fed by torch.

    layers: share of differing quantised input elements by layer, in the order of the graph.
    """

    pixels: int
    differing: int
    layers: dict[str, float]

    @property
    def share(self) -> float:
        """Share of pixels with the same argmax, 0..1."""
        return 1 - self.differing / max(self.pixels, 1)


def compare_synchronised(
    model: nn.Module, portable: onnx.ModelProto, images: Iterable[torch.Tensor]
) -> SynchronisedAgreement:
    """Compare on `images`, float32 [N, C, H, W] each; a layer used more than once is fed at none of its uses."""
    layers = quantized_layers(model)
    twin, values = fed_twin(portable, list(layers))
    session = portable_session(twin)
    (image_name,) = (value.name for value in session.get_inputs() if not value.name.endswith(FED))
    pixels = differing = 0
    wrong, seen = dict.fromkeys(values, 0), dict.fromkeys(values, 0)
    for image in images:
        expected, operands = _run_torch(model, {name: layers[name] for name in values}, image)
        feeds = {values[name] + FED: operands[name] for name in values}
        logits, *own = session.run(None, {image_name: image.numpy(), **feeds})
        classes = expected.argmax(axis=1)
        pixels += classes.size
        differing += int((logits.argmax(axis=1) != classes).sum()) if np.isfinite(logits).all() else classes.size
        for name, value in zip(values, own, strict=True):
            wrong[name] += int((value != operands[name]).sum())
            seen[name] += value.size
    return SynchronisedAgreement(pixels, differing, {name: wrong[name] / max(seen[name], 1) for name in values})


def fed_twin(portable: onnx.ModelProto, layers: list[str]) -> tuple[onnx.ModelProto, dict[str, str]]:
    """The twin with an input in place of each product's activation, which becomes an output.

    Returns:
        The graph, and layer -> name of its quantised activation, in the graph's order.
    """
    twin = onnx.ModelProto()
    twin.CopyFrom(portable)
    products: dict[str, list[onnx.NodeProto]] = {}
    for node in twin.graph.node:
        owner = _owner(node, layers)
        if owner is not None:
            products.setdefault(owner, []).append(node)
    values = {layer: nodes[0].input[0] for layer, nodes in products.items() if len(nodes) == 1}
    for layer, value in values.items():
        products[layer][0].input[0] = value + FED
        twin.graph.input.append(helper.make_tensor_value_info(value + FED, TensorProto.FLOAT, None))
        twin.graph.output.append(helper.make_tensor_value_info(value, TensorProto.FLOAT, None))
    return twin, values


def _owner(node: onnx.NodeProto, layers: list[str]) -> str | None:
    """The quantised layer whose product `node` is: its activation is named after it."""
    if node.op_type not in PRODUCTS:
        return None
    return next((layer for layer in layers if node.input[0].startswith(f"{layer}.input.")), None)


def _run_torch(
    model: nn.Module, layers: dict[str, QuantizedLayer], image: torch.Tensor
) -> tuple[NDArray[np.float32], dict[str, NDArray[np.float32]]]:
    """Logits, and each layer's quantised input as the graph holds it: channels padded to whole blocks."""
    operands: dict[str, NDArray[np.float32]] = {}

    def keep(name: str) -> Any:
        def hook(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            operands[name] = _padded(layer.quantized_input(inputs[0]), layer.input_axis).numpy()

        return hook

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in layers.items()]
    try:
        with torch.inference_mode():
            return model(image).float().numpy(), operands
    finally:
        for handle in handles:
            handle.remove()


def _padded(x: torch.Tensor, axis: int) -> torch.Tensor:
    missing = -x.shape[axis] % BLOCK
    if not missing:
        return x.contiguous()
    widths = [0] * (2 * x.ndim)
    widths[2 * (x.ndim - 1 - axis % x.ndim) + 1] = missing
    return F.pad(x, widths)
