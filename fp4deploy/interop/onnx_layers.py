"""ONNX nodes with weights as torch layers: Conv, ConvTranspose, Gemm, MatMul, BatchNormalization, Instance- and
GroupNormalization.

A layer's weight becomes a parameter of the torch class that computes the same, so that everything that works on torch
layers (`qat.prepare`, calibration, post-training quantisation, export) works on networks of ONNX files. What a class
cannot hold, uneven padding and factors of Gemm, is computed around it or folded into the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.interop.onnx_operators import Call, padded, same_pads

Constant = NDArray[Any] | None
MAX_CHANNELS = 1 << 16
MAX_EXTENT = 4096  # of strides, padding, dilations


@dataclass(frozen=True)
class WeightedNode:
    """A node whose second input is a constant: its attributes and the constants among its inputs from the second on."""

    op: str
    name: str
    attributes: Mapping[str, Any]
    constants: tuple[Constant, ...]

    def refuse(self, why: str) -> InputError:
        """The error for what this reader does not know."""
        return InputError(f"{self.name} ({self.op}): {why}.")


class AnyBatchNorm(nn.BatchNorm2d):
    """BatchNorm over any number of axes after the channels."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


def layer_of(node: WeightedNode) -> nn.Module | None:
    """The torch layer that holds the node's weights; None where the operator has none of its own.

    Raises:
        InputError: a weight of another rank, or attributes that no torch layer has.
    """
    make = LAYERS.get(node.op)
    if make is None or not node.constants or node.constants[0] is None:
        return None
    return make(node)


def call_layer(layer: nn.Module, call: Call) -> Tensor:
    """The layer on the node's first input, which gets the padding that the layer's class cannot hold."""
    x = call.tensor(0)
    if isinstance(layer, nn.Conv2d):
        kernel, strides, taps = layer.kernel_size, layer.stride, layer.dilation
        pads = same_pads(call, x.shape[2:], kernel, strides, taps)
        x, even = padded(x, pads)
        assert tuple(even) == tuple(layer.padding)
    if isinstance(layer, nn.Linear) and call.op == "Gemm" and call.get("transA", 0):
        x = x.T
    if isinstance(layer, nn.InstanceNorm2d) and x.ndim == 3:  # torch writes GroupNorm as one over [N, groups, rest]
        return call_plain(layer, x.unsqueeze(-1)).squeeze(-1)
    return call_plain(layer, x)


def call_plain(layer: nn.Module, x: Tensor) -> Tensor:
    """The layer on a tensor."""
    found: Tensor = layer(x)
    return found


def _float(content: NDArray[Any]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(content, np.float32))


def _fill(layer: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    state = {"weight": weight} | ({} if bias is None else {"bias": bias})
    layer.load_state_dict(state, strict=False, assign=True)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer


def _operands(node: WeightedNode, rank: int) -> tuple[Tensor, Tensor | None]:
    weight = node.constants[0]
    assert weight is not None
    if weight.ndim != rank or not weight.size:
        raise node.refuse(f"its weight has the shape {list(weight.shape)}; read are {rank} axes, none of them empty")
    bias = node.constants[1] if len(node.constants) > 1 else None
    if bias is None and len(node.constants) > 1:
        raise node.refuse("its bias is no constant")
    return _float(weight), None if bias is None else _float(bias.reshape(-1))


def _integers(node: WeightedNode, name: str, default: tuple[int, ...]) -> Any:
    found = tuple(node.attributes.get(name, default))
    if len(found) != len(default) or not all(isinstance(size, int) and 0 <= size <= MAX_EXTENT for size in found):
        raise node.refuse(f"{name} = {list(found)[:8]}; read are {len(default)} numbers from 0 to {MAX_EXTENT}")
    return found


def _conv(node: WeightedNode) -> nn.Module:
    weight, bias = _operands(node, 4)
    groups = node.attributes.get("group", 1)
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups:
        raise node.refuse(f"{weight.shape[0]} output channels in {groups} groups")
    strides, taps = (_integers(node, name, (1, 1)) for name in ("strides", "dilations"))
    pads = _integers(node, "pads", (0, 0, 0, 0))
    kernel: Any = tuple(weight.shape[2:])
    if node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        if strides != (1, 1):
            raise node.refuse("automatic padding with strides; export it with explicit pads")
        totals = [(length - 1) * gap for length, gap in zip(kernel, taps, strict=True)]
        pads = tuple(total // 2 for total in totals) * 2
    even: Any = tuple(min(pads[at], pads[at + 2]) for at in (0, 1))
    with torch.device("meta"):
        layer = nn.Conv2d(
            weight.shape[1] * groups,
            weight.shape[0],
            kernel,
            strides,
            even,
            taps,
            groups,
            bias is not None,
        )
    return _fill(layer, weight, bias)


def _conv_transpose(node: WeightedNode) -> nn.Module:
    weight, bias = _operands(node, 4)
    groups = node.attributes.get("group", 1)
    strides, taps = (_integers(node, name, (1, 1)) for name in ("strides", "dilations"))
    pads, extra = _integers(node, "pads", (0, 0, 0, 0)), _integers(node, "output_padding", (0, 0))
    if node.attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID") or "output_shape" in node.attributes:
        raise node.refuse("automatic padding; export it with explicit pads")
    if not isinstance(groups, int) or groups < 1 or weight.shape[0] % groups or pads[:2] != pads[2:]:
        raise node.refuse(f"{weight.shape[0]} input channels in {groups} groups, pads {list(pads)}")
    outputs = weight.shape[1] * groups
    kernel: Any = tuple(weight.shape[2:])
    with torch.device("meta"):
        layer = nn.ConvTranspose2d(
            weight.shape[0],
            outputs,
            kernel,
            strides,
            pads[:2],
            extra,
            groups,
            bias is not None,
            taps,
        )
    return _fill(layer, weight, bias)


def _gemm(node: WeightedNode) -> nn.Module:
    weight, bias = _operands(node, 2)
    weight = weight if node.attributes.get("transB", 0) else weight.T.contiguous()
    alpha, beta = (float(node.attributes.get(name, 1.0)) for name in ("alpha", "beta"))
    return _linear(node, alpha * weight, None if bias is None else beta * bias)


def _matmul(node: WeightedNode) -> nn.Module | None:
    if node.constants[0] is not None and node.constants[0].ndim != 2:
        return None  # computed by torch.matmul
    weight, _ = _operands(node, 2)
    return _linear(node, weight.T.contiguous(), None)


def _linear(node: WeightedNode, weight: Tensor, bias: Tensor | None) -> nn.Module:
    outputs, inputs = weight.shape
    if bias is not None and bias.numel() == 1:
        bias = bias.expand(outputs).contiguous()
    if bias is not None and len(bias) != outputs:
        raise node.refuse(f"a bias of {len(bias)} values for {outputs} outputs")
    with torch.device("meta"):
        layer = nn.Linear(inputs, outputs, bias is not None)
    return _fill(layer, weight, bias)


def _vectors(node: WeightedNode, count: int) -> list[Tensor]:
    found = [_float(each.reshape(-1)) for each in node.constants[:count] if each is not None]
    if len(found) != count or len({len(each) for each in found}) != 1 or not 0 < len(found[0]) <= MAX_CHANNELS:
        raise node.refuse(f"it needs {count} constant vectors of one length")
    return found


def _batch_norm(node: WeightedNode) -> nn.Module:
    if node.attributes.get("training_mode", 0):
        raise node.refuse("it is in training mode; export the network in evaluation mode")
    weight, bias, mean, variance = _vectors(node, 4)
    layer = AnyBatchNorm(len(weight), float(node.attributes.get("epsilon", 1e-5)))
    _fill(layer, weight, bias)
    layer.running_mean, layer.running_var = mean, variance
    return layer


def _instance_norm(node: WeightedNode) -> nn.Module:
    weight, bias = _vectors(node, 2)
    layer = nn.InstanceNorm2d(len(weight), float(node.attributes.get("epsilon", 1e-5)), affine=True)
    return _fill(layer, weight, bias)


def _group_norm(node: WeightedNode) -> nn.Module:
    weight, bias = _vectors(node, 2)
    groups = node.attributes.get("num_groups", 0)
    if not isinstance(groups, int) or groups < 1 or len(weight) % groups:
        raise node.refuse(f"{len(weight)} channels in {groups} groups")
    layer = nn.GroupNorm(groups, len(weight), float(node.attributes.get("epsilon", 1e-5)))
    return _fill(layer, weight, bias)


LAYERS: dict[str, Callable[[WeightedNode], nn.Module | None]] = {
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "GroupNormalization": _group_norm,
}
