"""Lower FP4 convolutions to plugins: `--conv plugin`, for TensorRT, which has no FP4 convolution of its own.

    x -> nvfp4_quantize -> codes, scales -> nvfp4_conv2d -> Transpose -> y            FP16 in and out, [N,C,H,W]
    x -> nvfp4_quantize -> codes, scales -> nvfp4_conv2d_packed -> codes, scales -> nvfp4_conv2d -> ...

The first form is a layer that something else reads, such as a GroupNorm. The second is a convolution whose output is
only quantised again: then the codes pass on, and no FP16 activation is written between the two. A concatenation or a
ReLU between them changes nothing:

* A concatenation of two activations whose first has whole blocks of 16 channels is quantised in two halves, each where
  it is computed, and the convolution reads two sources. No block spans both, so the codes are the same.
* A ReLU that alone reads a convolution becomes part of it.

Weights keep their bytes: codes and block scales become INT8 tensors [O,KH,KW,C/2] and [O,KH,KW,C/16], the order they
are stored in already. What the plugins take, tensor by tensor: docs/plugins.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import PassResult

from fp4deploy.export.lowering.pattern import Fp4Layer, NamedLayers, find_fp4_layers
from fp4deploy.export.lowering.plan import MARK
from fp4deploy.export.lowering.plugin_match import Source, read_source, scalar
from fp4deploy.export.onnx.writer import NodeWriter
from fp4deploy.formats import NVFP4_BLOCK, global_amax
from fp4deploy.plugins.tensorrt.definitions import NAMESPACE, QUANTIZE, VERSION, Plugin, convolution_plugin

_PASSED = ("Cast", "Reshape", "Transpose", "Identity", "DequantizeLinear")
_TYPES = {"FP16": ir.DataType.FLOAT16, "FP32": ir.DataType.FLOAT, "INT8": ir.DataType.INT8}


@dataclass(frozen=True)
class Packed:
    """A quantised activation in the graph."""

    codes: ir.Value
    scales: ir.Value
    channels: int


class ConvToPlugin(NamedLayers):
    """Lower the named FP4 convolutions, as far as `read_source` can read them, to plugins."""

    def call(self, model: ir.Model) -> PassResult:
        found = ((layer, read_source(layer)) for layer in find_fp4_layers(model) if layer.name in self.names)
        jobs = [(layer, source) for layer, source in found if source is not None]
        if jobs:
            _Rewriter(model.graph, jobs).rewrite()
            model.graph.opset_imports[NAMESPACE] = int(VERSION)
        return PassResult(model, bool(jobs))


class _Rewriter:
    """Looks at the whole graph first, then writes the plugins in the order in which the layers run."""

    def __init__(self, graph: ir.Graph, jobs: list[tuple[Fp4Layer, Source]]) -> None:
        self.graph, self.jobs = graph, jobs
        computing = {layer.compute for layer, _ in jobs}
        self.quantizers = {layer.quantize for layer, _ in jobs if _only_read_by(layer.quantize.outputs, computing)}
        whole = {part for _, source in jobs for part, _ in source.parts}  # read as they are, also by other layers
        self.path = {node for _, source in jobs for node in source.path if node.outputs[0] not in whole}
        self.packed: dict[tuple[ir.Value, float], Packed] = {}
        self.moved: dict[ir.Value, ir.Value] = {}  # FP16 results of plugins, by the value they replace
        self.uses = Counter[str]()

    def rewrite(self) -> None:
        for layer, source, (result, scale) in [(*job, self._result(job[0])) for job in self.jobs]:
            self._replace(layer, source, result, scale)

    def _result(self, layer: Fp4Layer) -> tuple[ir.Value, float | None]:
        """(the value that the plugin stands for, ReLU included; the global scale that all its readers quantise by)."""
        value = layer.compute.outputs[0]
        users = [node for node, _ in value.uses()]
        if len(users) == 1 and users[0].op_type == "Relu" and not value.is_graph_output():
            value = users[0].outputs[0]
        scales = self._scales(value)
        return value, scales.pop() if scales is not None and len(scales) == 1 else None

    def _scales(self, value: ir.Value) -> set[float] | None:
        """Global scales that a value is quantised by; None where it is also read in another way, or not at all."""
        found: set[float] = set()
        for node, _ in value.uses():
            if node in self.quantizers:
                found.add(scalar(node.inputs[1]))
                continue
            below = self._scales(node.outputs[0]) if node in self.path else None
            if below is None:
                return None
            found |= below
        return None if value.is_graph_output() or not found else found

    def _replace(self, layer: Fp4Layer, source: Source, result: ir.Value, scale: float | None) -> None:
        self.uses[layer.name] += 1
        number = f"_{self.uses[layer.name]}" if self.uses[layer.name] > 1 else ""
        writer = NodeWriter(self.graph, f"{layer.name}{MARK}{number}", before=layer.compute)
        own = scalar(layer.quantize.inputs[1])
        roles = ("quantize", "quantize_second")
        sources = [self._packed(writer, layer, role, *part) for role, part in zip(roles, source.parts, strict=False)]
        plugin = convolution_plugin(len(sources), scale is not None, layer.kind == "ConvTranspose2d")
        inputs = [each for x in sources for each in (x.codes, x.scales, _number(writer, layer, "input_scale", own))]
        inputs += _weight(writer, layer)
        if scale is not None:
            inputs.append(_number(writer, layer, "output_amax", float(global_amax(np.float32(scale)))))
        attributes = {
            "kernel": list(layer.kernel),
            "channels": [x.channels for x in sources],
            "out_channels": [layer.out_channels],
            "stride": [source.stride],
            "padding": [source.padding],
            "dilation": [source.dilation],
            "relu": [int(result is not layer.compute.outputs[0])],
        }
        assert sources[0].codes.shape is not None
        outputs = _add_plugin(writer, "convolution", plugin, inputs, list(sources[0].codes.shape), attributes)
        if scale is not None:
            self.packed[result, scale] = Packed(outputs[0], outputs[1], layer.out_channels)
            return
        nchw = writer.add("Transpose", "image", outputs[0], dtype=ir.DataType.FLOAT16, perm=[0, 3, 1, 2])
        writer.replace(result, nchw)
        self.moved[result] = nchw

    def _packed(self, writer: NodeWriter, layer: Fp4Layer, role: str, part: ir.Value, channels: int) -> Packed:
        """A source, packed: by the plugin that computes it, by an existing quantiser, or by a new one."""
        scale = scalar(layer.quantize.inputs[1])
        if (part, scale) not in self.packed:
            assert layer.shape is not None
            x = self.moved.get(part, part)
            shape = [x.shape[0] if x.shape is not None else None, channels, *layer.shape[1:]]
            inputs = [x, _number(writer, layer, "input_amax", float(global_amax(np.float32(scale))))]
            codes, scales = _add_plugin(writer, role, QUANTIZE, inputs, shape, {"channels": [channels]})
            self.packed[part, scale] = Packed(codes, scales, channels)
        return self.packed[part, scale]


def _add_plugin(
    writer: NodeWriter,
    role: str,
    plugin: Plugin,
    inputs: list[ir.Value],
    shape: Sequence[object],
    attributes: dict[str, list[int]],
) -> Sequence[ir.Value]:
    """A plugin's node for an activation of this shape. `aot`: the engine stores the compiled kernel, no Python."""
    types, shapes = plugin.types()[len(inputs) :], plugin.output_shapes([shape], attributes)
    names = [f"{role}.{index}" for index in range(len(types))] if len(types) > 1 else [role]
    outputs = [writer.value(name, _TYPES[kind], size) for name, kind, size in zip(names, types, shapes, strict=True)]
    found = {**attributes, "plugin_namespace": NAMESPACE, "plugin_version": VERSION, "aot": 1}
    return writer.add_node(plugin.name, role, inputs, outputs, found, domain=NAMESPACE)


def _constant(writer: NodeWriter, layer: Fp4Layer, role: str, array: np.ndarray) -> ir.Value:
    """A constant of a plugin, shared by all places where the layer is called."""
    return writer.constant(role, array, prefix=f"{layer.name}{MARK}")


def _number(writer: NodeWriter, layer: Fp4Layer, role: str, value: float) -> ir.Value:
    return _constant(writer, layer, role, np.array([value], np.float32))


def _weight(writer: NodeWriter, layer: Fp4Layer) -> list[ir.Value]:
    """Codes, block scales, global scale and bias of a layer, as the plugins take them."""
    assert layer.shape is not None
    rows, channels = (layer.out_channels, *layer.kernel), layer.shape[0]
    codes = _bytes(layer.codes).reshape(*rows, channels // 2)
    scales = _bytes(layer.scales).reshape(*rows, channels // NVFP4_BLOCK)
    decode = next(node for node, index in layer.scales.uses() if node.op_type == "DequantizeLinear" and index == 0)
    bias = layer.compute.inputs[2] if len(layer.compute.inputs) > 2 else None
    given = ir.convenience.get_const_tensor(bias) if bias is not None else None
    values = np.zeros(layer.out_channels, np.float32) if given is None else given.numpy().astype(np.float32)
    return [
        _constant(writer, layer, "weight_codes", codes),
        _constant(writer, layer, "weight_scales", scales),
        _number(writer, layer, "weight_scale", scalar(decode.inputs[1])),
        _constant(writer, layer, "bias", values),
    ]


def _bytes(value: ir.Value) -> np.ndarray:
    assert value.const_value is not None
    return np.frombuffer(value.const_value.tobytes(), np.int8)


def _only_read_by(values: Iterable[ir.Value], nodes: set[ir.Node]) -> bool:
    """Whether only these nodes read the values in the end, below reshaping and dequantising."""
    return all(
        not value.is_graph_output()
        and all(
            node in nodes or (node.op_type in _PASSED and _only_read_by(node.outputs, nodes))
            for node, _ in value.uses()
        )
        for value in values
    )
