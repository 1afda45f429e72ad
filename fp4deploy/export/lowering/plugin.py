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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import InPlacePass, PassResult

from fp4deploy.export.lowering.pattern import Fp4Layer, find_fp4_layers
from fp4deploy.export.lowering.plan import MARK
from fp4deploy.export.lowering.plugin_match import Source, read_source, scalar
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


class ConvToPlugin(InPlacePass):
    """Lower the named FP4 convolutions, as far as `read_source` can read them, to plugins."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = frozenset(names)

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
        tape = _Tape(self.graph, layer, self.uses[layer.name])
        own = scalar(layer.quantize.inputs[1])
        roles = ("quantize", "quantize_second")
        images = [self._image(tape, role, *part, own) for role, part in zip(roles, source.parts, strict=False)]
        plugin = convolution_plugin(len(images), scale is not None, layer.kind == "ConvTranspose2d")
        inputs = [value for image in images for value in (image.codes, image.scales, tape.number("input_scale", own))]
        inputs += _weight(tape)
        if scale is not None:
            inputs.append(tape.number("output_amax", float(global_amax(np.float32(scale)))))
        attributes = {
            "kernel": list(layer.kernel),
            "channels": [image.channels for image in images],
            "out_channels": [layer.out_channels],
            "stride": [source.stride],
            "padding": [source.padding],
            "dilation": [source.dilation],
            "relu": [int(result is not layer.compute.outputs[0])],
        }
        assert images[0].codes.shape is not None
        outputs = tape.plugin("convolution", plugin, inputs, list(images[0].codes.shape), attributes)
        if scale is not None:
            self.packed[result, scale] = Packed(outputs[0], outputs[1], layer.out_channels)
            return
        image = tape.insert("image", "Transpose", outputs, {"perm": [0, 3, 1, 2]}, domain="")[0]
        image.dtype, image.shape = ir.DataType.FLOAT16, result.shape
        result.replace_all_uses_with(image, replace_graph_outputs=True)
        result.name, image.name = f"{result.name}.lowered", result.name
        self.moved[result] = image

    def _image(self, tape: _Tape, role: str, part: ir.Value, channels: int, scale: float) -> Packed:
        """A source, packed: by the plugin that computes it, by an existing quantiser, or by a new one."""
        if (part, scale) not in self.packed:
            assert tape.layer.shape is not None
            image = self.moved.get(part, part)
            shape = [image.shape[0] if image.shape is not None else None, channels, *tape.layer.shape[1:]]
            inputs = [image, tape.number("input_amax", float(global_amax(np.float32(scale))))]
            codes, scales = tape.plugin(role, QUANTIZE, inputs, shape, {"channels": [channels]})
            self.packed[part, scale] = Packed(codes, scales, channels)
        return self.packed[part, scale]


class _Tape:
    """Puts constants and nodes named after one layer in front of its convolution; `use` counts its places, from 1."""

    def __init__(self, graph: ir.Graph, layer: Fp4Layer, use: int) -> None:
        self.graph, self.layer = graph, layer
        self.prefix = f"{layer.name}.plugin" if use == 1 else f"{layer.name}.plugin_{use}"

    def number(self, role: str, value: float) -> ir.Value:
        return self.constant(role, np.array([value], np.float32))

    def constant(self, role: str, array: np.ndarray) -> ir.Value:
        """A module used twice shares its constants, unless they differ."""
        name, number = f"{self.layer.name}{MARK}{role}", 1
        while (known := self.graph.initializers.get(name)) is not None:
            if known.const_value is not None and known.const_value.tobytes() == array.tobytes():
                return known
            number += 1
            name = f"{self.layer.name}{MARK}{role}_{number}"
        tensor = ir.tensor(array, name=name)
        value = ir.val(name, tensor.dtype, array.shape, const_value=tensor)
        self.graph.register_initializer(value)
        return value

    def plugin(
        self, role: str, plugin: Plugin, inputs: list[ir.Value], image: Sequence[Any], attributes: dict[str, list[int]]
    ) -> Sequence[ir.Value]:
        """A plugin's node for an activation of this shape. `aot`: the engine stores the compiled kernel, no Python."""
        found = {**attributes, "plugin_namespace": NAMESPACE, "plugin_version": VERSION, "aot": 1}
        outputs = self.insert(role, plugin.name, inputs, found, NAMESPACE, len(plugin.outputs))
        types, shapes = plugin.types()[len(inputs) :], plugin.output_shapes([image], attributes)
        for value, kind, shape in zip(outputs, types, shapes, strict=True):
            value.dtype, value.shape = _TYPES[kind], ir.Shape(shape)
        return outputs

    def insert(
        self, role: str, op: str, inputs: Sequence[ir.Value], attributes: dict[str, Any], domain: str, outputs: int = 1
    ) -> Sequence[ir.Value]:
        name = f"{self.prefix}.{role}"
        node = ir.node(op, list(inputs), attributes, domain=domain, num_outputs=outputs, name=name)
        for index, value in enumerate(node.outputs):
            value.name = f"{name}.{index}" if outputs > 1 else name
        self.graph.insert_before(self.layer.compute, node)
        return node.outputs


def _weight(tape: _Tape) -> list[ir.Value]:
    """Codes, block scales, global scale and bias of a layer, as the plugins take them."""
    layer = tape.layer
    assert layer.shape is not None
    rows, channels = (layer.out_channels, *layer.kernel), layer.shape[0]
    codes = _bytes(layer.codes).reshape(*rows, channels // 2)
    scales = _bytes(layer.scales).reshape(*rows, channels // NVFP4_BLOCK)
    decode = next(node for node, index in layer.scales.uses() if node.op_type == "DequantizeLinear" and index == 0)
    bias = layer.compute.inputs[2] if len(layer.compute.inputs) > 2 else None
    given = ir.convenience.get_const_tensor(bias) if bias is not None else None
    values = np.zeros(layer.out_channels, np.float32) if given is None else given.numpy().astype(np.float32)
    return [
        tape.constant("weight_codes", codes),
        tape.constant("weight_scales", scales),
        tape.number("weight_scale", scalar(decode.inputs[1])),
        tape.constant("bias", values),
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
