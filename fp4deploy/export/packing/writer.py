"""Values, forms and parameters of a packed network while it is written; its readers decide what is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor, nn

from fp4deploy.errors import InputError
from fp4deploy.export.onnx.layer_constants import (
    Constants,
    EightBitConstants,
    LayerConstants,
    expert_constants,
    layer_constants,
)
from fp4deploy.formats import NVFP4_BLOCK
from fp4deploy.graph import ir
from fp4deploy.graph.capture import Dynamic
from fp4deploy.graph.operators import ARITHMETIC
from fp4deploy.graph.sizes import Size, axes_of
from fp4deploy.packed import graph as packed
from fp4deploy.packed.graph import Form, Graph, Input, Output
from fp4deploy.qat.experts import QuantExperts
from fp4deploy.qat.layers import QuantizedLayer
from fp4deploy.rest import FP32, Rest

Tensors = dict[str, torch.Tensor]
POINTWISE = (*ARITHMETIC, "where")
HOLDING = (  # nodes that may hold sizes
    "reshape", "expand", "resize", "slice", "select", "pad", "take", "roll", "repeat", "fold",
)  # fmt: skip
PARAMETERS = ("weight", "bias", "running_mean", "running_var")  # roles that tensors of the file have
LOGITS = "logits"
Write = Callable[["Writer", ir.Node, list[Form]], packed.Node]


class Writer:
    """Nodes, forms and tensors as they are written; `operators` maps an operation to the function that writes it."""

    def __init__(
        self,
        captured: ir.Graph,
        model: nn.Module,
        digits: bool,
        operators: Mapping[str, Write],
        free: bool,
        rest: Rest,
        dynamic: Dynamic,
    ) -> None:
        self.captured, self.model, self.digits, self.operators, self.free = captured, model, digits, operators, free
        self.rest, self.dynamic = rest, dynamic
        self.modules = dict(model.named_modules(remove_duplicate=False))  # a module may have several names
        owned = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.state = {**captured.constants, **dict(owned)}
        self.constants: dict[str, Constants] = {}
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
        self.wide: dict[str, list[str]] = {}  # module of `Rest.wide` -> what its code writes

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
        outputs = [Output(name=name, activation=self.read(value, None)) for name, value in self.captured.outputs]
        settings: dict[str, Any] = {"digits": self.digits, "rest": self.rest.name, "wide": self.wide}
        graph = Graph(inputs=inputs, nodes=self.nodes, outputs=outputs, tensors={}, **settings)
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
        layer = self._in_nvfp4(node)
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
        module = self.modules.get(owner(node), self.modules.get(node.layer))  # a weight may be no layer's parameter
        return module if isinstance(module, QuantizedLayer) else None

    def _in_nvfp4(self, node: ir.Node) -> LayerConstants | None:
        """Of a layer that reads packed activations; one in W4A8 quantises plain ones itself."""
        found = self.constants.get(node.layer) if self._quantized(node) is not None else None
        return found if isinstance(found, LayerConstants) else None

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
        return bool(self._input_amax(one) == self._input_amax(other))

    def _input_amax(self, name: str) -> np.float32:
        return cast(LayerConstants, self.constants[name.removesuffix(".input_amax")]).input_amax

    def _scale(self, reader: ir.Node | None) -> tuple[str | None, str]:
        """(the amax that a reader wants its input packed with, along which axis)."""
        if reader is None or self._in_nvfp4(reader) is None:
            return None, "channels"
        return f"{reader.layer}.input_amax", "last" if reader.op == "linear" else "channels"

    def read(self, value: str, reader: ir.Node | None) -> str:
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
        holding = [node for node in self.captured.nodes if self._holds_sizes(node)]
        free = self._free(name)
        if self.free and not dynamic and not holding and self._rank(name) == 4:
            free = [*free, 2, 3]
        forms = self.needed.get(name, [Form(name=self._name(name))])
        sizes[0] = 1 if 0 in free else sizes[0]
        if self.digits:
            sizes[1] = 3
        self._amaxes(forms)
        held = self.captured.values[name].dtype
        dtype = "float32" if held.is_floating_point else "bool" if held == torch.bool else "int64"
        return Input(name=name, shape=sizes, free=free, dtype=cast(Any, dtype), outputs=forms)

    def _holds_sizes(self, node: ir.Node) -> bool:
        """A node that stands for one size of the input only, where the graph was captured with fixed sizes."""
        if node.op == "resize":
            return node.attributes["size"] is not None
        if node.op in ("slice", "select", "take"):
            return node.attributes["dim"] > 1
        return node.op in HOLDING or (node.op in POINTWISE and self._places(node))

    def _places(self, node: ir.Node) -> bool:
        """Whether a constant that a pointwise node reads has a value for each row or column."""
        rank = self._rank(node.name)
        shapes = [self.state[name].shape for name in node.parameters.values()]
        return any(size > 1 for shape in shapes for size in tuple(shape)[max(0, 2 - rank + len(shape)) :])

    def _free(self, name: str) -> list[int]:
        """The axes of an input that may have any size; axes that the code makes equal, of all inputs, are fixed.

        But for those that were asked for: what the network computes refuses sizes that differ.
        """
        shapes = {each: self.captured.values[each].shape for each in self.captured.inputs}
        depends = {
            (each, axis): axes_of([size]) - {f"{each}.{axis}"}
            for each, shape in shapes.items()
            for axis, size in enumerate(shape)
            if axis
        }
        equal = {other for others in depends.values() for other in others}
        asked = {(each, axis) for each, axes in self.dynamic.items() for axis in axes}
        batch = [] if isinstance(shapes[name][0], int) else [0]
        return batch + [
            axis
            for (each, axis), others in depends.items()
            if each == name
            and not isinstance(shapes[each][axis], int)
            and ((each, axis) in asked or (not others and f"{each}.{axis}" not in equal))
        ]

    def _emit(self, node: ir.Node) -> None:
        if node.name in self.pooled or node.name in self.folded.values():
            return
        if node.op == "concat" and self._written_nowhere(node):
            return
        value = self.folded.get(node.name, node.name)
        forms = self.needed[value]
        self._amaxes(forms)
        writer = self.operators.get(node.op)
        if writer is None:
            raise InputError(
                f"{node.described} has no packed form. Leave it out of the network, or export it as ONNX: "
                "fp4deploy.export.export_graph"
            )
        computed = next((role for role in PARAMETERS if role in node.inputs), None)
        if computed is not None:
            raise refuse(node, f"its {computed} is what other nodes compute")
        try:
            written = writer(self, node, forms)
            self.nodes.append(written)
            if node.layer in self.rest.wide and not isinstance(written, packed.Layer):
                self.wide.setdefault(node.layer, []).extend(form.name for form in forms)
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise refuse(node, f"{field} is {first['input']!r:.80} ({first['msg'].lower()})") from error

    def _amaxes(self, forms: list[Form]) -> None:
        for form in forms:
            if form.amax is None:
                continue
            amax = self._input_amax(form.amax)
            self.rest.require(form.amax, torch.tensor(amax))
            self.tensors[form.amax] = torch.tensor(amax)

    def source(self, node: ir.Node) -> str:
        """The activation that a node reads as its input; a parameter becomes a constant."""
        return self.reads(node, ("input",))[0]

    def reads(self, node: ir.Node, order: tuple[str, ...] = ()) -> list[str]:
        """The activations that a node reads, in the order of its roles; parameters become constants."""
        given = {*node.inputs, *node.parameters}
        roles = [role for role in order if role in given] if order else sorted(given, key=role_order)
        return [
            self.read(node.inputs[role], node) if role in node.inputs else self.constant(node.parameters[role], node)
            for role in roles
        ]

    def constant(self, name: str, reader: ir.Node) -> str:
        """An activation that a tensor of the file is, in the form that its reader takes."""
        owner, _, own = name.rpartition(".")
        experts = self.modules.get(owner)
        if isinstance(experts, QuantExperts) and own in experts.names:
            return self._experts(owner, experts, own)
        self.keep(name, self.state[name])
        amax, axis = self._scale(reader)
        form = Form(name=self._name(name if amax is None else f"{name}.packed"), amax=amax, axis=cast(Any, axis))
        self._amaxes([form])
        self.nodes.append(packed.Constant(outputs=[form], tensor=name))
        return form.name

    def _experts(self, name: str, experts: QuantExperts, own: str) -> str:
        """The weights of experts, decoded, in the order of axes of the module."""
        constants, weight = expert_constants(name, experts, own), f"{name}.{own}"
        rows = constants.shape[:-1]
        codes, scales = torch.from_numpy(constants.codes), torch.from_numpy(constants.scales.view("uint8"))
        self.tensors[f"{weight}.codes"] = codes.view(*rows, -1)
        self.tensors[f"{weight}.scales"] = scales.view(*rows, -1).view(torch.float8_e4m3fn)
        self.tensors[f"{weight}.amax"] = torch.from_numpy(constants.weight_amax)[:, None]
        form = Form(name=self._name(weight))
        self.nodes.append(packed.Experts(outputs=[form], tensor=weight, e4m3_max=cast(Any, constants.e4m3_max)))
        if constants.order == (0, 1, 2):
            return form.name
        return self.step(packed.Permute, form.name, f"{weight}.transposed", dims=list(constants.order))

    def step(self, kind: Any, read: str, label: str, **fields: Any) -> str:
        """A node that stands for no node of the captured graph; the plain activation that it writes."""
        return self.steps(kind, [read], label, **fields)

    def steps(self, kind: Any, reads: list[str], label: str, **fields: Any) -> str:
        """`step` of a node with several inputs."""
        form = Form(name=self._name(label))
        self.nodes.append(kind(inputs=reads, outputs=[form], **fields))
        return form.name

    def shape(self, node: ir.Node, role: str) -> tuple[Size, ...]:
        """Of what a node reads: an activation, or a tensor of the file."""
        if role in node.inputs:
            return self.captured.values[node.inputs[role]].shape
        return tuple(self.state[node.parameters[role]].shape)

    def keep(self, name: str, value: torch.Tensor) -> None:
        """Add a tensor that the module's code reads or computes: a parameter in the rest, anything computed in FP32."""
        value = value.float() if value.dtype == torch.bool else value
        if name not in self.captured.constants and not self.rest.is_wide_number(value):
            self.plain(name, value)
            return
        value = value.detach().float()
        limit = self.rest.largest if self.rest.holds_tensor(value) else FP32.largest  # of an infinite number
        value = value.clamp(-limit, limit)
        if not torch.isfinite(value).all():
            raise InputError(f"{name} holds NaN. Export an earlier checkpoint.")
        self.tensors[name] = value

    def plain(self, name: str, parameter: torch.Tensor) -> None:
        """Add a tensor in the precision of the rest."""
        self.rest.require(name, parameter)
        rounded = parameter.detach().to(self.rest.dtype)
        if not parameter.is_floating_point() and not torch.equal(rounded.to(parameter.dtype), parameter):
            raise InputError(
                f"{name} holds whole numbers that {self.rest.label} rounds. Make it a tensor of floating point numbers."
            )
        self.tensors[name] = rounded

    def layer(self, node: ir.Node, with_bias: bool) -> dict[str, Any]:
        """Fields of a layer; its tensors are added to the file."""
        bias = self.bias(node) if with_bias else None
        layer = self._quantized(node)
        if layer is None:
            name = owner(node)
            weight = self.state[node.parameters["weight"]]
            if node.op != "linear":
                weight = weight.movedim(1 if node.op == "conv" else 0, -1)  # O, taps, C
            if name.startswith(ir.COMPUTED):
                self.tensors[f"{name}.weight"] = weight.detach().float()
            else:
                self.plain(f"{name}.weight", weight)
            return {"layer": name, "precision": self.rest.name, "bias": bias}
        name = node.layer
        constants, weight_name = self.constants[name], f"{name}.weight"
        if isinstance(constants, EightBitConstants):
            self._eight_bits(name, constants)
            return {"layer": name, "precision": layer.recipe.precision.lower(), "bias": bias}
        rows = constants.shape[:-1]
        codes, scales = torch.from_numpy(constants.codes), torch.from_numpy(constants.scales.view("uint8"))
        self.tensors[f"{weight_name}.codes"] = codes.reshape(*rows, -1)
        scales = self.tensors[f"{weight_name}.scales"] = scales.reshape(*rows, -1)
        if not isinstance(constants, LayerConstants):
            return {"layer": name, "precision": "w4a8", "bias": bias}
        self.tensors[f"{weight_name}.scales"] = scales.view(torch.float8_e4m3fn)
        self.tensors[f"{weight_name}.amax"] = torch.tensor(constants.weight_amax)
        return {"layer": name, "precision": "nvfp4", "e4m3_max": constants.e4m3_max, "bias": bias}

    def _eight_bits(self, name: str, constants: EightBitConstants) -> None:
        """Add the weight [O, taps, C] of a layer in FP8 or INT8, and the amax of its input."""
        codes = torch.from_numpy(constants.codes.view("uint8")).movedim(constants.axis, 0).movedim(1, -1).contiguous()
        weight, dtype = f"{name}.weight", torch.int8 if constants.codes.dtype == "int8" else torch.float8_e4m3fn
        amax = cast(Tensor, self.modules[name].input_amax).detach().float().cpu()
        self.rest.require(f"{name}.input_amax", amax)
        self.tensors[f"{weight}.codes"] = codes.view(dtype)
        self.tensors[f"{weight}.scales"] = torch.from_numpy(constants.scales.astype("float32"))
        self.tensors[f"{weight}.amax"] = amax.reshape(())

    def bias(self, node: ir.Node) -> str | None:
        """The name of a layer's bias, added to the file."""
        name = node.parameters.get("bias")
        if name is not None:
            self.plain(name, self.state[name])
        return name

    def gives_bias(self, node: ir.Node) -> ir.Node | None:
        """The group norm that adds the bias of a convolution: the only reader, of which ReLU is the only one."""
        reader = self._only_reader(node.name)
        taken = node.op == "conv" and reader is not None and reader.op == "group_norm" and reader.name in self.folded
        return reader if taken and node.parameters.get("bias") else None

    def relu(self, node: ir.Node) -> bool:
        """Whether a node computes the ReLU that follows as well."""
        return node.name in self.folded


def owner(node: ir.Node) -> str:
    """The layer whose weight a node reads; a parameter that is no layer's weight stands for itself."""
    return node.parameters["weight"].removesuffix(".weight")


def role_order(role: str) -> tuple[int, int]:
    """Places roles in the order in which nodes read them."""
    head, _, number = role.partition(".")
    known = ("input", "query", "key", "value", "tensors", "other")
    return (known.index(head) if head in known else len(known), int(number) if number.isdecimal() else 0)


def size_value(size: Size) -> object:
    """A size as the file has it: a number, or an expression of the input's sizes."""
    return size if isinstance(size, int) else list(size)


def size_values(sizes: Any) -> list[Any]:
    """Each of several sizes."""
    return [size_value(size) for size in sizes]


def refuse(node: ir.Node, cause: str) -> InputError:
    """The error of a node that has no packed form, and why."""
    return InputError(f"{node.described}: {cause}, which has no packed form.")
