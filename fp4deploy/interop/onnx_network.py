"""A plain ONNX convolution network as a torch module, whoever wrote the file.

    network = read_network(Path("lraspp.onnx"))        nn.Module: images [N, 3, H, W] -> the file's outputs

Nodes with constant weights become torch layers (`onnx_layers`) under the names that the file gives its weights; the
rest runs as torch functions (`onnx_operators`). So a network that was exported from torch has its modules' names again,
and everything here that takes a torch module takes it. FP16 and BF16 files are computed in FP32.

A file may be anyone's. What is refused, each in one message: subgraphs (loops, branches), operators of other domains
and unknown ones, quantised files, several inputs, element types, weights that are not finite, shapes that a node cannot
take. Shapes are tried first on tensors without data, where nothing can be allocated; more than `MAX_ELEMENTS` in one
value is refused. That the module computes what the file means is measured: `quantize_onnx` compares it with ONNX
Runtime.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from fp4deploy.errors import InputError, first_line
from fp4deploy.export.onnx.canonical import GEMM_OPS, foreign_graph, read_onnx
from fp4deploy.interop.onnx_layers import WeightedNode, call_layer, layer_of
from fp4deploy.interop.onnx_operators import FLOATS, MAX_HOST, OPERATORS, Call, as_tensor, host

MAX_ELEMENTS = 1 << 28  # of one value, for one image
MAX_NODES = 20_000
MAX_PIXELS = 16_384
READ_AS_HOST = ("Clip", "Pad", "Resize", "Upsample")  # their constants are numbers, not tensors
QUANTIZED = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul")
FOLDED = ("Cast", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # of constants: another constant
FAILURES = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_INTEGERS = (TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL)


class OnnxNetwork(nn.Module):
    """The nodes of a graph in order; layers are submodules, other constants buffers.

    input_shape: (C, H, W), None for an open extent. fixed_batch: the file's batch where it is not open.
    """

    def __init__(self, graph: onnx.GraphProto, opset: int) -> None:
        super().__init__()
        self.opset = opset
        constants = {tensor.name: tensor for tensor in graph.initializer}
        inputs = [value for value in graph.input if value.name not in constants]
        if len(inputs) != 1:
            raise InputError(f"The file has {len(inputs)} inputs; a network of images has one.")
        self.input_name = inputs[0].name
        self.fixed_batch, self.input_shape = _declared(inputs[0])
        self.output_names = [value.name for value in graph.output]
        self.nodes: list[tuple[Call, tuple[str, ...], tuple[str, ...], str]] = []  # call, inputs, outputs, layer
        self.hosts: dict[str, Any] = {}
        self.numbers: dict[str, Any] = {}  # small constants, for operators that want numbers
        self._buffers_of: dict[str, str] = {}
        self._read(graph, constants)
        self.output_layers = self._output_layers()

    def _output_layers(self) -> tuple[str, ...]:
        """Of each of several outputs the GEMM layer that comes last before it (`qat.output_layers`); () of one."""
        if len(self.output_names) < 2:
            return ()
        writer = {name: place for place, node in enumerate(self.nodes) for name in node[2]}
        found = []
        for output in self.output_names:
            waiting, seen, layers = [output], {output}, []
            while waiting:
                place = writer.get(waiting.pop())
                if place is None:  # the image, or a constant
                    continue
                call, inputs, _, path = self.nodes[place]
                if path and call.op in GEMM_OPS:
                    layers.append((place, path))
                else:
                    waiting.extend(set(inputs) - seen)
                    seen.update(inputs)
            found += [max(layers)[1]] if layers else []
        return tuple(dict.fromkeys(found))

    def _read(self, graph: onnx.GraphProto, constants: dict[str, TensorProto]) -> None:
        arrays = {name: _array(tensor) for name, tensor in constants.items()}
        known = {self.input_name, *arrays}
        names = _LayerNames(self)
        shared: dict[tuple[Any, ...], str] = {}
        for number, node in enumerate(graph.node):
            call = Call(node.op_type, node.name or f"node {number}", (), _attributes(node), len(node.output))
            if node.op_type == "Constant":
                arrays[node.output[0]] = _constant(call)
                known.add(node.output[0])
                continue
            if node.op_type in FOLDED and node.input and all(name in arrays for name in node.input):
                arrays[node.output[0]] = _folded(call, [arrays[name] for name in node.input])
                known.add(node.output[0])
                continue
            missing = [name for name in node.input if name and name not in known]
            if missing:
                raise call.refuse(f"it reads {missing[0]}, which nothing before it writes")
            operands = tuple(arrays.get(name) if name else None for name in node.input[1:])
            layer = layer_of(WeightedNode(node.op_type, call.name, call.attributes, operands))
            path = ""
            if layer is not None:
                key = (node.op_type, *node.input[1:], repr(sorted(call.attributes.items(), key=str)))
                path = shared.get(key) or names.add(layer, node.input[1], call)
                shared[key] = path
            elif node.op_type not in OPERATORS and node.op_type != "MatMul":
                raise call.refuse("not an operator that this reader knows")
            read = node.input[:1] if layer is not None else node.input
            self.nodes.append((call, tuple(read), tuple(node.output), path))
            known.update(node.output)
            for name in read:
                if name in arrays and name not in self.hosts and name not in self._buffers_of:
                    self._keep(name, arrays[name])
        for name in self.output_names:
            if name not in known or name in arrays:
                raise InputError(f"The output {name} is not computed from the image.")
        if not any(isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)) for layer in self.modules()):
            raise InputError("The file holds no convolution and no GEMM with constant weights: nothing to quantise.")

    def _keep(self, name: str, content: NDArray[Any]) -> None:
        if content.dtype.kind in "iub" and content.size <= MAX_HOST and content.ndim <= 1:
            self.hosts[name] = host(content.tolist())
            return
        if content.dtype.kind == "f" and content.size <= 16:
            self.numbers[name] = host(content.astype(float).tolist())
        buffer = f"constant_{len(self._buffers_of)}"
        kind = np.float32 if content.dtype.kind == "f" else np.bool_ if content.dtype.kind == "b" else np.int64
        self.register_buffer(buffer, torch.from_numpy(np.array(content, kind)))
        self._buffers_of[name] = buffer

    def forward(self, image: Tensor) -> Any:
        """The file's output, or its outputs by name; image float32 [N, C, H, W]."""
        values: dict[str, Any] = {self.input_name: image}
        values.update(self.hosts)
        values.update({name: getattr(self, buffer) for name, buffer in self._buffers_of.items()})
        last = self._last_readers()
        for number, (call, inputs, outputs, path) in enumerate(self.nodes):
            given = tuple(self._operand(values, call, at, name) for at, name in enumerate(inputs))
            ready = Call(call.op, call.name, given, call.attributes, call.outputs)
            try:
                found = self._compute(ready, path, image)
            except InputError:
                raise
            except FAILURES as error:
                if torch.compiler.is_compiling() or isinstance(error, torch.OutOfMemoryError):
                    raise
                raise ready.refuse(f"it cannot take its inputs ({first_line(error, 160)})") from error
            results = found if isinstance(found, tuple) else (found,)
            values.update(zip(outputs, results, strict=False))
            for name in inputs:
                if last.get(name) == number and name not in self.output_names:
                    values.pop(name, None)
        tensors = {name: as_tensor(values[name], image.device) for name in self.output_names}
        return next(iter(tensors.values())) if len(tensors) == 1 else tensors

    def _last_readers(self) -> dict[str, int]:
        return {name: number for number, (_, inputs, _, _) in enumerate(self.nodes) for name in inputs}

    def _operand(self, values: dict[str, object], call: Call, at: int, name: str) -> object:
        if not name:
            return None
        return self.numbers[name] if at and name in self.numbers and call.op in READ_AS_HOST else values[name]

    def _compute(self, call: Call, path: str, image: Tensor) -> object:
        if path:
            return call_layer(self.get_submodule(path), call)
        if call.op == "MatMul":
            return torch.matmul(call.tensor(0), call.tensor(1))
        if call.op == "Reshape" and self.fixed_batch is not None:
            call = _with_open_batch(call, self.fixed_batch, image)
        if call.op in ("Softmax", "LogSoftmax") and self.opset < 13 and "axis" not in call.attributes:
            raise call.refuse(f"without an axis in opset {self.opset}")
        found = OPERATORS[call.op](call)
        if call.op in ("Cast", "ConstantOfShape") and isinstance(found, Tensor) and found.is_floating_point():
            return found.to(image.dtype)  # FP32 here, FP16 while a copy in FP16 is exported
        return found

    def check_shapes(self, shape: tuple[int, ...]) -> int:
        """Run on tensors without data; the number of elements of the largest value, for one image.

        Args:
            shape: (C, H, W) of the image.

        Raises:
            InputError: a node cannot take its inputs, or a value is larger than `MAX_ELEMENTS`.
        """
        shadow = copy.deepcopy(self).to("meta").eval()
        compute, largest = shadow._compute, 0

        def checked(call: Call, path: str, image: Tensor) -> object:
            nonlocal largest
            found = compute(call, path, image)
            for each in found if isinstance(found, tuple) else (found,):
                count = each.numel() if isinstance(each, Tensor) else 0
                if count > MAX_ELEMENTS:
                    raise call.refuse(f"a value of {count:.3g} elements; at most {MAX_ELEMENTS:.3g} are computed")
                largest = max(largest, count)
            return found

        shadow._compute = checked  # type: ignore[method-assign]
        shadow(torch.empty((1, *shape), device="meta"))
        return largest


class _LayerNames:
    """Gives layers the names of their weights in the file, as nested modules where that is possible."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.taken: Counter[str] = Counter()

    def add(self, layer: nn.Module, weight: str, call: Call) -> str:
        """Register a layer; its path."""
        suffix = ".weight"
        wanted = weight.removesuffix(suffix) if weight.endswith(suffix) else call.name
        parts = [re.sub(r"\W", "_", part) for part in re.split(r"[./:]+", wanted.strip("./:")) if part]
        path = ".".join(parts[:12])
        if not path or len(path) > 200 or not self._is_free(parts[:12]):
            path = f"{call.op.lower()}_{len(self.taken)}"
            while hasattr(self.network, path):
                path += "_"
        *above, last = path.split(".")
        parent: nn.Module = self.network
        for part in above:
            if part not in parent._modules:
                parent.add_module(part, nn.ModuleDict())
            parent = parent.get_submodule(part)
        parent.add_module(last, layer)
        self.taken[path] += 1
        return path

    def _is_free(self, parts: list[str]) -> bool:
        """Whether each part above is or can be a container, and the last one names nothing yet."""
        place: nn.Module = self.network
        for part in parts[:-1]:
            if part not in place._modules:
                return not hasattr(place, part)
            place = place.get_submodule(part)
            if not isinstance(place, nn.ModuleDict):
                return False
        return not hasattr(place, parts[-1])


def read_network(path: Path) -> OnnxNetwork:
    """Read a file.

    Raises:
        InputError: it is missing or damaged, or holds what this module's page says is refused.
    """
    return network_of(read_onnx(path), path)


def network_of(model: onnx.ModelProto, source: object) -> OnnxNetwork:
    """The network of a checked model; `source` begins messages."""
    with foreign_graph(source):
        _refuse(model)
        opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
        try:
            return OnnxNetwork(model.graph, opset).eval()
        except InputError as error:
            raise InputError(f"{source}: {error}") from error


def _refuse(model: onnx.ModelProto) -> None:
    nodes = model.graph.node
    if len(nodes) > MAX_NODES:
        raise InputError(f"The graph has {len(nodes)} nodes; at most {MAX_NODES} are read.")
    quantised = next((node for node in nodes if node.op_type in QUANTIZED or "Quantize" in node.op_type), None)
    if quantised is not None:
        raise InputError(
            f"The file is quantised already ({quantised.op_type}). Give the FP16 or FP32 network that it was made of; "
            "what a quantised file asks for, and what becomes of it, says: fp4deploy audit"
        )
    for node in nodes:
        if node.domain not in ("", "ai.onnx"):
            raise InputError(
                f"{node.name or node.op_type}: the operator {node.op_type} is of the domain {node.domain}."
            )
        for attribute in node.attribute:
            if attribute.type in (onnx.AttributeProto.GRAPH, onnx.AttributeProto.GRAPHS):
                raise InputError(
                    f"{node.name or node.op_type}: {node.op_type} holds a subgraph; loops and branches are not read."
                )


def _declared(value: onnx.ValueInfoProto) -> tuple[int | None, tuple[int | None, ...]]:
    kind = value.type.tensor_type
    if kind.elem_type not in FLOATS:
        raise InputError(f"The input {value.name} holds no floating-point numbers.")
    sizes = [size.dim_value if size.HasField("dim_value") else None for size in kind.shape.dim]
    if len(sizes) != 4 or any(size is not None and not 0 < size <= MAX_PIXELS for size in sizes):
        raise InputError(f"The input {value.name} has the shape {sizes[:8]}; read are images [N, C, H, W].")
    if sizes[1] is None:
        raise InputError(f"The input {value.name} leaves its channels open.")
    return sizes[0], tuple(sizes[1:])


def _array(tensor: TensorProto) -> NDArray[Any]:
    """The content of a constant.

    Raises:
        InputError: an element type that is not read, or a value that is not finite.
    """
    if tensor.data_type not in (*FLOATS, *_INTEGERS, TensorProto.UINT8):
        kind = TensorProto.DataType.Name(tensor.data_type) if tensor.data_type in TensorProto.DataType.values() else "?"
        raise InputError(f"The constant {tensor.name} is {kind}; read are floating-point numbers and shapes.")
    found = numpy_helper.to_array(tensor)
    if tensor.data_type in FLOATS:
        with np.errstate(over="ignore"):
            found = found.astype(np.float32)
        if not np.isfinite(found).all():
            raise InputError(f"The constant {tensor.name} holds NaN or infinity.")
    return found


def _constant(call: Call) -> NDArray[Any]:
    for name, kind in (("value", None), ("value_float", np.float32), ("value_floats", np.float32),
                       ("value_int", np.int64), ("value_ints", np.int64)):  # fmt: skip
        if name in call.attributes:
            return np.array(call.attributes[name], kind)
    raise call.refuse("a constant of text or a sparse one")


def _folded(call: Call, contents: list[NDArray[Any]]) -> Any:
    """A constant that is a constant in another layout or type."""
    x, *rest = contents
    tensor = torch.from_numpy(np.ascontiguousarray(x))
    inputs = (tensor.reshape(x.shape), *(host(each.tolist()) for each in rest))
    try:
        return cast(Tensor, OPERATORS[call.op](Call(call.op, call.name, inputs, call.attributes))).contiguous().numpy()
    except FAILURES as error:
        raise call.refuse("it cannot take its constants") from error


def _attributes(node: onnx.NodeProto) -> dict[str, object]:
    found: dict[str, Any] = {}
    for attribute in node.attribute:
        value = onnx.helper.get_attribute_value(attribute)
        if isinstance(value, TensorProto):
            value = _array(value)
        elif isinstance(value, bytes):
            value = value.decode("utf-8", errors="replace")
        elif not isinstance(value, (int, float)):
            value = list(value)
        found[attribute.name] = value
    return found


def _with_open_batch(call: Call, batch: int, image: Tensor) -> Call:
    """A Reshape of a file for a fixed batch, for any: a leading extent that is that batch becomes the image's."""
    x, sizes = call.inputs[0], call.optional(1)
    if not isinstance(x, Tensor) or not isinstance(sizes, np.ndarray) or not sizes.size:
        return call
    opened = sizes.reshape(-1).copy()
    if not isinstance(opened[0], int) or opened[0] != batch or x.ndim < 1:
        return call
    opened[0] = image.shape[0]
    return Call(call.op, call.name, (x, opened, *call.inputs[2:]), call.attributes, call.outputs)
