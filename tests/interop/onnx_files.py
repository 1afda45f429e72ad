"""Small ONNX networks written node by node, as other tools write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.shape_inference
from onnx import TensorProto, helper, numpy_helper

Node = tuple[Any, ...]


class Onnx:
    """A graph in the making; `node` returns the name of the output."""

    def __init__(
        self, size: tuple[Any, ...] = ("N", 3, 16, 16), kind: int = TensorProto.FLOAT, opset: int = 17
    ) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.size, self.kind, self.opset = size, kind, opset

    def constant(self, name: str, content: Any, dtype: Any = None) -> str:
        usual = np.float16 if self.kind == TensorProto.FLOAT16 else np.float32
        self.constants.append(numpy_helper.from_array(np.asarray(content, dtype or usual), name))
        return name

    def normal(self, name: str, *shape: int) -> str:
        return self.constant(name, self.random.normal(size=shape) / np.sqrt(max(1, np.prod(shape[1:]))))

    def integers(self, name: str, *values: int) -> str:
        return self.constant(name, values, np.int64)

    def node(self, op: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        name = f"{op.lower()}_{len(self.nodes)}"
        results = [name, *(f"{name}_{at}" for at in range(1, outputs))]
        self.nodes.append(helper.make_node(op, list(inputs), results, name=name, domain=domain, **attributes))
        return name

    def conv(
        self, name: str, x: str, before: int, after: int, kernel: int = 3, bias: bool = True, **attributes: Any
    ) -> str:
        groups = attributes.get("group", 1)
        weights = [self.normal(f"{name}.weight", after, before // groups, kernel, kernel)]
        weights += [self.normal(f"{name}.bias", after)] if bias else []
        attributes.setdefault("pads", [kernel // 2] * 4)
        return self.node("Conv", x, *weights, **attributes)

    def model(self, *outputs: str) -> onnx.ModelProto:
        image = helper.make_tensor_value_info("image", self.kind, self.size)
        found = [helper.make_tensor_value_info(name, self.kind, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "network", [image], found, self.constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        try:
            return onnx.shape_inference.infer_shapes(model, data_prop=True)
        except onnx.shape_inference.InferenceError:  # an operator that is not ONNX's
            return model


def segmenter(classes: int = 4, **options: Any) -> onnx.ModelProto:
    """Strided and depthwise convolutions, BatchNorm, a squeeze-excite gate, pooling, upsampling, a skip, a resize."""
    net = Onnx(**options)
    x = net.conv("stem.0", "image", 3, 16, strides=[2, 2], bias=False)
    statistics = [net.constant(f"stem.1.{role}", values) for role, values in (
        ("weight", np.linspace(0.5, 1.5, 16)), ("bias", np.linspace(-1, 1, 16)),
        ("mean", np.linspace(-0.2, 0.2, 16)), ("var", np.linspace(0.5, 1.5, 16)))]  # fmt: skip
    x = net.node("HardSwish", net.node("BatchNormalization", x, *statistics))
    deep = net.node("Relu", net.conv("block.conv", x, 16, 32))
    deep = net.conv("block.depthwise", deep, 32, 32, group=32)
    pooled = net.node("Flatten", net.node("GlobalAveragePool", deep))
    gate = net.node("Gemm", pooled, net.normal("gate.weight", 32, 32), net.normal("gate.bias", 32), transB=1)
    sizes = net.node("Slice", net.node("Shape", gate), net.integers("from", 0), net.integers("to", 2))
    shape = net.node("Concat", sizes, net.integers("ones", 1, 1), axis=0)
    gate = net.node("Reshape", net.node("HardSigmoid", gate), shape)
    deep = net.node("Mul", deep, gate)
    small = net.node("MaxPool", deep, kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])
    up = net.node("ConvTranspose", small, net.normal("up.weight", 32, 16, 2, 2), net.normal("up.bias", 16),
                  strides=[2, 2])  # fmt: skip
    x = net.node("Concat", up, x, axis=1)
    logits = net.conv("head", x, 32, classes, 1)
    scales = net.constant("scales", [1, 1, 2, 2], np.float32)
    return net.model(net.node("Resize", logits, "", scales, mode="linear", coordinate_transformation_mode="half_pixel"))
