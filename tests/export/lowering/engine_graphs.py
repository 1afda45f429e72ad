"""Small canonical graphs with random FP4 weights, so that the engine half is tested without the exporter."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import numpy as np
import onnx
from onnx import TensorProto as T
from onnx import helper, numpy_helper

from fp4deploy.export.onnx.qdq import dynamic_quantize_function

NODE = tuple[str, int, int, int]  # value, channels, height, width


@dataclass
class CanonicalGraph:
    """Adds layers one by one; every method takes and gives (value, channels, height, width)."""

    seed: int = 0
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: list[onnx.TensorProto] = field(default_factory=list)
    layers: dict[str, dict[str, str]] = field(default_factory=dict)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def image(self, height: int, width: int, channels: int = 3) -> NODE:
        """Graph input "image" [N, channels, height, width] in FP16."""
        self.inputs.append(helper.make_tensor_value_info("image", T.FLOAT16, ["N", channels, height, width]))
        return "image", channels, height, width

    def constant(self, name: str, array: np.ndarray) -> str:
        self.initializers.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def raw(self, name: str, kind: int, shape: list[int], data: np.ndarray) -> str:
        self.initializers.append(helper.make_tensor(name, kind, shape, data.tobytes(), raw=True))
        return name

    def add(self, op: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def _weight(self, name: str, out: int, taps: int, channels: int) -> str:
        """FP4 weight [out, taps * channels] dequantised to FP16."""
        size = taps * channels
        self.raw(
            f"{name}.weight.codes",
            T.FLOAT4E2M1,
            [out, size],
            self.random.integers(0, 256, out * size // 2, dtype=np.uint8),
        )
        self.raw(
            f"{name}.weight.scales",
            T.FLOAT8E4M3FN,
            [out, size // 16],
            self.random.integers(0x40, 0x7E, out * size // 16, dtype=np.uint8),
        )
        self.constant(f"{name}.weight.global_scale", np.float32(1.0 / (6 * 448) / np.sqrt(size)))
        scale = self.add(
            "DequantizeLinear",
            [f"{name}.weight.scales", f"{name}.weight.global_scale"],
            f"{name}.weight.scales_dequantized",
        )
        weight = self.add(
            "DequantizeLinear",
            [f"{name}.weight.codes", scale],
            f"{name}.weight.dequantized",
            axis=1,
            block_size=16,
        )
        return self.add("Cast", [weight], f"{name}.weight.half", to=T.FLOAT16)

    def _activation(self, name: str, x: NODE, amax: float) -> NODE:
        """x quantised in blocks of 16 channels and dequantised; channels padded to a multiple of 16."""
        value, channels, height, width = x
        padded = -(-channels // 16) * 16
        if padded != channels:
            pads = self.constant(f"{name}.input.pads", np.array([0, 0, 0, 0, 0, padded - channels, 0, 0], np.int64))
            value = self.add("Pad", [value, pads], f"{name}.input.padded")
        scale = self.constant(f"{name}.input.global_scale", np.float32(amax / (6 * 448)))
        flat = self.constant(f"{name}.input.flat_shape", np.array([0, padded, height * width], np.int64))
        image = self.constant(f"{name}.input.image_shape", np.array([0, padded, height, width], np.int64))
        value = self.add("Reshape", [value, flat], f"{name}.input.flat")
        self.nodes.append(
            helper.make_node(
                "TRT_FP4DynamicQuantize",
                [value, scale],
                [f"{name}.input.codes", f"{name}.input.scales"],
                name=f"{name}.input.quantize",
                domain="trt",
                axis=1,
                block_size=16,
                scale_type=17,
            )
        )
        block = self.add("DequantizeLinear", [f"{name}.input.scales", scale], f"{name}.input.scales_dequantized")
        value = self.add(
            "DequantizeLinear", [f"{name}.input.codes", block], f"{name}.input.dequantized", axis=1, block_size=16
        )
        value = self.add("Cast", [value], f"{name}.input.half", to=T.FLOAT16)
        return self.add("Reshape", [value, image], f"{name}.input.image"), padded, height, width

    def _plain_weight(self, name: str, shape: list[int]) -> str:
        fan = int(np.prod(shape[1:]))
        return self.constant(f"{name}.weight", (self.random.standard_normal(shape) / np.sqrt(fan)).astype(np.float16))

    def _bias(self, name: str, out: int) -> str:
        return self.constant(f"{name}.bias", self.random.standard_normal(out).astype(np.float16) * np.float16(0.1))

    def conv(
        self,
        name: str,
        x: NODE,
        out: int,
        kernel: int = 3,
        fp4: bool = True,
        amax: float = 4.0,
        stride: int = 1,
        dilation: int = 1,
    ) -> NODE:
        """Convolution with "same" padding; FP4 weights and activations, or plain FP16."""
        _, channels, height, width = x
        bias = self._bias(name, out)
        precision = "FP4" if fp4 else "FP16"
        self.layers[name] = {"kind": "Conv2d", "precision": precision, "reason": "" if fp4 else "kept by the recipe"}
        if fp4:
            x = self._activation(name, x, amax)
            half = self._weight(name, out, kernel * kernel, x[1])
            shape = self.constant(f"{name}.weight.shape", np.array([out, kernel, kernel, x[1]], np.int64))
            ohwi = self.add("Reshape", [half, shape], f"{name}.weight.ohwi")
            weight = self.add("Transpose", [ohwi], f"{name}.weight.oihw", perm=[0, 3, 1, 2])
        else:
            weight = self._plain_weight(name, [out, channels, kernel, kernel])
        pad = dilation * (kernel // 2)
        self.add(
            "Conv",
            [x[0], weight, bias],
            name,
            pads=[pad] * 4,
            kernel_shape=[kernel, kernel],
            strides=[stride, stride],
            dilations=[dilation, dilation],
        )
        return name, out, -(-height // stride), -(-width // stride)

    def up(self, name: str, x: NODE, out: int, fp4: bool = True, amax: float = 4.0) -> NODE:
        """Transposed convolution 2x2 stride 2."""
        bias = self._bias(name, out)
        precision = "FP4" if fp4 else "FP16"
        self.layers[name] = {"kind": "ConvTranspose2d", "precision": precision, "reason": ""}
        if fp4:
            x = self._activation(name, x, amax)
            half = self._weight(name, out, 4, x[1])
            shape = self.constant(f"{name}.weight.shape", np.array([out, 2, 2, x[1]], np.int64))
            ohwi = self.add("Reshape", [half, shape], f"{name}.weight.ohwi")
            weight = self.add("Transpose", [ohwi], f"{name}.weight.iohw", perm=[3, 0, 1, 2])
        else:
            weight = self._plain_weight(name, [x[1], out, 2, 2])
        self.add("ConvTranspose", [x[0], weight, bias], name, strides=[2, 2], kernel_shape=[2, 2])
        return name, out, 2 * x[2], 2 * x[3]

    def norm_relu(self, name: str, x: NODE, groups: int = 8) -> NODE:
        """GroupNorm and ReLU."""
        value, channels, height, width = x
        weight = self.constant(f"{name}.weight", np.ones(channels, np.float16))
        bias = self.constant(f"{name}.bias", np.zeros(channels, np.float16))
        self.add("GroupNormalization", [value, weight, bias], name, num_groups=groups, epsilon=1e-5)
        return self.add("Relu", [name], f"{name}.relu"), channels, height, width

    def pool(self, name: str, x: NODE) -> NODE:
        """Max pooling 2x2."""
        self.add("MaxPool", [x[0]], name, kernel_shape=[2, 2], strides=[2, 2])
        return name, x[1], x[2] // 2, x[3] // 2

    def concat(self, name: str, a: NODE, b: NODE) -> NODE:
        """Concatenation along the channels."""
        return self.add("Concat", [a[0], b[0]], name, axis=1), a[1] + b[1], a[2], a[3]

    def model(self, output: NODE, function: bool = True) -> onnx.ModelProto:
        """Finish with the graph output "logits"."""
        value, channels, height, width = output
        self.nodes.append(helper.make_node("Identity", [value], ["logits"], name="logits"))
        graph = helper.make_graph(
            self.nodes,
            "canonical",
            self.inputs,
            [helper.make_tensor_value_info("logits", T.FLOAT16, ["N", channels, height, width])],
            self.initializers,
        )
        model = helper.make_model(
            graph,
            opset_imports=[helper.make_opsetid("", 23), helper.make_opsetid("trt", 1)],
            ir_version=11,
            functions=[dynamic_quantize_function()] if function else [],
        )
        helper.set_model_props(model, {"fp4deploy.layers": json.dumps(self.layers)})
        return model


def widened(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same graph computed in FP32 where it says FP16, so that only the order of additions is left to differ."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for tensor in wide.graph.initializer:
        if tensor.data_type == T.FLOAT16:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float32), tensor.name))
    for value in (*wide.graph.input, *wide.graph.output):
        value.type.tensor_type.elem_type = T.FLOAT
    for node in wide.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i == T.FLOAT16:
                attribute.i = T.FLOAT
    del wide.graph.value_info[:]
    return wide


def unet_graph(
    scale: float = 0.25, height: int = 96, width: int = 96, classes: int = 4, fp4: bool = True, function: bool = True
) -> onnx.ModelProto:
    """The project's UNet as a canonical graph with random weights."""
    graph = CanonicalGraph()
    widths = [int(scale * width_) for width_ in (64, 128, 256, 512, 1024)]

    def block(name: str, x: NODE, out: int, first: bool = False) -> NODE:
        x = graph.norm_relu(f"{name}.norm1", graph.conv(f"{name}.conv1", x, out, fp4=fp4 and not first))
        return graph.norm_relu(f"{name}.norm2", graph.conv(f"{name}.conv2", x, out, fp4=fp4))

    x = graph.image(height, width)
    skips = []
    for level, channels in enumerate(widths):
        x = block(f"encoder.{level}", graph.pool(f"pool.{level}", x) if level else x, channels, first=level == 0)
        skips.append(x)
    x = skips.pop()
    for level, channels in enumerate(reversed(widths[:-1])):
        x = graph.concat(f"concat.{level}", skips.pop(), graph.up(f"up.{level}", x, channels, fp4=fp4))
        x = block(f"decoder.{level}", x, channels)
    return graph.model(graph.conv("head", x, classes, kernel=1, fp4=False), function=function)


def with_open_size(model: onnx.ModelProto) -> onnx.ModelProto:
    """The graph for images of any size, as an export with --dynamic-size writes it: shapes are read when it runs."""
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    for value in (*changed.graph.input, *changed.graph.output):
        for extent, name in zip(list(value.type.tensor_type.shape.dim)[2:], "HW", strict=True):
            extent.dim_param = name if value.name == "image" else f"{value.name}_{name}"
    del changed.graph.value_info[:]
    tensors = {tensor.name: tensor for tensor in changed.graph.initializer}
    nodes, sources = [], {}
    for node in list(changed.graph.node):
        name = node.name.rpartition(".")[0]
        if node.name.endswith(".input.flat"):
            sources[name] = node.input[0]
            flat = numpy_helper.to_array(tensors[node.input[1]])
            tensors[node.input[1]].CopyFrom(numpy_helper.from_array(np.array([*flat[:2], -1], np.int64), node.input[1]))
        if node.name.endswith(".input.image"):
            nodes.append(helper.make_node("Shape", [sources[name]], [f"{name}.size"], name=f"{name}.size"))
            node.input[1] = f"{name}.size"
        nodes.append(node)
    del changed.graph.node[:]
    changed.graph.node.extend(nodes)
    return changed
