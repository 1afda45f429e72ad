"""A captured graph and its trained layers -> the nodes and tensors of a packed network.

Each value is written in the forms that its readers need, and in no other:

| read by | form |
|---|---|
| a layer that is quantised | packed with its `input_amax`, along the axis that it contracts |
| several of them with equal scales | one packed form |
| anything else, or an output of the network | plain |

Three patterns become one node each:

* GroupNorm and the ReLU that alone reads it: `group_norm_relu`. The bias of a convolution that only this norm reads is
  added there, and a max pooling 2 x 2 of the ReLU becomes pooled forms of the same node.
* A ReLU that alone reads a convolution or linear layer: its epilogue.
* A concatenation of two values along the channels, where the first has whole blocks of 16: a quantised convolution that
  reads it takes both, packed with its own scale. Nothing is concatenated then.

BatchNorm becomes `affine`, y = x scale + shift with scale = gamma / sqrt(var + eps) and shift = beta - mean scale,
computed in FP64 and kept in FP32. It is not folded into the weight: the codes are those that were trained.

Weights have the bytes of the canonical ONNX file (`layer_constants`); other parameters are FP16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import LayerConstants, layer_constants
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph import ir
from fp4deploy.graph.sizes import Size, axes_of
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Form, Graph, Input, Output
from fp4deploy.qat.layers import QuantizedLayer

Tensors = dict[str, torch.Tensor]
HOLDING = ("reshape", "expand", "resize", "slice", "select", "pad")  # nodes that may hold sizes
LOGITS = "logits"


def packed_graph(captured: ir.Graph, model: nn.Module, digits: bool = False) -> tuple[Graph, Tensors]:
    """The packed network of a model.

    Args:
        captured: the graph of the model with plain layers.
        model: the same model with its quantised layers, its parameters as deployed (`qat.round_to_deployed`).
        digits: its input is encoded as multi-term FP4 before the graph begins.

    Raises:
        InputError: an operation that no node computes, a layer whose recipe has no packed form, a value that is not
            finite.
    """
    return _Writer(captured, model, digits).write()


class _Writer:
    def __init__(self, captured: ir.Graph, model: nn.Module, digits: bool) -> None:
        self.captured, self.model, self.digits = captured, model, digits
        self.modules = dict(model.named_modules())
        self.state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.constants: dict[str, LayerConstants] = {}
        self.readers = captured.readers()
        self.producers = {node.name: node for node in captured.nodes}
        self.kept = {value for _, value in captured.outputs}  # outputs of the network
        self.folded: dict[str, str] = {}  # norm or layer -> the relu that its node computes as well
        self.pooled: dict[str, str] = {}  # pooling -> the value whose node writes it
        self.joined: set[tuple[str, str]] = set()  # (concatenation, convolution that reads its two sources)
        self.needed: dict[str, list[Form]] = {}  # value -> its forms, in the order of their readers
        self.names: set[str] = set()
        self.tensors: Tensors = {}
        self.nodes: list[packed.Node] = []

    def write(self) -> tuple[Graph, Tensors]:
        for node in self.captured.nodes:
            layer = self._quantized(node)
            if layer is not None and node.layer not in self.constants:
                self.constants[node.layer] = layer_constants(node.layer, layer)
            self._fold(node)
        for node in self.captured.nodes:
            self._join(node)
        self._name_forms()
        inputs = [self._input(name) for name in self.captured.inputs]
        for node in self.captured.nodes:
            self._emit(node)
        outputs = [Output(name=name, activation=self._read(value, None)) for name, value in self.captured.outputs]
        graph = Graph(inputs=inputs, nodes=self.nodes, outputs=outputs, tensors={}, digits=self.digits)
        return graph, self.tensors

    # Patterns

    def _only_reader(self, value: str) -> ir.Node | None:
        """The one node that reads a value; None where there are several, or the network gives it out."""
        readers = self.readers[value]
        return readers[0] if len(readers) == 1 and value not in self.kept else None

    def _fold(self, node: ir.Node) -> None:
        reader = self._only_reader(node.name)
        fused = node.op == "group_norm" and {"weight", "bias"} <= set(node.parameters) and self._rank(node.name) == 4
        if (fused or node.op in ("conv", "linear")) and reader is not None and reader.op == "relu":
            self.folded[node.name] = reader.name
            for pooling in self.readers[reader.name] if fused else []:
                window = [pooling.attributes.get(name) for name in ("kernel_size", "stride", "padding", "dilation")]
                plain = window == [(2, 2), (2, 2), (0, 0), (1, 1)] and not pooling.attributes["ceil_mode"]
                if pooling.op == "max_pool" and plain and self._halves(reader.name):
                    self.pooled[pooling.name] = reader.name

    def _halves(self, value: str) -> bool:
        """Height and width are even, for all sizes of the inputs as far as they are known."""
        return all(not isinstance(size, int) or size % 2 == 0 for size in self.captured.values[value].shape[2:])

    def _join(self, node: ir.Node) -> None:
        """Remember which convolutions take the two sources of a concatenation."""
        source = self.producers.get(node.inputs.get("input", ""))
        if source is None or source.op != "concat" or source.attributes["dim"] != 1 or len(source.inputs) != 2:
            return
        layer = self._quantized(node)
        first = self.captured.values[source.inputs.get("tensors.0", source.name)].shape[1]
        if (
            layer is None
            or node.op != "conv"
            or node.attributes["groups"] != 1
            or len(set(source.inputs.values())) != 2
        ):
            return
        if isinstance(first, int) and first % NVFP4_BLOCK == 0 and not source.parameters:
            self.joined.add((source.name, node.name))

    # Forms

    def _quantized(self, node: ir.Node) -> QuantizedLayer | None:
        """The quantised layer whose product a node is."""
        if node.op not in ("conv", "conv_transpose", "linear") or "weight" not in node.parameters:
            return None
        module = self.modules.get(_owner(node))
        return module if isinstance(module, QuantizedLayer) else None

    def _name_forms(self) -> None:
        """The forms of every value, found from its readers."""
        for node in self.captured.nodes:
            if node.name in self.pooled or node.name in self.folded.values():
                continue
            for value in self._sources(node):
                self._need(value, node)
        for value in (value for _, value in self.captured.outputs):
            self._need(value, None)

    def _sources(self, node: ir.Node) -> list[str]:
        """The values that a node reads."""
        source = node.inputs.get("input", "")
        if (source, node.name) in self.joined:
            return list(self.producers[source].inputs.values())
        if node.op == "concat" and self._written_nowhere(node):
            return []
        return list(node.inputs.values())

    def _written_nowhere(self, concat: ir.Node) -> bool:
        taken = [(concat.name, reader.name) in self.joined for reader in self.readers[concat.name]]
        return bool(taken) and all(taken) and concat.name not in self.kept

    def _need(self, value: str, reader: ir.Node | None) -> None:
        pooled = value in self.pooled
        amax, axis = self._scale(reader)
        written = self.needed.setdefault(self.pooled.get(value, value), [])
        if self._find(written, amax, axis, pooled) is None:
            name = self._name(self._label(value) if amax is None else f"{self._label(value)}.packed")
            written.append(Form(name=name, amax=amax, axis=cast(Any, axis), pooled=pooled))

    def _find(self, forms: list[Form], amax: str | None, axis: str, pooled: bool) -> Form | None:
        for form in forms:
            same = form.pooled == pooled and (form.amax is None) == (amax is None)
            if same and (amax is None or (form.axis == axis and self._equal(cast(str, form.amax), amax))):
                return form
        return None

    def _equal(self, one: str, other: str) -> bool:
        amaxes = [self.constants[name.removesuffix(".input_amax")].input_amax for name in (one, other)]
        return bool(amaxes[0] == amaxes[1])

    def _scale(self, reader: ir.Node | None) -> tuple[str | None, str]:
        """(the amax that a reader wants its input packed with, along which axis)."""
        if reader is None or self._quantized(reader) is None:
            return None, "channels"
        return f"{reader.layer}.input_amax", "last" if reader.op == "linear" else "channels"

    def _read(self, value: str, reader: ir.Node | None) -> str:
        """The name of the form that a reader takes."""
        amax, axis = self._scale(reader)
        form = self._find(self.needed[self.pooled.get(value, value)], amax, axis, value in self.pooled)
        assert form is not None
        return form.name

    def _label(self, value: str) -> str:
        """Layers name what they write; anything else is named after its operation, whatever torch calls it."""
        node = self.producers.get(value)
        if node is None:
            return value
        folded = (each for each in self.captured.nodes if self.folded.get(each.name) == value)
        owner = node if node.parameters else next(folded, node)
        if owner.parameters and owner.layer and owner.op not in ("add", "mul", "sub", "div"):
            return owner.layer
        return LOGITS if [value] == [each for _, each in self.captured.outputs] else node.op

    def _name(self, wanted: str) -> str:
        name, number = wanted, 1
        while name in self.names:
            number += 1
            name = f"{wanted}.{number}"
        self.names.add(name)
        return name

    def _rank(self, value: str) -> int:
        return len(self.captured.values[value].shape)

    # Nodes

    def _input(self, name: str) -> Input:
        sizes = [self.captured.example[f"{name}.{axis}"] for axis in range(self._rank(name))]
        dynamic = any(not isinstance(size, int) for size in self.captured.values[name].shape[2:])
        holding = [node for node in self.captured.nodes if node.op in HOLDING and _holds_sizes(node)]
        free = self._free(name)
        if not dynamic and not holding and self._rank(name) == 4:
            free = [0, 2, 3]
        forms = self.needed.get(name, [Form(name=self._name(name))])
        sizes[0] = 1
        if self.digits:
            sizes[1] = 3
        self._amaxes(forms)
        return Input(name=name, shape=sizes, free=free, outputs=forms)

    def _free(self, name: str) -> list[int]:
        """The axes of an input that may have any size; two axes that the code makes equal are fixed."""
        shape = self.captured.values[name].shape
        depends = {axis: axes_of([size]) - {f"{name}.{axis}"} for axis, size in enumerate(shape) if axis}
        equal = {other for others in depends.values() for other in others}
        return [0] + [
            axis
            for axis, others in depends.items()
            if not isinstance(shape[axis], int) and not others and f"{name}.{axis}" not in equal
        ]

    def _emit(self, node: ir.Node) -> None:
        if node.name in self.pooled or node.name in self.folded.values():
            return
        if node.op == "concat" and self._written_nowhere(node):
            return
        value = self.folded.get(node.name, node.name)
        forms = self.needed[value]
        self._amaxes(forms)
        writer = WRITERS.get(node.op)
        if writer is None:
            raise InputError(
                f"{node.described} has no packed form. Leave it out of the network, or export it as ONNX: "
                "fp4deploy.export.export_graph"
            )
        self.nodes.append(writer(self, node, forms))

    def _amaxes(self, forms: list[Form]) -> None:
        for form in forms:
            if form.amax is not None:
                self.tensors[form.amax] = torch.tensor(self.constants[form.amax.removesuffix(".input_amax")].input_amax)

    def reads(self, node: ir.Node) -> list[str]:
        """The activations that a node reads, in the order of its roles; parameters become constants."""
        roles = sorted({*node.inputs, *node.parameters}, key=_order)
        return [
            self._read(node.inputs[role], node) if role in node.inputs else self.constant(node.parameters[role])
            for role in roles
        ]

    def constant(self, name: str) -> str:
        """An activation that a tensor of the file is."""
        self.half(name, self.state[name])
        form = Form(name=self._name(name))
        self.nodes.append(packed.Constant(outputs=[form], tensor=name))
        return form.name

    def half(self, name: str, parameter: torch.Tensor) -> None:
        """Add a tensor in FP16."""
        if not torch.isfinite(parameter).all() or not torch.isfinite(parameter.half()).all():
            raise InputError(f"{name} holds NaN, Inf or a value beyond FP16. Export an earlier checkpoint.")
        self.tensors[name] = parameter.detach().half()

    def layer(self, node: ir.Node, with_bias: bool) -> dict[str, Any]:
        """Fields of a layer; its tensors are added to the file."""
        name = _owner(node)
        bias = self.bias(node) if with_bias else None
        if self._quantized(node) is None:
            weight = self.state[node.parameters["weight"]]
            order = {"conv": (0, 2, 3, 1), "conv_transpose": (1, 2, 3, 0), "linear": (0, 1)}[node.op]
            self.half(f"{name}.weight", weight.permute(order))
            return {"layer": name, "precision": "fp16", "bias": bias}
        constants = self.constants[name]
        rows = constants.shape[:-1]
        codes, scales = torch.from_numpy(constants.codes), torch.from_numpy(constants.scales.view("uint8"))
        weight_name = f"{name}.weight"
        self.tensors[f"{weight_name}.codes"] = codes.reshape(*rows, -1)
        self.tensors[f"{weight_name}.scales"] = scales.reshape(*rows, -1).view(torch.float8_e4m3fn)
        self.tensors[f"{weight_name}.amax"] = torch.tensor(constants.weight_amax)
        return {"layer": name, "precision": "nvfp4", "e4m3_max": constants.e4m3_max, "bias": bias}

    def bias(self, node: ir.Node) -> str | None:
        """The name of a layer's bias, added to the file."""
        name = node.parameters.get("bias")
        if name is not None:
            self.half(name, self.state[name])
        return name

    def gives_bias(self, node: ir.Node) -> ir.Node | None:
        """The group norm that adds the bias of a convolution: the only reader, of which ReLU is the only one."""
        reader = self._only_reader(node.name)
        taken = node.op == "conv" and reader is not None and reader.op == "group_norm" and reader.name in self.folded
        return reader if taken and node.parameters.get("bias") else None

    def relu(self, node: ir.Node) -> bool:
        """Whether a node computes the ReLU that follows as well."""
        return node.name in self.folded


def _owner(node: ir.Node) -> str:
    """The layer whose weight a node reads; a parameter that is no layer's weight stands for itself."""
    return node.parameters["weight"].removesuffix(".weight")


def _holds_sizes(node: ir.Node) -> bool:
    """A node that stands for one size of the input only, where the graph was captured with fixed sizes."""
    if node.op == "resize":
        return node.attributes["size"] is not None
    if node.op in ("slice", "select"):
        return node.attributes["dim"] > 1
    return True


def _order(role: str) -> tuple[int, int]:
    head, _, number = role.partition(".")
    known = ("input", "query", "key", "value", "tensors", "other")
    return (known.index(head) if head in known else len(known), int(number) if number.isdigit() else 0)


def _size(size: Size) -> Any:
    return size if isinstance(size, int) else list(size)


def _sizes(sizes: Any) -> list[Any]:
    return [_size(size) for size in sizes]


Write = Callable[[_Writer, ir.Node, list[Form]], packed.Node]


def _refuse(node: ir.Node, cause: str) -> InputError:
    return InputError(f"{node.described}: {cause}, which has no packed form.")


def _conv(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    _two_dimensional(node)
    source = node.inputs["input"]
    if (source, node.name) in writer.joined:
        inputs = [writer._read(value, node) for value in writer.producers[source].inputs.values()]
    else:
        inputs = [writer._read(source, node)]
    attributes = node.attributes
    return packed.Conv2d(
        inputs=inputs,
        outputs=forms,
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        dilation=list(attributes["dilation"]),
        groups=attributes["groups"],
        relu=writer.relu(node),
        **writer.layer(node, with_bias=writer.gives_bias(node) is None),
    )


def _conv_transpose(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    _two_dimensional(node)
    attributes = node.attributes
    return packed.ConvTranspose2d(
        inputs=[writer._read(node.inputs["input"], node)],
        outputs=forms,
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        output_padding=list(attributes["output_padding"]),
        dilation=list(attributes["dilation"]),
        groups=attributes["groups"],
        **writer.layer(node, with_bias=True),
    )


def _two_dimensional(node: ir.Node) -> None:
    if len(node.attributes["weight_shape"]) != 4:
        raise _refuse(node, f"a convolution over {len(node.attributes['weight_shape']) - 2} axes")


def _linear(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    inputs = [writer._read(node.inputs["input"], node)]
    return packed.Linear(inputs=inputs, outputs=forms, relu=writer.relu(node), **writer.layer(node, with_bias=True))


def _group_norm(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    groups, eps = node.attributes["num_groups"], node.attributes["eps"]
    if not writer.relu(node):
        return _norm(writer, node, forms, groups=groups)
    before = writer.producers.get(node.inputs["input"])
    bias = writer.bias(before) if before is not None and writer.gives_bias(before) is node else None
    layer = _owner(node)
    for part in ("weight", "bias"):
        writer.half(f"{layer}.{part}", writer.state[node.parameters[part]])
    inputs = [writer._read(node.inputs["input"], node)]
    return packed.GroupNormReLU(layer=layer, inputs=inputs, outputs=forms, groups=groups, eps=eps, bias=bias)


def _norm(writer: _Writer, node: ir.Node, forms: list[Form], **more: Any) -> packed.Node:
    layer = None
    if "weight" in node.parameters:
        layer = _owner(node)
        weight = writer.state[node.parameters["weight"]]
        bias = writer.state[node.parameters["bias"]] if "bias" in node.parameters else torch.zeros_like(weight)
        writer.half(f"{layer}.weight", weight)
        writer.half(f"{layer}.bias", bias)
    inputs = [writer._read(node.inputs["input"], node)]
    op = cast(Any, node.op)
    return packed.Norm(op=op, layer=layer, inputs=inputs, outputs=forms, eps=node.attributes["eps"], **more)


def _layer_norm(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    return _norm(writer, node, forms, shape=[int(size) for size in node.attributes["normalized_shape"]])


def _instance_norm(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    if not node.attributes["use_input_stats"]:
        return _batch_norm(writer, node, forms)
    return _norm(writer, node, forms)


def _batch_norm(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    if node.attributes.get("training"):
        raise _refuse(node, "a BatchNorm without running statistics")
    state = {role: writer.state[name].detach().double() for role, name in node.parameters.items()}
    mean, variance = state["running_mean"], state["running_var"]
    scale = state.get("weight", torch.ones_like(mean)) / (variance + node.attributes["eps"]).sqrt()
    shift = state.get("bias", torch.zeros_like(mean)) - mean * scale
    layer = node.parameters["running_mean"].removesuffix(".running_mean")
    for part, value in (("scale", scale), ("shift", shift)):
        if not torch.isfinite(value).all():
            raise InputError(f"{layer} holds NaN or Inf. Export an earlier checkpoint.")
        writer.tensors[f"{layer}.{part}"] = value.float()
    return packed.Affine(layer=layer, inputs=[writer._read(node.inputs["input"], node)], outputs=forms)


PARAMETERS: dict[str, tuple[str, ...]] = {  # activation function -> its numbers among ATen's arguments
    "leaky_relu": ("negative_slope",),
    "elu": ("alpha",),
    "softplus": ("beta", "threshold"),
    "hardtanh": ("min_val", "max_val"),
    "clamp": ("min", "max"),
}
LIMITS = {"min": -65504.0, "max": 65504.0}


def _activation(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    if node.op == "prelu":
        raise _refuse(node, "a PReLU")
    if node.op == "elu" and (node.attributes.get("scale", 1) != 1 or node.attributes.get("input_scale", 1) != 1):
        raise _refuse(node, "an ELU with scales")
    given = [node.attributes[name] for name in PARAMETERS.get(node.op, ())]
    names = PARAMETERS.get(node.op, ())
    numbers = [LIMITS[name] if value is None else float(value) for name, value in zip(names, given, strict=True)]
    function = "clamp" if node.op == "hardtanh" else node.op
    if node.op == "gelu" and node.attributes.get("approximate", "none") == "tanh":
        function = "gelu_tanh"
    inputs = [writer._read(node.inputs["input"], node)]
    return packed.Activation(function=cast(Any, function), parameters=numbers, inputs=inputs, outputs=forms)


def _arithmetic(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    number = node.attributes.get("number")
    if number is not None and not isinstance(number, int | float):
        raise _refuse(node, "arithmetic with a size")
    return packed.Arithmetic(
        op=cast(Any, node.op),
        inputs=writer.reads(node),
        outputs=forms,
        number=None if number is None else float(number),
        alpha=float(node.attributes.get("alpha", 1)),
    )


def _concat(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    return packed.Concat(inputs=writer.reads(node), outputs=forms, dim=node.attributes["dim"])


def _pool(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    attributes = node.attributes
    if attributes.get("divisor_override"):
        raise _refuse(node, "an average over another count")
    return packed.Pool(
        op=cast(Any, node.op),
        inputs=[writer._read(node.inputs["input"], node)],
        outputs=forms,
        kernel=list(attributes["kernel_size"]),
        stride=list(attributes["stride"]),
        padding=list(attributes["padding"]),
        dilation=list(attributes.get("dilation", (1, 1))),
        ceil_mode=attributes["ceil_mode"],
        count_padding=bool(attributes.get("count_include_pad", True)),
    )


def _adaptive(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    function: Any = "avg" if node.op == "adaptive_avg_pool" else "max"
    inputs = [writer._read(node.inputs["input"], node)]
    return packed.AdaptivePool(
        function=function, inputs=inputs, outputs=forms, size=_sizes(node.attributes["output_size"])
    )


def _reduce(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    inputs = [writer._read(node.inputs["input"], node)]
    dims = [int(dim) for dim in node.attributes["dim"]]
    function = cast(Any, node.op)
    return packed.Reduce(function=function, dims=dims, keep=node.attributes["keepdim"], inputs=inputs, outputs=forms)


def _resize(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    size, scale = node.attributes["size"], node.attributes["scale"]
    return packed.Resize(
        mode=node.attributes["mode"],
        inputs=[writer._read(node.inputs["input"], node)],
        outputs=forms,
        size=None if size is None else _sizes(size),
        scale=None if scale is None else list(scale),
        align_corners=node.attributes["align_corners"],
    )


def _shuffle(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    inputs = [writer._read(node.inputs["input"], node)]
    return packed.PixelShuffle(op=cast(Any, node.op), factor=node.attributes["factor"], inputs=inputs, outputs=forms)


def _reshape(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    shape = _sizes(node.attributes["shape"])
    return packed.Reshape(op=cast(Any, node.op), shape=shape, inputs=writer.reads(node), outputs=forms)


def _permute(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    return packed.Permute(dims=list(node.attributes["dims"]), inputs=writer.reads(node), outputs=forms)


def _slice(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    end = node.attributes["end"]
    return packed.Slice(
        dim=node.attributes["dim"],
        start=_size(node.attributes["start"]),
        end=None if end is None else _size(end),
        step=node.attributes["step"],
        inputs=writer.reads(node),
        outputs=forms,
    )


def _select(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    index = _size(node.attributes["index"])
    return packed.Select(dim=node.attributes["dim"], index=index, inputs=writer.reads(node), outputs=forms)


def _pad(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    attributes = node.attributes
    return packed.Pad(
        pad=_sizes(attributes["pad"]),
        mode=attributes["mode"],
        value=attributes["value"],
        inputs=[writer._read(node.inputs["input"], node)],
        outputs=forms,
    )


def _matmul(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    return packed.Matmul(inputs=writer.reads(node), outputs=forms)


def _softmax(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    return packed.Softmax(dim=node.attributes["dim"], inputs=writer.reads(node), outputs=forms)


def _attention(writer: _Writer, node: ir.Node, forms: list[Form]) -> packed.Node:
    if "attn_mask" in node.inputs or "attn_mask" in node.parameters or node.attributes.get("enable_gqa"):
        raise _refuse(node, "an attention with a mask or grouped queries")
    scale, causal = node.attributes["scale"], bool(node.attributes["is_causal"])
    return packed.Attention(
        inputs=writer.reads(node), outputs=forms, causal=causal, scale=None if scale is None else float(scale)
    )


WRITERS: dict[str, Write] = {
    "conv": _conv,
    "conv_transpose": _conv_transpose,
    "linear": _linear,
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "layer_norm": _layer_norm,
    "batch_norm": _batch_norm,
    **dict.fromkeys(
        ("relu", "relu6", "leaky_relu", "elu", "selu", "silu", "gelu", "hardswish", "hardsigmoid", "hardtanh",
         "sigmoid", "tanh", "softplus", "mish", "clamp", "prelu"), _activation
    ),
    **dict.fromkeys(("add", "sub", "mul", "div"), _arithmetic),
    "concat": _concat,
    **dict.fromkeys(("max_pool", "avg_pool"), _pool),
    **dict.fromkeys(("adaptive_avg_pool", "adaptive_max_pool"), _adaptive),
    **dict.fromkeys(("mean", "sum", "amax", "amin"), _reduce),
    "resize": _resize,
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), _shuffle),
    **dict.fromkeys(("reshape", "expand"), _reshape),
    "permute": _permute,
    "slice": _slice,
    "select": _select,
    "pad": _pad,
    "matmul": _matmul,
    "softmax": _softmax,
    "attention": _attention,
}  # fmt: skip
